"""One epoll loop in one thread: the place where every channel, timer and handler of a process runs.

Called by core.runtime (a rank) and server.__main__ (a server). asyncio is not used: its streams copy, and its
protocol callbacks cannot say where a payload is to be received (see docs/design.md).
"""

from __future__ import annotations

import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("torch_bps.transport")

_MAX_WAIT_S = 3600.0


class ReactorTimer:
    """A callback in the reactor's heap of timers."""

    __slots__ = ("due_s", "function")

    def __init__(self, due_s: float, function: Callable[[], None]) -> None:
        self.due_s = due_s
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Never call it; it stays in the heap, empty, until its time."""
        self.function = None

    def __lt__(self, other: ReactorTimer) -> bool:
        return self.due_s < other.due_s


class EpollReactor:
    """The loop (transport.base.Reactor).

    Thread safety: `call`, `start`, `stop`, `in_thread` from any thread, the rest from the reactor's own. A test may
    drive the loop itself with `run_once` instead of `start`; then the caller's thread is the reactor's.

    Args:
        name: of the thread, and in log lines.
        on_crash: called in the loop with an exception that a callback let through (a bug of ours). The loop goes on.
    """

    def __init__(self, name: str = "byteps-io-0", on_crash: Callable[[BaseException], None] | None = None) -> None:
        self.name = name
        self._on_crash = on_crash
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._callbacks: dict[int, Callable[[int], None]] = {self._wakeup: self._on_wakeup}
        self._fresh: set[int] = set()  # added in this round: what epoll said before is about another descriptor
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timers: list[ReactorTimer] = []
        self._awake = False  # a wake-up is already under way
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._ident = threading.get_ident()

    # ---- any thread

    def start(self) -> None:
        """Run the loop in a thread of its own."""
        self._running = True
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop, join its thread, close its descriptors. Raises TimeoutError if the thread does not end."""
        self._running = False
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"thread {self.name} did not end within {timeout_s:g} s")
        self._close()

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function(*arguments)` soon in the reactor's thread."""
        self._calls.append((function, arguments))
        if not self._awake:
            self._wake()

    def in_thread(self) -> bool:
        """Whether the caller is the reactor's thread."""
        return threading.get_ident() == self._ident

    def close_in_child(self) -> None:
        """Close the descriptors that a forked child inherited; the loop's thread does not exist there."""
        self._running = False
        self._close()

    def fds(self) -> list[int]:
        """Return the descriptors that are watched, the reactor's own included."""
        return [*self._callbacks, self._epoll.fileno()]

    # ---- the reactor's thread

    def call_later(self, delay_s: float, function: Callable[[], None]) -> ReactorTimer:
        """Run `function()` after `delay_s` seconds."""
        timer = ReactorTimer(time.monotonic() + delay_s, function)
        heapq.heappush(self._timers, timer)
        return timer

    def add(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Watch `fd`, level-triggered; `callback(events)`."""
        self._epoll.register(fd, events)
        self._callbacks[fd] = callback
        self._fresh.add(fd)

    def modify(self, fd: int, events: int) -> None:
        """Change what `fd` is watched for."""
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Stop watching `fd`; call it before the descriptor is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run_once(self, max_wait_s: float = 0.0) -> None:
        """Do what is due: wait for descriptors up to `max_wait_s`, then run callbacks, calls and timers."""
        self._ident = threading.get_ident()
        wait_s = 0.0 if self._calls else min(max_wait_s, self._next_timer_s())
        self._fresh.clear()
        for fd, events in self._epoll.poll(max(wait_s, 0.0)):
            callback = self._callbacks.get(fd)  # an earlier callback of this round may have removed it
            if callback is not None and fd not in self._fresh:
                self._guard(callback, events)
        for _ in range(len(self._calls)):  # calls made meanwhile wait for the next round: descriptors get their turn
            if not self._calls:
                break  # one of them stopped the reactor
            function, arguments = self._calls.popleft()
            self._guard(function, *arguments)
        now = time.monotonic()
        while self._timers and self._timers[0].due_s <= now:
            function_due = heapq.heappop(self._timers).function
            if function_due is not None:
                self._guard(function_due)

    # ---- inside

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while self._running:
            self.run_once(_MAX_WAIT_S)

    def _next_timer_s(self) -> float:
        while self._timers and self._timers[0].function is None:
            heapq.heappop(self._timers)
        return self._timers[0].due_s - time.monotonic() if self._timers else _MAX_WAIT_S

    def _wake(self) -> None:
        self._awake = True
        if self._closed:
            return  # the descriptor's number may be somebody else's by now
        try:
            os.eventfd_write(self._wakeup, 1)
        except BlockingIOError:
            pass  # the counter is full, so the loop wakes anyway

    def _on_wakeup(self, events: int) -> None:
        os.eventfd_read(self._wakeup)
        self._awake = False

    def _guard(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:
            log.exception("%s: callback %r failed", self.name, function)
            if self._on_crash is not None:
                self._on_crash(error)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._callbacks.clear()
        self._calls.clear()
        self._timers.clear()
        self._epoll.close()
        os.close(self._wakeup)
