"""The scheduler under any interleaving of submit, ready, done, stalled and cancel, against a sorted list.

No task is lost or issued twice, the most urgent goes first unless the oldest was overtaken by enough, the credit
holds for each priority and what is more urgent (and half as much again for all) unless a stall overdrew it or the
oldest is due, and nothing waits that could go. Ranks that issue the same tasks in different orders always come to an
end, and without a stall if they agree on what is urgent.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_bps.core.scheduler import Scheduler, total_nbytes, urgent_nbytes
from torch_bps.transport.turns import PATIENCE_NBYTES
from torch_bps.wire.header import URGENT

MIB = 1 << 20

Entry = tuple[int, int, str, int]
"""(priority, number, owner, nbytes); the number is the task"""

priorities = st.sampled_from([-2, -1, 0, 1, 2, URGENT - 3, URGENT - 1])
sizes = st.sampled_from([0, 1, MIB // 2, MIB, 3 * MIB, 40 * MIB])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(credit_nbytes=st.sampled_from([1, MIB, 4 * MIB, 16 * MIB]))
    def begin(self, credit_nbytes: int) -> None:
        self.scheduler: Scheduler[int] = Scheduler(credit_nbytes)
        self.credit_nbytes = credit_nbytes
        self.allowed_nbytes = credit_nbytes
        self.waiting: list[Entry] = []
        self.overtaken_nbytes = 0
        self.under_way: list[Entry] = []
        self.numbers = 0
        self.num_issued = 0

    def first(self) -> Entry:
        """Return the entry whose turn it is."""
        if self.overtaken_nbytes >= PATIENCE_NBYTES:
            return min(self.waiting, key=lambda entry: entry[1])
        return min(self.waiting)

    def issued(self, tasks: list[int], allowed_nbytes: int = 2**62) -> None:
        """Note what was issued: those whose turn it was, in order, each once, and each within what is allowed."""
        for task in tasks:
            entry = self.first()
            assert task == entry[1]
            due = self.overtaken_nbytes >= PATIENCE_NBYTES
            if task == min(number for _, number, _, _ in self.waiting):
                self.overtaken_nbytes = 0
            else:
                self.overtaken_nbytes += max(entry[3], 4096)
            assert due or self.has_room(entry, allowed_nbytes)
            self.waiting.remove(entry)
            self.under_way.append(entry)
        self.num_issued += len(tasks)

    def has_room(self, entry: Entry, allowed_nbytes: int) -> bool:
        """Return whether an entry may go: in the window, or as urgent."""
        in_flight, as_urgent = self.in_flight_nbytes(), self.as_urgent_nbytes(entry[0])
        return (
            not entry[3]
            or not in_flight
            or in_flight + entry[3] <= allowed_nbytes
            or not as_urgent
            or as_urgent + entry[3] <= urgent_nbytes(allowed_nbytes)
            or (as_urgent + entry[3] <= allowed_nbytes and in_flight + entry[3] <= total_nbytes(allowed_nbytes))
        )

    def as_urgent_nbytes(self, than: int) -> int:
        return sum(nbytes for priority, _, _, nbytes in self.under_way if priority <= than)

    def in_flight_nbytes(self) -> int:
        return sum(nbytes for *_, nbytes in self.under_way)

    @rule(owner=st.sampled_from("abc"), priority=priorities, nbytes=sizes, count=st.integers(1, 8))
    def submit(self, owner: str, priority: int, nbytes: int, count: int) -> None:
        for _ in range(count):
            self.scheduler.submit(owner, priority, nbytes, self.numbers)
            self.waiting.append((priority, self.numbers, owner, nbytes))
            self.numbers += 1

    @rule()
    def ready(self) -> None:
        self.issued(self.scheduler.ready(), self.allowed_nbytes)
        if self.waiting:
            assert self.overtaken_nbytes < PATIENCE_NBYTES
            assert not self.has_room(self.first(), self.credit_nbytes)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        entry = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.scheduler.done(entry[3], entry[0])
        if self.in_flight_nbytes() <= self.credit_nbytes:
            self.allowed_nbytes = self.credit_nbytes

    @precondition(lambda self: self.waiting)
    @rule()
    def stalled(self) -> None:
        tasks = self.scheduler.stalled()
        assert tasks
        self.issued(tasks)
        self.allowed_nbytes = max(self.allowed_nbytes, self.in_flight_nbytes())

    @rule(owner=st.sampled_from("abc"))
    def cancel(self, owner: str) -> None:
        dropped = [entry for entry in self.waiting if entry[2] == owner]
        assert self.scheduler.cancel(owner) == sum(nbytes for *_, nbytes in dropped)
        self.waiting = [entry for entry in self.waiting if entry[2] != owner]

    @invariant()
    def counts_are_right(self) -> None:
        scheduler = self.scheduler
        assert scheduler.in_flight_nbytes == self.in_flight_nbytes()
        assert scheduler.queued_nbytes == sum(nbytes for *_, nbytes in self.waiting)
        assert scheduler.num_queued == len(self.waiting)
        assert scheduler.num_issued == self.num_issued

    def teardown(self) -> None:
        """Whatever happened: what waits gets its turn, without a stall, as results return."""
        if not hasattr(self, "scheduler"):
            return
        while self.waiting or self.under_way:
            self.ready()
            assert self.under_way
            for priority, _, _, nbytes in self.under_way:
                self.scheduler.done(nbytes, priority)
            self.under_way.clear()
            self.allowed_nbytes = self.credit_nbytes
        assert self.scheduler.ready() == []
        assert self.scheduler.in_flight_nbytes == 0


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase


@given(
    operations=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([1, MIB // 4, MIB, 5 * MIB])), min_size=1, max_size=8
    ),
    num_ranks=st.integers(2, 4),
    credit_nbytes=st.sampled_from([1, MIB, 8 * MIB]),
    chance=st.integers(0, 1 << 32).map(random.Random),
)
def test_ranks_that_order_their_operations_differently_come_to_an_end(
    operations: list[tuple[int, int]], num_ranks: int, credit_nbytes: int, chance: random.Random
) -> None:
    ranks: list[Scheduler[tuple[int, int]]] = [Scheduler(credit_nbytes) for _ in range(num_ranks)]
    nbytes_of: dict[tuple[int, int], int] = {}
    priorities_of: list[dict[int, int]] = []
    for scheduler in ranks:
        priority_of: dict[int, int] = {}
        priorities_of.append(priority_of)
        for operation in chance.sample(range(len(operations)), len(operations)):
            count, nbytes = operations[operation]
            priority = chance.choice((0, 1, URGENT - 1))  # each rank its own
            priority_of[operation] = priority
            for part in range(count):
                nbytes_of[operation, part] = nbytes
                scheduler.submit(operation, priority, nbytes, (operation, part))
    issued: list[set[tuple[int, int]]] = [set() for _ in ranks]
    completed: set[tuple[int, int]] = set()
    stalls = 0
    while len(completed) < len(nbytes_of):
        for scheduler, mine in zip(ranks, issued, strict=True):
            mine.update(scheduler.ready())
        # a sum is there once every rank has pushed its part
        results = sorted(set.intersection(*issued) - completed)
        if results:
            results = results[: chance.randint(1, len(results))]
        else:
            stalls += 1
            assert stalls <= len(nbytes_of)
            for scheduler, mine in zip(ranks, issued, strict=True):
                mine.update(scheduler.stalled())
        for task in results:
            for scheduler, priority_of in zip(ranks, priorities_of, strict=True):
                scheduler.done(nbytes_of[task], priority_of[task[0]])
        completed.update(results)
    for scheduler in ranks:
        assert scheduler.num_issued == len(nbytes_of)
        assert (scheduler.in_flight_nbytes, scheduler.num_queued) == (0, 0)


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_ranks=st.integers(2, 4),
    chance=st.integers(0, 1 << 32).map(random.Random),
)
def test_ranks_that_agree_on_what_is_urgent_never_stall(
    counts: list[int], num_ranks: int, chance: random.Random
) -> None:
    """They submit the same operations in the same order, each more urgent than the one before, but not in step."""
    tasks = [(operation, part) for operation, count in enumerate(counts) for part in range(count)]
    ranks: list[Scheduler[tuple[int, int]]] = [Scheduler(16 * MIB) for _ in range(num_ranks)]
    coming = [list(enumerate(counts)) for _ in ranks]
    issued: list[set[tuple[int, int]]] = [set() for _ in ranks]
    completed: set[tuple[int, int]] = set()
    while len(completed) < len(tasks):
        rank = chance.randrange(num_ranks)
        if coming[rank]:
            operation, count = coming[rank].pop(0)
            for part in range(count):
                ranks[rank].submit(operation, -operation, 4 * MIB, (operation, part))
        for scheduler, mine in zip(ranks, issued, strict=True):
            mine.update(scheduler.ready())
        results = set.intersection(*issued) - completed
        assert results or any(coming)
        for task in results:
            for scheduler in ranks:
                scheduler.done(4 * MIB, -task[0])
        completed |= results
