"""Models that use their parameters in ways that no hook of a module sees."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.backend.cross_barrier.training import WIDTH, mlp

HIDDEN = 6


class Tied(nn.Module):
    """Two modules share a weight, and a third way uses it without either."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.last(self.first(inputs)), self.first.weight.t())


class Bare(nn.Module):
    """Parameters of the root, of a module that never runs, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.never_runs = nn.Linear(WIDTH, WIDTH)
        self.offsets = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)])
        self.body = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs * self.scale) + sum(self.offsets)
        return torch.addmm(self.never_runs.bias, hidden, self.never_runs.weight)


class Parametrized(nn.Module):
    """Weights that are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.orthogonal(self.normed(inputs)) + nn.functional.linear(inputs, self.normed.weight)


class Functional(nn.Module):
    """A module that is called with other parameters, computed from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        other = {name: value * 1.5 for name, value in self.body.named_parameters()}
        return torch.func.functional_call(self.body, other, inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.lstm(inputs)[0]
        return outputs


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout=0.0, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs.unsqueeze(0))
        return outputs.squeeze(0)


class Normed(nn.Module):
    """With buffers, which DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs)
        return outputs


class ChannelsLast(nn.Module):
    """A weight whose elements lie in another order than its shape says, and one that has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, padding=1).to(memory_format=torch.channels_last)
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * 4 * 3 * 3)[:, ::2])
        assert not self.conv.weight.is_contiguous()
        assert not self.gaps.is_contiguous()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.conv(inputs.view(-1, 2, 2, 2)).flatten(1), self.gaps)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(self.body, self.body[0](inputs), use_reentrant=False)
        return outputs


class Skipping(nn.Module):
    """Leaves one layer out, another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if number != self.calls % len(self.layers):
                inputs = layer(inputs).tanh()
        return inputs


class PartlyUsed(nn.Module):
    """Never uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs
