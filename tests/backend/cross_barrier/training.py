"""Train a model with plain DDP and again with a cross-barrier: nothing may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_bps import CrossBarrier, cross_barrier

WIDTH = 8
SMALL_BUCKETS_MB = 0.00026  # a layer of mlp() each
Loop = Callable[[DistributedDataParallel, Optimizer, CrossBarrier | None], list[float]]


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def ddp_of(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def batches(count: int = 6) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator)


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs.flip(-1)).square().mean()


def plain_loop(ddp: DistributedDataParallel, optimizer: Optimizer, barrier: CrossBarrier | None) -> list[float]:
    losses = []
    for inputs in batches():
        optimizer.zero_grad()
        loss = loss_of(ddp, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(
    make: Callable[[], nn.Module],
    optimizer_of: Callable[[Iterator[nn.Parameter]], Optimizer],
    loop: Loop,
    crossing: bool,
    per_parameter: bool = False,
    **options: Any,
) -> list[Any]:
    """Return the losses, which tell the weights of each step, and in the end the weights and the optimizer's state."""
    torch.manual_seed(11)
    ddp = ddp_of(make(), **options)
    optimizer = optimizer_of(ddp.parameters())
    barrier = cross_barrier(ddp, optimizer, per_parameter=per_parameter) if crossing else None
    losses = loop(ddp, optimizer, barrier)
    ended = [losses, ddp.state_dict(), optimizer.state_dict()]
    if barrier is not None:
        barrier.close()
    return ended


def assert_same(
    make: Callable[[], nn.Module] = mlp,
    optimizer_of: Callable[[Iterator[nn.Parameter]], Optimizer] = sgd,
    loop: Loop = plain_loop,
    **options: Any,
) -> None:
    """Fail unless both trainings come to the same, bit for bit."""
    plain = run(make, optimizer_of, loop, crossing=False, **{k: v for k, v in options.items() if k != "per_parameter"})
    crossed = run(make, optimizer_of, loop, crossing=True, **options)
    assert len(set(plain[0])) > 2, "nothing was trained"
    torch.testing.assert_close(crossed, plain, rtol=0, atol=0)
