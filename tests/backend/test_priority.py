"""torch_bps.priority, the group's own, and what the kinds of collectives and blocking callers get by themselves."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torch_bps
from tests.fakes import Hub
from torch_bps.backend.process_group import ProcessGroupBytePS
from torch_bps.config import Config
from torch_bps.core.operation import MAX_PRIORITY
from torch_bps.errors import ConfigError


def last(hub: Hub) -> tuple[int, bool]:
    """Return priority and blocking of the last operation that rank 0 submitted."""
    operation = hub.submitted[-1]
    return operation.priority, operation.blocking


def test_calls_inside_get_it_and_the_innermost_counts(job: Hub) -> None:
    tensor = torch.zeros(3)
    seen = []

    def call() -> None:
        dist.all_reduce(tensor, async_op=True).wait()
        seen.append(last(job))

    sooner = torch_bps.priority(-5)
    call()
    with sooner:
        call()
        with torch_bps.priority(7), sooner:
            call()
        with torch_bps.priority(7):
            call()
        with pytest.raises(KeyError), sooner:
            raise KeyError
        call()
    call()
    assert seen == [(number, False) for number in (0, -5, -5, 7, -5, 0)]
    assert repr(sooner) == "priority(-5)"


def test_it_counts_in_its_own_thread(job: Hub) -> None:
    seen = []

    def call() -> None:
        dist.all_reduce(torch.zeros(3), async_op=True).wait()
        seen.append(last(job))

    with torch_bps.priority(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(20)
        call()
    assert seen == [(0, False), (3, False)]


def test_a_blocking_caller_goes_before_every_number(job: Hub) -> None:
    seen = []
    for number in (-MAX_PRIORITY, MAX_PRIORITY):
        with torch_bps.priority(number):
            for async_op in (False, True):
                work = dist.all_reduce(torch.zeros(3), async_op=async_op)
                if work is not None:
                    work.wait()
                seen.append(last(job))
    urgent, background = [entry for entry in seen if entry[1]], [entry for entry in seen if not entry[1]]
    assert max(urgent) < min(background)
    assert urgent == sorted(urgent)
    assert all(-(2**31) < entry[0] < 2**31 for entry in seen)


def test_all_gathers_go_before_reduce_scatters_unless_the_user_says_otherwise(job: Hub) -> None:
    def gather() -> tuple[int, bool]:
        dist.all_gather_single(torch.zeros(4), torch.zeros(2), async_op=True).wait()
        return last(job)

    def scatter() -> tuple[int, bool]:
        dist.reduce_scatter_single(torch.zeros(2), torch.zeros(4), async_op=True).wait()
        return last(job)

    assert gather() < scatter()
    with torch_bps.priority(4):
        assert gather() == scatter() == (4, False)


def test_a_group_has_a_priority_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(2, ghosts=(1,))
    group = ProcessGroupBytePS(hub.groups[0], dist.HashStore(), 0, 2, timedelta(seconds=20), usual_priority=30)
    try:
        group.allreduce([torch.zeros(3)]).wait()
        assert last(hub) == (30, False)
        group.allgather([[torch.zeros(3), torch.zeros(3)]], [torch.zeros(3)]).wait()
        assert last(hub) == (29, False)
        with torch_bps.priority(2):
            group.allreduce([torch.zeros(3)]).wait()
        assert last(hub) == (2, False)
    finally:
        group.shutdown()
        hub.stop()


@pytest.mark.parametrize("number", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 0.5, "1", None, True])
def test_what_is_no_priority_is_refused(number: object) -> None:
    with pytest.raises(ConfigError, match="is no priority") as caught:
        torch_bps.priority(number)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert str(MAX_PRIORITY) in caught.value.hint


def test_a_groups_bounds_are_those_of_a_call() -> None:
    assert Config.load({}, priority=MAX_PRIORITY).priority == MAX_PRIORITY
    with pytest.raises(ConfigError):
        Config.load({}, priority=MAX_PRIORITY + 1)
