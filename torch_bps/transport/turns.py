"""Whose turn it is: the most urgent goes first, and the oldest does not wait for ever. Pure: no clocks or threads.

    put ──> a line for each priority ──take──> the first of the most urgent line;
                                               the oldest of all, once PATIENCE_NBYTES have overtaken it

Called by core.scheduler (partitions), transport.stream (frames that a socket has no room for), server.folder (adds).
Where all have one priority it is a deque.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

PATIENCE_NBYTES: Final = 16 << 20
"""what goes past the oldest before its turn: of a link that is full of urgent things the others get a sixteenth"""
_LEAST_NBYTES: Final = 4096
"""what any item counts when it overtakes: many small ones must not do it for ever"""


class Turns(Generic[Item]):
    """Items that wait. Thread safety: one thread at a time."""

    __slots__ = ("_lines", "_number", "_oldest", "_overtaken_nbytes", "_priorities")

    def __init__(self) -> None:
        self._lines: dict[int, deque[tuple[int, int, Item]]] = {}
        """priority -> (number, nbytes, item), none empty"""
        self._priorities: list[int] = []
        """of the lines, sorted"""
        self._number = 0
        self._oldest: int | None = None
        """the line that begins with the oldest item; None: not known"""
        self._overtaken_nbytes = 0
        """what went past that item since it became the oldest"""

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def put(self, priority: int, nbytes: int, item: Item) -> None:
        """Add an item; smaller priorities go first, first come first served within one."""
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = deque()
            insort(self._priorities, priority)
        line.append((self._number, nbytes, item))
        self._number += 1

    def first(self) -> tuple[int, Item]:
        """Return the item whose turn it is, and its priority. There must be one."""
        priority = self._oldest_line() if self.is_due() else self._priorities[0]
        return priority, self._lines[priority][0][2]

    def is_due(self) -> bool:
        """Return whether it is the oldest item's turn because enough has overtaken it."""
        return self._overtaken_nbytes >= PATIENCE_NBYTES

    def take(self) -> Item:
        """Take the item whose turn it is. There must be one."""
        priorities = self._priorities
        priority = self._oldest_line() if self.is_due() else priorities[0]
        line = self._lines[priority]
        if len(priorities) > 1 and priority != self._oldest_line():
            self._overtaken_nbytes += max(line[0][1], _LEAST_NBYTES)
        else:
            self._overtaken_nbytes = 0
            self._oldest = None
        item = line.popleft()[2]
        if not line:
            self._end_line(priority)
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> None:
        """Drop the items that are unwanted."""
        for priority, line in list(self._lines.items()):
            left = deque(entry for entry in line if not unwanted(entry[2]))
            self._lines[priority] = left
            if not left:
                self._end_line(priority)
        self._oldest = None

    def _oldest_line(self) -> int:
        if self._oldest is None:
            lines = self._lines
            self._oldest = min(self._priorities, key=lambda priority: lines[priority][0][0])
        return self._oldest

    def _end_line(self, priority: int) -> None:
        del self._lines[priority]
        self._priorities.remove(priority)
