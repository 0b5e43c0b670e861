"""Small models and their training, for the checks of what is built on torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

WIDTH = 16
CLASSES = 4


def mlp() -> nn.Sequential:
    """Return a model of two layers, the same on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def batches(rank: int, count: int = 4, rows: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and labels, other ones on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randint(CLASSES, (rows,), generator=generator),
        )


def fit(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rank: int,
    count: int = 4,
) -> list[float]:
    """Train for `count` batches; returns the losses."""
    losses = []
    for inputs, labels in batches(rank, count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer that most checks use."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
