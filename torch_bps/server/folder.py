"""Engine threads of a server: each adds the slots that hash to it, the most urgent first. The engine has one job of a
slot under way at a time, so those run in order whatever their priorities.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from torch_bps.server.slots import Slot
from torch_bps.transport.base import Reactor
from torch_bps.transport.turns import Turns

log = logging.getLogger("torch_bps.server")

_Job = tuple[Callable[[], None], Callable[[], None]]


class ThreadFolder:
    """server.service.Folder over `num_threads` threads.

    Thread safety: `submit` in the reactor's thread; `stop` from any thread but the engine threads.
    Barely filled slots (under 16 KiB) are added at once: handing over costs more than the add.
    """

    def __init__(self, reactor: Reactor, num_threads: int) -> None:
        self._reactor = reactor
        self._lock = threading.Lock()  # guards _turns
        self._turns: list[Turns[_Job]] = [Turns() for _ in range(num_threads)]
        self._wakeups: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(num_threads)]
        """True: a job waits; False: the end"""
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"byteps-engine-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, slot: Slot, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `job()` in an engine thread, then `done()` in the reactor's."""
        if slot.nbytes < 16384:
            job()
            done()
        else:
            number = hash(slot.key) % len(self._threads)
            with self._lock:
                self._turns[number].put(slot.header.priority, slot.nbytes, (job, done))
            self._wakeups[number].put(True)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End and join the threads; what is queued is still done."""
        for wakeup in self._wakeups:
            wakeup.put(False)
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self, number: int) -> None:
        turns, wakeup = self._turns[number], self._wakeups[number]
        while wakeup.get():
            with self._lock:
                job, done = turns.take()
            try:
                job()
            except Exception:
                log.exception("an add failed")  # `done` is never called: its ranks' timeouts report it
                continue
            self._reactor.call(done)
