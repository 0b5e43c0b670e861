"""A lost peer and an exception surface where the training thread comes by next, each time, and leave no waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.cross_barrier.held import HeldGroup
from tests.backend.cross_barrier.test_overlap import INPUTS, Deep, held_step, ready, train_step
from tests.backend.cross_barrier.training import loss_of
from torch_bps import BytePSError, PeerLostError

NEXT: dict[str, Callable[..., Any]] = {
    "forward": lambda ddp, optimizer, barrier: ddp(INPUTS),
    "step": lambda ddp, optimizer, barrier: optimizer.step(),
    "synchronize": lambda ddp, optimizer, barrier: barrier.synchronize(),
    "model's state": lambda ddp, optimizer, barrier: ddp.state_dict(),
    "optimizer's state": lambda ddp, optimizer, barrier: optimizer.state_dict(),
    "a weight": lambda ddp, optimizer, barrier: ddp.module.layers[0].weight.norm(),
}


@pytest.mark.parametrize("use", NEXT)
def test_a_lost_peer_surfaces_at_the_next_use_and_at_each_after_it(world: HeldGroup, use: str) -> None:
    ddp, optimizer, barrier = ready()
    for work in held_step(world, ddp, optimizer):
        work.error = PeerLostError("rank 1 is gone")
        work.held = False
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        NEXT[use](ddp, optimizer, barrier)
    for again in NEXT:
        with pytest.raises(BytePSError, match="an earlier step of this model failed: rank 1 is gone"):
            NEXT[again](ddp, optimizer, barrier)


def test_close_tells_of_a_lost_peer_and_gives_all_back(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    for work in held_step(world, ddp, optimizer):
        work.error = PeerLostError("rank 1 is gone")
        work.held = False
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        barrier.close()
    assert {type(parameter) for parameter in ddp.parameters()} == {nn.Parameter}


def test_close_after_a_failure_gives_all_back_without_waiting(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # keeps the step that it found
    sums = held_step(world, ddp, optimizer)
    sums[0].error = PeerLostError("rank 1 is gone")
    sums[0].held = False
    with pytest.raises(PeerLostError):
        ddp(INPUTS)
    barrier.close()
    assert [work.waits for work in sums] == [1, 0, 0, 0]
    assert {type(parameter) for parameter in ddp.parameters()} == {nn.Parameter}
    ddp.state_dict()
    train_step(ddp, optimizer)


def test_leaving_by_an_exception_does_not_wait(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    sums = held_step(world, ddp, optimizer)
    with pytest.raises(KeyboardInterrupt), barrier:
        raise KeyboardInterrupt
    assert [work.waits for work in sums] == [0] * len(sums)
    assert {type(parameter.grad) for parameter in ddp.parameters()} == {torch.Tensor}
    train_step(ddp, optimizer)


def test_an_interrupted_wait_may_be_taken_up_again(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    sums = held_step(world, ddp, optimizer)
    for work in sums:
        work.held = False
    sums[0].error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ddp(INPUTS)
    sums[0].error = None
    ddp(INPUTS)
    assert [work.waits for work in sums] == [2, 1, 1, 1]
    assert not barrier._arrivals


def test_a_sum_that_cannot_begin(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    world.refusal = PeerLostError("rank 1 is gone")
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        train_step(ddp, optimizer)
    for use in ("forward", "step", "synchronize", "optimizer's state"):
        with pytest.raises(BytePSError, match="an earlier step of this model failed: rank 1 is gone"):
            NEXT[use](ddp, optimizer, barrier)


class Broken(Deep):
    """Raises in the backward pass, before the first layer's gradient."""

    broken = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.layers[0](inputs)
        if self.broken:
            inputs.register_hook(self.break_off)
        for layer in self.layers[1:]:
            inputs = layer(inputs).tanh()
        return inputs

    def break_off(self, gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("broken off")


def test_an_exception_in_backward(world: HeldGroup) -> None:
    ddp, _, barrier = ready(Broken())
    ddp.module.broken = True
    before = len(world.sums)
    with pytest.raises(ZeroDivisionError):
        loss_of(ddp, INPUTS).backward()
    started = world.sums[before:]
    assert 0 < len(started) < 4
    ddp.module.broken = False
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):  # DDP's own words
        ddp(INPUTS)
    barrier.close()
    assert [work.waits for work in started] == [1] * len(started)
