"""What waits for what: sums are held, and waiting for one that is held fails the test."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.backend.cross_barrier.held import HeldGroup
from tests.backend.cross_barrier.training import WIDTH, batches, ddp_of, loss_of, sgd
from torch_bps import CrossBarrier, cross_barrier

LAYERS = 4


class Deep(nn.Module):
    """Layers that tell when their forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.begun: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            inputs = layer(inputs).tanh()
            self.begun.append(number)
        return inputs


def ready(net: nn.Module | None = None, **options: object) -> tuple[DistributedDataParallel, torch.optim.Optimizer, CrossBarrier]:
    """Return a model with a cross-barrier whose first two steps, which wait for all, are done."""
    ddp = ddp_of(net or Deep(), **options)
    optimizer = sgd(ddp.parameters())
    barrier = cross_barrier(ddp, optimizer)
    for inputs in batches(2):
        train_step(ddp, optimizer, inputs)
    return ddp, optimizer, barrier


def train_step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(ddp, inputs).backward()
    optimizer.step()


def held_step(world: HeldGroup, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> list:
    """Train a step whose sums are held; returns them by layer, first layer first."""
    world.sums.clear()
    world.hold = True
    train_step(ddp, optimizer, torch.ones(2, WIDTH))
    world.hold = False
    assert len(world.sums) == LAYERS, "a bucket a layer"
    return world.sums[::-1]


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_a_layer_waits_for_its_own_bucket_only(world: HeldGroup, gradient_as_bucket_view: bool) -> None:
    ddp, optimizer, barrier = ready(gradient_as_bucket_view=gradient_as_bucket_view)
    sums = held_step(world, ddp, optimizer)  # backward and step return while all is held
    optimizer.zero_grad()  # and so does this
    for number in range(LAYERS):
        ddp.module.begun.clear()
        with pytest.raises(AssertionError, match="held"):
            ddp(torch.ones(2, WIDTH))
        assert ddp.module.begun == [*range(number)]
        sums[number].held = False
        barrier._failure = None  # the test's own assertion, not a lost peer
    ddp(torch.ones(2, WIDTH))
    assert not barrier._arrivals
