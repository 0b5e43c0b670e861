"""A bridge from the IO thread's callbacks to a thread that blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch_bps.errors import BytePSError, OperationTimeout

log = logging.getLogger("torch_bps.core")

_SAY_EVERY_S = 5.0
_CHECK_EVERY_S = 0.5


class Waiting:
    """Counts answers in the IO thread, waited for in another.

    Thread safety: `one` in the IO thread, `wait` in one other.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.error: BytePSError | None = None
        self._event = threading.Event()
        if not total:
            self._event.set()

    def one(self, error: BytePSError | None) -> None:
        """One more answer; the first error ends the wait."""
        if error is not None:
            self.error = self.error or error
            self._event.set()
            return
        self.done += 1
        if self.done == self.total:
            self._event.set()

    def servers_up(self) -> str:
        """Return "waiting for servers: 1 of 2 up"."""
        return f"waiting for servers: {self.done} of {self.total} up"

    def wait(self, deadline_s: float, text: Callable[[], str], check: Callable[[], None] = lambda: None) -> None:
        """Wait for all answers or the first error (then see `error`). Ctrl-C gets through.

        Args:
            check: called now and then; raises if there is no use in waiting on.

        Raises:
            OperationTimeout: neither came by `deadline_s`; `text` says what was awaited.
        """
        said_s = time.monotonic()
        while not self._event.wait(min(_CHECK_EVERY_S, max(0.0, deadline_s - time.monotonic()))):
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise OperationTimeout(f"Timed out {text()}")
            check()
            if now_s - said_s >= _SAY_EVERY_S:
                said_s = now_s
                log.warning("%s", text())
