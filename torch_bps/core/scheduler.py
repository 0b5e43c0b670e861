"""Which partition goes next: priority and credit. Pure: no clocks, threads or sockets.

    submit ──> by turns (priority, age) ──ready()──> under way, counted in bytes ──done()──> credit back

Credit counts until the *result* is back (ByteScheduler, SOSP'19, section 4; the original BytePS gave it back
earlier). One window over all engines, in order: windows per server let fast and slow ones drift apart and cost 30 %.

A task that is less urgent takes no room of the window, but all together have four windows at most; even then what is
more urgent may go, up to a quarter of the credit. Else ranks that issued the same tasks at different times would wait
for each other, one with its window full of early ones that are not urgent, the other full of urgent ones. One window
for all, and the quarter beyond, is 1.06 to 1.24 of what the link allows (VGG16 at 5 Gb/s, 4+4, cross-barrier), this
1.01. A window for each priority without a bound lets a rank that is ahead fill the servers' links with what the others
cannot match yet (BERT-large at 20 Gb/s, 4+4: 1.10). With many priorities (BERT-large: 37 buckets, 6 ms apart) each
leaves some that others have not come to, about five, until the backward pass ends: with two and a half windows these
leave only the quarter to what is urgent (8+8: 1.16 and 1.28, with four 1.04 and 1.16).

Nothing waits for ever: the oldest task goes when enough has overtaken it (transport.turns), whether there is room for
it or not. Were it to wait for room, it would hold up all others, and ranks whose turns for it come at different
moments would wait for each other.

A window can deadlock. Groups may be used in different orders on different ranks: rank A's window is full of group 1,
whose results need rank B; rank B's is full of group 2, whose results need rank A. So when nothing came back for a
while although tasks of several groups wait, the caller says `stalled()`, and the window is overdrawn: by as much again,
and twice as far each time in a row. It then shrinks by half of what returns, until the credit holds again. It must not
snap back at the first result: each rank has to go on issuing what the other waits for, and would need a stall for each
partition (2 x 400 partitions of two groups in opposite order: 267 stalls, against 9).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch_bps.transport.turns import Turns

Task = TypeVar("Task")

_FIRST_OVERDRAFT_NBYTES = 1 << 20


def urgent_nbytes(limit_nbytes: int) -> int:
    """Return how much may be under way that is as urgent as the next task, whatever else is."""
    return limit_nbytes // 4


def total_nbytes(limit_nbytes: int) -> int:
    """Return how much may be under way, of all priorities, before only that is left."""
    return 4 * limit_nbytes


class Scheduler(Generic[Task]):
    """Thread safety: one thread.

    Args:
        credit_nbytes: how much may be under way that is as urgent as the next task, or more.
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
        self._under_way: dict[int, int] = {}
        """priority -> bytes, where there are any"""
        self._turns: Turns[tuple[object, int, Task]] = Turns()
        """(owner, credit, task)"""
        self._queued: dict[object, list[int]] = {}
        """owner -> [tasks, bytes] that wait"""

    def submit(self, owner: object, priority: int, nbytes: int, task: Task, payload_nbytes: int | None = None) -> None:
        """Queue a task; smaller priorities go first, first come first served within one.

        Args:
            nbytes: what it takes of the credit.
            payload_nbytes: what it counts when it overtakes; default: as much.
        """
        self._turns.put(priority, nbytes if payload_nbytes is None else payload_nbytes, (owner, nbytes, task))
        self.queued_nbytes += nbytes
        self.num_queued += 1
        count = self._queued.setdefault(owner, [0, 0])
        count[0] += 1
        count[1] += nbytes

    def ready(self) -> list[Task]:
        """Take the tasks that may go now, the most urgent first.

        A task larger than the credit goes when nothing as urgent is under way, one of 0 bytes once it is the first.
        """
        return self._issue()

    def done(self, nbytes: int, priority: int = 0) -> None:
        """A task's result is back (or it was given up): its credit returns."""
        self.in_flight_nbytes -= nbytes
        self._add(priority, -nbytes)
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
        more_nbytes = max(self._overdraft_nbytes, self._turns.first()[1][1])
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
            priority, (owner, nbytes, task) = turns.first()
            if not self._may_go(priority, nbytes):
                break
            turns.take()
            self.in_flight_nbytes += nbytes
            self._add(priority, nbytes)
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

    def _may_go(self, priority: int, nbytes: int) -> bool:
        """Return whether the task whose turn it is has room, or needs none."""
        in_flight_nbytes = self.in_flight_nbytes
        if not nbytes or not in_flight_nbytes or in_flight_nbytes + nbytes <= self._limit_nbytes:
            return True
        if self._turns.is_due():
            return True
        as_urgent_nbytes = self._as_urgent_nbytes(priority)
        if not as_urgent_nbytes:
            return True
        least_nbytes = urgent_nbytes(self._limit_nbytes)
        all_fit = in_flight_nbytes + nbytes <= total_nbytes(self._limit_nbytes)
        return as_urgent_nbytes + nbytes <= (self._limit_nbytes if all_fit else least_nbytes)

    def _as_urgent_nbytes(self, priority: int) -> int:
        """Return how much is under way that is as urgent, or more."""
        under_way = self._under_way
        if len(under_way) == 1 and priority in under_way:
            return under_way[priority]
        return sum(nbytes for other, nbytes in under_way.items() if other <= priority)

    def _add(self, priority: int, nbytes: int) -> None:
        total = self._under_way.get(priority, 0) + nbytes
        if total:
            self._under_way[priority] = total
        else:
            self._under_way.pop(priority, None)
