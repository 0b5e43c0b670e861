"""A cross-barrier on real sums: on byteps and gloo, the weights are plain DDP's, bit for bit.

What waits for what, and all that users do in between, is in tests/backend/cross_barrier, with sums that the test holds.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_bps
from tests.integration.checks import Check, Suite
from tests.integration.models import CLASSES, WIDTH, batches, weights
from tests.integration.rig import start_ranks

HIDDEN = 256


class Tied(nn.Module):
    """A few layers of some weight, two of them one, and one used without its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.body = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
        self.body[2].weight = self.body[0].weight
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.first(inputs).relu()).tanh()
        return self.last(hidden + nn.functional.linear(hidden, self.body[1].weight))


def trained(rank: int, crossing: bool, optimizer_of: Any, **options: Any) -> list[Any]:
    """Train with accumulation and a scheduler; returns the losses, the weights and the optimizer's state."""
    torch.manual_seed(5)
    ddp = DistributedDataParallel(Tied(), bucket_cap_mb=0.2, **options)
    optimizer = optimizer_of(ddp.parameters())
    barrier = torch_bps.cross_barrier(ddp, optimizer) if crossing else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for number, (inputs, labels) in enumerate(batches(rank, 12)):
        if number % 4 == 2:
            with ddp.no_sync():
                nn.functional.cross_entropy(ddp(inputs), labels).backward()
            continue
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ended = [losses, weights(ddp), optimizer.state_dict()["state"]]
    if barrier is not None:
        barrier.close()
    return ended


def same_as_plain(rank: int, optimizer_of: Any, **options: Any) -> list[Any]:
    plain = trained(rank, False, optimizer_of, **options)
    torch.testing.assert_close(trained(rank, True, optimizer_of, **options), plain, rtol=0, atol=0)
    return plain


def sgd(rank: int, world_size: int) -> list[Any]:
    return same_as_plain(rank, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True))


def adamw_within_buckets(rank: int, world_size: int) -> list[Any]:
    return same_as_plain(rank, lambda p: torch.optim.AdamW(p, lr=0.01), gradient_as_bucket_view=True)


def unused_on_one_rank(rank: int, world_size: int) -> list[Any]:
    """A layer that one rank uses, then the other, then neither."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            inputs = self.layers[0](inputs)
            if self.calls % 3 == rank:
                inputs = self.layers[1](inputs).tanh()
            return self.layers[2](inputs)

    def run(crossing: bool, in_buckets: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        ddp = DistributedDataParallel(
            Choosing(), bucket_cap_mb=0.001, find_unused_parameters=True, gradient_as_bucket_view=in_buckets
        )
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
        barrier = torch_bps.cross_barrier(ddp, optimizer) if crossing else None
        for number, (inputs, labels) in enumerate(batches(rank, 9)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            if number > 5:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
        if barrier is not None:
            barrier.close()
        return weights(ddp)

    plain = [run(False, False), run(False, True)]
    torch.testing.assert_close([run(True, False), run(True, True)], plain, rtol=0, atol=0)
    return plain


SUITE = Suite(sgd, adamw_within_buckets, unused_on_one_rank)


@SUITE.cases("shm", "server")
def test_cross_barrier(check: Check, mode: str) -> None:
    SUITE.compare(check, mode)


def lose_a_rank(rank: int, world_size: int) -> list[str]:
    """Rank 1 dies in its fourth step; returns what rank 0 is told, at each of the places it comes by."""
    ddp = DistributedDataParallel(Tied(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    barrier = torch_bps.cross_barrier(ddp, optimizer)

    def train() -> None:
        for number, (inputs, labels) in enumerate(batches(rank, 6)):
            if rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    told = []
    for come_by in (train, train, optimizer.step, barrier.synchronize, optimizer.state_dict):
        with pytest.raises(torch_bps.BytePSError) as raised:
            come_by()
        told.append(str(raised.value))
    barrier.close()
    assert {type(parameter) for parameter in ddp.parameters()} == {nn.Parameter}
    return told


def test_a_lost_rank() -> None:
    with start_ranks(lose_a_rank, 2, backend="byteps") as job:
        result, dead = job.results()
    assert dead.exitcode == -signal.SIGKILL
    assert result.ok, result.output
    assert len(result.value) == 5
    assert "rank 1" in result.value[0]
    assert all("an earlier step of this model failed" in text for text in result.value[1:])
