"""Which partition goes next: priority and credit. Pure: no clocks, threads or sockets.

    submit ──> by turns (priority, age) ──ready()──> under way, counted in bytes ──done()──> credit back

Credit counts until the *result* is back (ByteScheduler, SOSP'19, section 4; the original BytePS gave it back
earlier). One window over all engines, in order: windows per server let fast and slow ones drift apart and cost 30 %.

Tasks of blocking calls have a quarter of the credit as a reserve, which the others do not count in: however full the
window is, so much of them goes at once. Nothing waits for ever: the oldest task gets its turn when enough has overtaken
it (transport.turns).

A window can deadlock. Groups may be used in different orders on different ranks: rank A's window is full of group 1,
whose results need rank B; rank B's is full of group 2, whose results need rank A. So when nothing came back for a
while although tasks wait, the caller says `stalled()`, and the window is overdrawn: by as much again, and twice as far
each time in a row.
It then shrinks by half of what returns, until the credit holds again. It must not snap back at the first result: each
rank has to go on issuing what the other waits for, and would need a stall for each partition (2 x 400 partitions of
two groups in opposite order: 267 stalls, against 9).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch_bps.transport.turns import Turns
from torch_bps.wire.header import URGENT

Task = TypeVar("Task")

_FIRST_OVERDRAFT_NBYTES = 1 << 20


class Scheduler(Generic[Task]):
    """Thread safety: one thread.

    Args:
        credit_nbytes: how much may be under way, besides what urgent tasks have as their reserve.
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
        self._urgent_nbytes = 0
        """urgent tasks under way"""
        self._reserve_nbytes = credit_nbytes // 4
        self._turns: Turns[tuple[object, Task]] = Turns()
        self._queued: dict[object, list[int]] = {}
        """owner -> [tasks, bytes] that wait"""

    def submit(self, owner: object, priority: int, nbytes: int, task: Task) -> None:
        """Queue a task; smaller priorities go first, first come first served within one."""
        self._turns.put(priority, nbytes, (owner, task))
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

    def done(self, nbytes: int, priority: int = 0) -> None:
        """A task's result is back (or it was given up): its credit returns."""
        self.in_flight_nbytes -= nbytes
        if priority < URGENT:
            self._urgent_nbytes -= nbytes
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
        self._overdraft_nbytes = max(2 * self._overdraft_nbytes, _FIRST_OVERDRAFT_NBYTES, self.credit_nbytes)
        more_nbytes = max(self._overdraft_nbytes, self._turns.first()[1])
        self._limit_nbytes = max(self._limit_nbytes, self.in_flight_nbytes + more_nbytes)
        tasks = self._issue()
        self._limit_nbytes = max(self.in_flight_nbytes, self.credit_nbytes)  # what is submitted later must wait again
        return tasks

    def cancel(self, owner: object) -> int:
        """Drop the owner's waiting tasks and return their bytes; those under way give their credit back by `done`."""
        count = self._queued.pop(owner, None)
        if count is None:
            return 0
        self._turns.remove(lambda entry: entry[0] is owner)
        self.num_queued -= count[0]
        self.queued_nbytes -= count[1]
        return count[1]

    def _issue(self) -> list[Task]:
        tasks = []
        turns = self._turns
        while turns:
            priority, nbytes = turns.first()
            if (
                nbytes
                and self.in_flight_nbytes
                and self.in_flight_nbytes + nbytes > self._limit_nbytes
                and not (priority < URGENT and self._urgent_nbytes + nbytes <= self._reserve_nbytes)
            ):
                break
            owner, task = turns.take()
            self.in_flight_nbytes += nbytes
            if priority < URGENT:
                self._urgent_nbytes += nbytes
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
