"""Which partition goes next: priority and credit. Pure: no clocks, threads or sockets.

    submit ──> queue by (priority, order) ──ready()──> under way, counted in bytes ──done()──> credit back

Credit counts until the *result* is back (ByteScheduler, SOSP'19, section 4; the original BytePS gave it back
earlier). One window over all engines, in order: windows per server let fast and slow ones drift apart and cost 30 %.

A window can deadlock. Groups may be used in different orders on different ranks: rank A's window is full of group 1,
whose results need rank B; rank B's is full of group 2, whose results need rank A. So when nothing came back for a
while although tasks wait, the caller says `stalled()`, and the window is overdrawn, twice as far each time in a row.
It then shrinks by half of what returns, until the credit holds again. It must not snap back at the first result: each
rank has to go on issuing what the other waits for, and would need a stall for each partition (2 x 400 partitions of
two groups in opposite order: 267 stalls, against 9).
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Task = TypeVar("Task")

_FIRST_OVERDRAFT_NBYTES = 1 << 20


class Scheduler(Generic[Task]):
    """Thread safety: one thread.

    Args:
        credit_nbytes: how much may be under way.
    """

    def __init__(self, credit_nbytes: int) -> None:
        self.credit_nbytes = credit_nbytes
        self.in_flight_nbytes = 0
        self.queued_nbytes = 0
        self.num_queued = 0
        self.num_issued = 0
        self.num_overdrafts = 0
        self._limit_nbytes = credit_nbytes
        """the credit, or more after a stall"""
        self._overdraft_nbytes = 0
        """how far the last stall in a row went beyond what was under way"""
        self._order = 0
        self._heap: list[tuple[int, int, object, int, Task]] = []
        self._queued: dict[object, list[int]] = {}
        """owner -> [tasks, bytes] that wait"""

    def submit(self, owner: object, priority: int, nbytes: int, task: Task) -> None:
        """Queue a task; smaller priorities go first, first come first served within one."""
        heapq.heappush(self._heap, (priority, self._order, owner, nbytes, task))
        self._order += 1
        self.queued_nbytes += nbytes
        self.num_queued += 1
        count = self._queued.setdefault(owner, [0, 0])
        count[0] += 1
        count[1] += nbytes

    def ready(self) -> list[Task]:
        """Take the tasks that may go now, the most urgent first.

        A task larger than the whole credit goes when nothing else is under way, one of 0 bytes once it is the first.
        """
        return self._issue()

    def done(self, nbytes: int) -> None:
        """A task's result is back (or it was given up): its credit returns."""
        self.in_flight_nbytes -= nbytes
        self._overdraft_nbytes = 0
        if self.in_flight_nbytes <= self.credit_nbytes:
            self._limit_nbytes = self.credit_nbytes
        else:
            self._limit_nbytes = max(self._limit_nbytes - nbytes // 2, self.credit_nbytes)

    def stalled(self) -> list[Task]:
        """Nothing came back for a while: take at least the most urgent waiting task, beyond the credit."""
        if not self.num_queued:
            return []
        self.num_overdrafts += 1
        self._overdraft_nbytes = max(2 * self._overdraft_nbytes, _FIRST_OVERDRAFT_NBYTES)
        more_nbytes = max(self._overdraft_nbytes, self._heap[0][3])
        self._limit_nbytes = max(self._limit_nbytes, self.in_flight_nbytes + more_nbytes)
        tasks = self._issue()
        self._limit_nbytes = max(self.in_flight_nbytes, self.credit_nbytes)  # what is submitted later must wait again
        return tasks

    def cancel(self, owner: object) -> int:
        """Drop the owner's waiting tasks and return their bytes; those under way give their credit back by `done`."""
        count = self._queued.pop(owner, None)
        if count is None:
            return 0
        self._heap = [entry for entry in self._heap if entry[2] is not owner]
        heapq.heapify(self._heap)
        self.num_queued -= count[0]
        self.queued_nbytes -= count[1]
        return count[1]

    def _issue(self) -> list[Task]:
        tasks = []
        heap = self._heap
        while heap:
            nbytes = heap[0][3]
            if nbytes and self.in_flight_nbytes and self.in_flight_nbytes + nbytes > self._limit_nbytes:
                break
            _, _, owner, nbytes, task = heapq.heappop(heap)
            self.in_flight_nbytes += nbytes
            self.queued_nbytes -= nbytes
            self.num_queued -= 1
            self.num_issued += 1
            count = self._queued[owner]
            count[0] -= 1
            count[1] -= nbytes
            if not count[0]:
                del self._queued[owner]
            tasks.append(task)
        return tasks
