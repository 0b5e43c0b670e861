"""Priorities are each rank's own: whatever they are, every sum is right and nothing waits for ever."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import torch_bps
from tests.integration.rig import run_ranks

SIZES = (1, 3_000, 200_000, 1_000_000)


def sums_of_many(rank: int, world_size: int) -> int:
    """Call 24 all_reduces in the same order with priorities, and blocking or not, as this rank likes; return how many
    are wrong. Blocking ones come while large ones are under way, in two groups."""
    own, order = random.Random(rank), random.Random(99)
    groups = [dist.group.WORLD, dist.new_group()]
    pending = []
    for number in range(24):
        tensor = torch.full((order.choice(SIZES),), float(rank + number))
        group = order.choice(groups)
        with torch_bps.priority(own.randint(-3, 3)):
            work = dist.all_reduce(tensor, group=group, async_op=own.random() < 0.8)
        pending.append((number, tensor, work))
    base = sum(range(world_size))
    wrong = 0
    for number, tensor, work in pending:
        if work is not None:
            work.wait()
        wrong += int((tensor != base + world_size * number).sum())
    return wrong


@pytest.mark.parametrize(
    ("world_size", "env"),
    [
        (2, {}),
        (3, {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": "tcp"}),
    ],
    ids=["local", "tcp"],
)
def test_ranks_of_different_opinions(world_size: int, env: dict[str, str]) -> None:
    results = run_ranks(sums_of_many, world_size, backend="byteps", env=env)
    assert [result.value for result in results] == [0] * world_size
