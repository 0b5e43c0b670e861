"""Counts what travelled, as plain ints; read by the banner at the end of a run and, later, by metrics."""

from __future__ import annotations

import threading
import time
from collections import deque


class Traffic:
    """Counters of one client. Thread safety: any thread."""

    def __init__(self) -> None:
        self.pushed_nbytes: dict[str, int] = {}
        self.pulled_nbytes: dict[str, int] = {}
        self.results = 0
        self.operations = 0
        self.busy_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=4096)
        self._busy_until_s = 0.0
        self._lock = threading.Lock()

    def pushed(self, transport: str, nbytes: int) -> None:
        """Count a push."""
        with self._lock:
            self.pushed_nbytes[transport] = self.pushed_nbytes.get(transport, 0) + nbytes

    def pulled(self, transport: str, nbytes: int) -> None:
        """Count a result."""
        with self._lock:
            self.pulled_nbytes[transport] = self.pulled_nbytes.get(transport, 0) + nbytes

    def ended(self, duration_s: float) -> None:
        """Count an operation that ended well; the union of their times is the busy time."""
        with self._lock:
            self._ended(duration_s)

    def carried(self, transport: str, pushed_nbytes: int, pulled_nbytes: int, duration_s: float) -> None:
        """Count an operation that ended well, with all that it moved."""
        with self._lock:
            self.pushed_nbytes[transport] = self.pushed_nbytes.get(transport, 0) + pushed_nbytes
            self.pulled_nbytes[transport] = self.pulled_nbytes.get(transport, 0) + pulled_nbytes
            self._ended(duration_s)

    def _ended(self, duration_s: float) -> None:
        now_s = time.monotonic()
        self.operations += 1
        self._durations_s.append(duration_s)
        self.busy_s += now_s - max(now_s - duration_s, self._busy_until_s)
        self._busy_until_s = now_s

    def median_s(self) -> float:
        """Return the median duration of the last operations, 0 without any."""
        ordered = sorted(self._durations_s)
        return ordered[len(ordered) // 2] if ordered else 0.0

    def summary(self) -> str:
        """Return one line for people."""
        pushed = sum(self.pushed_nbytes.values())
        pulled = sum(self.pulled_nbytes.values())
        over = "+".join(sorted(set(self.pushed_nbytes) | set(self.pulled_nbytes))) or "nothing"
        rate = (pushed + pulled) / self.busy_s / 1e9 if self.busy_s else 0.0
        return (
            f"traffic: {self.operations} operations, pushed {pushed / 1e6:.1f} MB, pulled {pulled / 1e6:.1f} MB, "
            f"over {over}, {rate:.2f} GB/s while busy, median operation {self.median_s() * 1e3:.2f} ms"
        )
