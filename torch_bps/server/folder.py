"""Engine threads of a server: each adds the slots that hash to it, so jobs of one slot run in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from torch_bps.server.slots import Slot
from torch_bps.transport.base import Reactor

log = logging.getLogger("torch_bps.server")

_Job = tuple[Callable[[], None], Callable[[], None]]


class ThreadFolder:
    """server.service.Folder over `num_threads` threads.

    Thread safety: `submit` in the reactor's thread; `stop` from any thread but the engine threads.
    Barely filled slots (under 16 KiB) are added at once: handing over costs more than the add.
    """

    def __init__(self, reactor: Reactor, num_threads: int) -> None:
        self._reactor = reactor
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"byteps-engine-{number}", daemon=True)
            for number, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, slot: Slot, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `job()` in an engine thread, then `done()` in the reactor's."""
        if slot.nbytes < 16384:
            job()
            done()
        else:
            self._queues[hash(slot.key) % len(self._queues)].put((job, done))

    def stop(self, timeout_s: float = 5.0) -> None:
        """End and join the threads; what is queued is still done."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self, queue: SimpleQueue[_Job | None]) -> None:
        while (item := queue.get()) is not None:
            job, done = item
            try:
                job()
            except Exception:
                log.exception("an add failed")  # `done` is never called: its ranks' timeouts report it
                continue
            self._reactor.call(done)
