"""A model whose layers take the time of a profile's and have its gradients, but compute nothing: the CPU stays free.

A layer's forward and backward sleep, as a training process does whose GPU works. Sizes are divided by one factor and
times stretched by another, so that the links of the emulation are to its gradients what the testbed's are to the real
ones (`Scale`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_bps.theory.profile import Layer, Profile

WARM_UP = 3
"""steps before anything is timed: DDP makes its final buckets in the second"""
HIDDEN_S = 3e-3
"""A GPU's queue hides what the process is late by; later than this, the queue was empty and the GPU idle."""

Note = Callable[[str, str, float, float], None]
"""(row, name, begin, end) in seconds of time.monotonic"""


@dataclass(frozen=True)
class Scale:
    """How the emulation is smaller and slower than the testbed.

    Args:
        divide: what numbers of elements are divided by.
        stretch: what times are multiplied with.
    """

    divide: float
    stretch: float

    @classmethod
    def of(cls, gbps: float, link_mbit: float, divide: float) -> Scale:
        """Return the scale at which a link of `link_mbit` stands for one of `gbps`."""
        return cls(divide, gbps * 1000 / (link_mbit * divide))

    def apply(self, profile: Profile) -> Profile:
        """Return the profile of the emulation; no tensor gets empty."""
        return Profile(
            profile.name,
            profile.samples,
            tuple(
                Layer(
                    layer.name,
                    tuple((max(1, round(math.prod(shape) / self.divide)),) for shape in layer.shapes),
                    layer.forward_s * self.stretch,
                    layer.backward_s * self.stretch,
                )
                for layer in profile.layers
            ),
            profile.itemsize,
        )


class Device:
    """Stands in for a GPU: takes the time it is given, one piece of work after another. Thread safety: one thread.

    Attributes:
        note: told of all its work.
    """

    def __init__(self) -> None:
        self.note: Note | None = None
        self._free_s = 0.0

    def compute(self, row: str, name: str, seconds: float) -> None:
        """Sleep until the work would be done."""
        now_s = time.monotonic()
        if now_s - self._free_s > HIDDEN_S:
            self._free_s = now_s
        begin_s = self._free_s
        self._free_s += seconds
        left_s = self._free_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        if self.note is not None:
            self.note(row, name, begin_s, self._free_s)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, signal: torch.Tensor, layer: ReplayLayer, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.device.compute("forward", layer.name, layer.forward_s)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        layer: ReplayLayer = ctx.layer
        layer.device.compute("backward", layer.name, layer.backward_s)
        return gradients[0], None, *(layer.gradients.of(parameter) for parameter in layer.parameters())


class Gradients:
    """What the backward pass adds to parameters: `value`, or value + (index % 5), which shows what went astray.

    All are cut from one tensor that is there already: making them would take the CPU longer than it takes a GPU.
    """

    def __init__(self, value: float, most_elements: int) -> None:
        self._value = value
        self._values = torch.full((most_elements,), value)

    def set_patterned(self, patterned: bool) -> None:
        """Choose what gradients are made of from now on."""
        self._values.fill_(self._value)
        if patterned:
            self._values += pattern(self._values)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter, a view that autograd takes over without a copy."""
        return self._values[: parameter.numel()].view(parameter.shape)


class ReplayLayer(torch.nn.Module):
    """One layer. Its parameters start at 0."""

    def __init__(self, layer: Layer, device: Device, gradients: Gradients) -> None:
        super().__init__()
        self.name = layer.name
        self.forward_s = layer.forward_s
        self.backward_s = layer.backward_s
        self.device = device
        self.gradients = gradients
        for number, shape in enumerate(layer.shapes):
            self.register_parameter(f"tensor{number}", torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """Take the layer's time."""
        result: torch.Tensor = _Work.apply(signal, self, *self.parameters())
        return result


class ReplayModel(torch.nn.Sequential):
    """The layers one after another.

    Args:
        rank: gradients are rank + 1.
    """

    def __init__(self, profile: Profile, device: Device, rank: int) -> None:
        gradients = Gradients(rank + 1.0, max(math.prod(shape) for layer in profile.layers for shape in layer.shapes))
        super().__init__(*(ReplayLayer(layer, device, gradients) for layer in profile.layers))
        self.gradients = gradients

    def wrong(self, *, learning_rate: float, ranks: int, steps: int, patterned_steps: int) -> int:
        """Return how many elements plain gradient descent on averaged gradients would not have brought here."""
        count = 0
        for parameter in self.parameters():
            mean = (ranks + 1) / 2 * steps + patterned_steps * pattern(parameter)
            count += int((~torch.isclose(parameter.detach(), -learning_rate * mean)).sum())
        return count


def pattern(parameter: torch.Tensor) -> torch.Tensor:
    """Return index % 5 for each element."""
    return (torch.arange(parameter.numel(), dtype=torch.float32) % 5).view(parameter.shape)
