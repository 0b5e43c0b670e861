"""The threads that copy results back, complete futures and so run users' callbacks.

Never done on the IO thread: a callback may block in another collective, which that thread has to move. For the same
reason the number of threads is not bounded: one is started whenever a task finds all of them busy.

They must have ended when the interpreter does: a daemon thread inside a torch operation then aborts the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

log = logging.getLogger("torch_bps.backend")

_IDLE_S = 10.0
_JOIN_S = 10.0

Task = Callable[[], None]


class _Worker(threading.Thread):
    """One thread and the task that it is handed next."""

    def __init__(self, pool: Workers, number: int, task: Task) -> None:
        super().__init__(name=f"byteps-work-{number}", daemon=True)
        self._pool = pool
        self.inbox: SimpleQueue[Task | None] = SimpleQueue()
        self.inbox.put(task)

    def run(self) -> None:
        while self.run_one():
            pass

    def run_one(self) -> bool:
        """Wait for a task and run it; return False if there is none, and will not be. Leaves no task referenced."""
        task = self._pool._next(self)
        if task is None:
            return False
        try:
            task()
        except Exception:
            log.exception("in a callback of a collective")
        return True


class Workers:
    """A pool of threads named byteps-work-N, shared by the process's groups; it ends with the last of them.

    Thread safety: any thread; `post` is short and never waits for a task.

    Args:
        idle_s: a thread without work for this long ends.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._threads: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._stopping = False
        self._number = 0
        self._users = 0

    def acquire(self) -> None:
        """Say that one more group uses the pool."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Say that one group less does; the last one waits for all threads to end."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
        self.stop()

    def post(self, task: Task) -> None:
        """Run `task` soon in one of the threads, or here where no thread can be started. Its exceptions are logged."""
        with self._lock:
            if self._idle:
                self._idle.pop().inbox.put(task)
                return
            worker = _Worker(self, self._number, task)
            self._number += 1
            self._threads.add(worker)
        try:
            worker.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            with self._lock:
                self._threads.discard(worker)
            worker.run_one()

    def stop(self, timeout_s: float = _JOIN_S) -> None:
        """Let the threads end and wait for them. Called from one of them, it does not wait for that one."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            for worker in self._idle:
                worker.inbox.put(None)
            self._idle.clear()
            threads = list(self._threads)
        for thread in threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still runs a callback %.0f s after the last group was closed", thread.name, timeout_s)
        with self._lock:
            self._stopping = False

    def _next(self, worker: _Worker) -> Task | None:
        """Return the next task for `worker`, or None: it is to end."""
        try:
            return worker.inbox.get_nowait()
        except Empty:
            pass
        with self._lock:
            if self._stopping:
                self._threads.discard(worker)
                return None
            self._idle.append(worker)
        try:
            task = worker.inbox.get(timeout=self._idle_s)
        except Empty:
            with self._lock:
                if worker in self._idle:
                    self._idle.remove(worker)
                    self._threads.discard(worker)
                    return None
            task = worker.inbox.get(timeout=self._idle_s)  # it was handed one just now
        if task is None:
            with self._lock:
                self._threads.discard(worker)
        return task


workers = Workers()
"""The process's pool."""


def _forget_after_fork() -> None:
    # The child has none of the threads, and one of them may have held the lock. In place: others hold this object.
    workers.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_after_fork)
