"""The priority scheduler: order, credit, and what it does when nothing comes back."""

from __future__ import annotations

import pytest

from torch_bps.core.scheduler import Scheduler
from torch_bps.wire.header import URGENT

MIB = 1 << 20


def filled(credit_nbytes: int, sizes: list[int], priority: int = 0, owner: object = "owner") -> Scheduler[int]:
    """Return a scheduler in which tasks 0, 1, ... of `sizes` wait."""
    scheduler: Scheduler[int] = Scheduler(credit_nbytes)
    for task, nbytes in enumerate(sizes):
        scheduler.submit(owner, priority, nbytes, task)
    return scheduler


def test_tasks_go_in_order_as_far_as_the_credit_reaches() -> None:
    scheduler = filled(10, [4, 4, 4, 4])
    assert scheduler.ready() == [0, 1]
    assert scheduler.ready() == []
    assert (scheduler.in_flight_nbytes, scheduler.queued_nbytes, scheduler.num_queued) == (8, 8, 2)
    scheduler.done(4)
    assert scheduler.ready() == [2]
    scheduler.done(4)
    scheduler.done(4)
    assert scheduler.ready() == [3]
    scheduler.done(4)
    assert (scheduler.in_flight_nbytes, scheduler.queued_nbytes, scheduler.num_queued) == (0, 0, 0)
    assert scheduler.num_issued == 4
    assert scheduler.num_overdrafts == 0


def test_the_credit_may_be_used_up_to_the_last_byte() -> None:
    assert filled(8, [4, 4, 1]).ready() == [0, 1]


def test_the_smaller_priority_goes_first_and_the_earlier_one_within_it() -> None:
    scheduler: Scheduler[str] = Scheduler(100)
    for name, priority in (("a", 5), ("b", -1), ("c", 5), ("d", 0), ("e", -1)):
        scheduler.submit(name, priority, 1, name)
    assert scheduler.ready() == ["b", "e", "d", "a", "c"]


def test_what_is_less_urgent_takes_room_only_beyond_four_windows() -> None:
    scheduler = filled(8, [4, 4, 4], priority=7)
    assert scheduler.ready() == [0, 1]
    for priority, nbytes in ((6, 8), (5, 8), (4, 4)):
        scheduler.submit("sooner", priority, nbytes, priority)
        assert scheduler.ready() == [priority]
    for task in range(90, 99):
        scheduler.submit("urgent", -3, 1, task)
    assert scheduler.ready() == [90, 91, 92, 93]  # 32 are under way
    scheduler.submit("more urgent", -4, 1, 100)
    scheduler.submit("more urgent", -4, 2, 101)
    assert scheduler.ready() == [100]  # a quarter of the credit, whatever is under way
    scheduler.done(4, 7)
    assert scheduler.ready() == [101, 94]
    assert scheduler.in_flight_nbytes == 32


def test_one_urgent_task_goes_beyond_full_windows_however_large() -> None:
    scheduler = filled(8, [8, 8], priority=7)
    assert scheduler.ready() == [0]
    scheduler.submit("urgent", -3, 50, 98)
    scheduler.submit("urgent", -3, 1, 99)
    assert scheduler.ready() == [98]


def test_urgent_tasks_alone_get_the_credit_and_no_more() -> None:
    scheduler = filled(8, [1] * 20, priority=URGENT - 1)
    assert scheduler.ready() == list(range(8))


def test_the_oldest_task_is_not_overtaken_for_ever() -> None:
    scheduler = filled(MIB, [MIB], priority=5)
    for task in range(1, 100):
        scheduler.submit("urgent", URGENT - 1, MIB, task)
    order = []
    while scheduler.num_queued:
        for task in scheduler.ready():
            order.append(task)
            if task:
                scheduler.done(MIB, URGENT - 1)
    assert order.index(0) == 16
    assert len(order) == 100  # nothing waited for its result


def test_what_overtakes_counts_by_its_payload_where_that_is_less_than_its_credit() -> None:
    scheduler = filled(4 * MIB, [MIB], priority=5)
    for task in range(1, 100):
        scheduler.submit("urgent", URGENT - 1, 4 * MIB, task, MIB)
    order = []
    while scheduler.num_queued:
        for task in scheduler.ready():
            order.append(task)
            if task:
                scheduler.done(4 * MIB, URGENT - 1)
    assert order.index(0) == 16


def test_a_small_task_does_not_overtake_a_large_one_that_has_no_room() -> None:
    scheduler = filled(10, [6, 6, 1])
    assert scheduler.ready() == [0]
    scheduler.done(6)
    assert scheduler.ready() == [1, 2]


def test_a_task_larger_than_the_credit_goes_alone() -> None:
    scheduler = filled(10, [3, 50, 3])
    assert scheduler.ready() == [0]
    scheduler.done(3)
    assert scheduler.ready() == [1]
    assert scheduler.in_flight_nbytes == 50
    scheduler.done(50)
    assert scheduler.ready() == [2]


def test_tasks_without_bytes_need_no_credit_but_wait_their_turn() -> None:
    scheduler = filled(10, [50, 0, 10, 0])
    assert scheduler.ready() == [0, 1]  # though the window is more than full
    scheduler.done(0)
    assert scheduler.ready() == []
    scheduler.done(50)
    assert scheduler.ready() == [2, 3]


def test_tasks_that_cannot_be_compared_are_welcome() -> None:
    scheduler: Scheduler[object] = Scheduler(1 << 30)
    tasks = [object() for _ in range(50)]
    for task in tasks:
        scheduler.submit(object(), 0, 1, task)
    assert scheduler.ready() == tasks


def test_cancel_drops_what_waits_of_one_owner() -> None:
    scheduler: Scheduler[str] = Scheduler(5)
    for number in range(6):
        for owner in ("x", "y"):
            scheduler.submit(owner, 0, 1, f"{owner}{number}")
    assert scheduler.ready() == ["x0", "y0", "x1", "y1", "x2"]
    assert scheduler.cancel("x") == 3
    assert scheduler.cancel("x") == 0
    assert scheduler.cancel("nobody") == 0
    assert (scheduler.in_flight_nbytes, scheduler.queued_nbytes, scheduler.num_queued) == (5, 4, 4)
    for _ in range(5):  # those under way, the cancelled ones too, give their credit back
        scheduler.done(1)
    assert scheduler.ready() == ["y2", "y3", "y4", "y5"]
    assert scheduler.num_issued == 9


def test_an_owner_may_come_back_after_cancel() -> None:
    scheduler = filled(1, [1, 1])
    scheduler.cancel("owner")
    scheduler.submit("owner", 0, 1, 7)
    assert scheduler.ready() == [7]


# ---- when nothing comes back


def test_a_stall_without_waiting_tasks_is_nothing() -> None:
    scheduler = filled(10, [4])
    assert scheduler.ready() == [0]
    assert scheduler.stalled() == []
    assert scheduler.num_overdrafts == 0


def test_each_stall_in_a_row_goes_twice_as_far() -> None:
    scheduler = filled(MIB, [MIB] * 100)
    assert len(scheduler.ready()) == 1
    assert [len(scheduler.stalled()) for _ in range(5)] == [1, 2, 4, 8, 16]
    assert scheduler.num_overdrafts == 5
    scheduler.done(MIB)
    assert scheduler.ready() == []
    assert len(scheduler.stalled()) == 1  # a result came between: not in a row


def test_a_stall_issues_at_least_one_task_however_large() -> None:
    scheduler = filled(10, [10, 100 * MIB, 10])
    assert scheduler.ready() == [0]
    assert scheduler.stalled() == [1]


def test_what_is_submitted_after_a_stall_waits_for_credit_again() -> None:
    scheduler = filled(MIB, [MIB] * 12)
    scheduler.ready()
    while scheduler.num_queued:
        scheduler.stalled()
    scheduler.submit("late", 0, MIB, 99)
    assert scheduler.ready() == []


def test_an_overdrawn_window_shrinks_by_half_of_what_returns_and_then_the_credit_holds() -> None:
    scheduler = filled(4 * MIB, [MIB] * 200)
    scheduler.ready()
    for _ in range(2):
        scheduler.stalled()
    assert scheduler.in_flight_nbytes == (4 + 4 + 8) * MIB
    issued = []
    for _ in range(60):
        scheduler.done(MIB)
        issued.append(len(scheduler.ready()))
    assert issued[:6] == [0, 1, 0, 1, 0, 1]
    assert issued[-20:] == [1] * 20
    assert scheduler.in_flight_nbytes == 4 * MIB


def test_the_credit_holds_again_as_soon_as_no_more_than_it_is_under_way() -> None:
    scheduler = filled(4 * MIB, [MIB] * 8 + [MIB // 2])
    scheduler.ready()
    assert scheduler.stalled() == [4, 5, 6, 7]
    for _ in range(4):
        scheduler.done(MIB)
    assert scheduler.in_flight_nbytes == scheduler.credit_nbytes
    assert scheduler.ready() == []


@pytest.mark.parametrize("credit", [1, 16, 64])
@pytest.mark.parametrize("num_parts", [10, 100, 400])
def test_two_groups_in_opposite_order_need_few_stalls(credit: int, num_parts: int) -> None:
    ranks: list[Scheduler[tuple[int, int]]] = [Scheduler(credit * MIB) for _ in range(2)]
    for scheduler, groups in zip(ranks, ((1, 2), (2, 1)), strict=True):
        for group in groups:
            for part in range(num_parts):
                scheduler.submit(group, 0, MIB, (group, part))
    issued: list[set[tuple[int, int]]] = [set(), set()]
    completed: set[tuple[int, int]] = set()
    stalls = 0
    while len(completed) < 2 * num_parts:
        for scheduler, mine in zip(ranks, issued, strict=True):
            mine.update(scheduler.ready())
        results = (issued[0] & issued[1]) - completed
        if not results:
            stalls += 1
            for scheduler, mine in zip(ranks, issued, strict=True):
                mine.update(scheduler.stalled())
        for scheduler in ranks:
            for _ in results:
                scheduler.done(MIB)
        completed |= results
    assert all(scheduler.in_flight_nbytes == 0 for scheduler in ranks)
    assert stalls <= num_parts.bit_length() + 1
