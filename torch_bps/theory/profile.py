"""A model as the step model sees it: layers in forward order, each with its gradients and its computing times.

A profile is one of `architectures.MODELS`, or a JSON file:

    {"name": "mine", "samples": 512, "layers": [
        {"name": "fc", "shapes": [[1000, 4096], [1000]], "forward_s": 0.001, "backward_s": 0.002}, ...]}
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from torch_bps.errors import ConfigError


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module with parameters of its own.

    Args:
        shapes: of its parameters, in the order of `parameters()`.
        forward_s, backward_s: what a node computes for it in a step.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward_s: float
    backward_s: float

    @property
    def num_elements(self) -> int:
        """Number of its parameters."""
        return sum(math.prod(shape) for shape in self.shapes)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on one kind of node.

    Args:
        samples: images, or sequences, that a node takes a step.
        layers: in the order of the forward pass.
        itemsize: bytes of a gradient's element.
    """

    name: str
    samples: int
    layers: tuple[Layer, ...]
    itemsize: int = 4

    @property
    def num_elements(self) -> int:
        """Number of parameters."""
        return sum(layer.num_elements for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Size of all gradients."""
        return self.num_elements * self.itemsize

    @property
    def forward_s(self) -> float:
        """What a forward pass takes."""
        return sum(layer.forward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """What a step takes when nothing is sent."""
        return self.forward_s + sum(layer.backward_s for layer in self.layers)


def read(path: Path) -> Profile:
    """Read a profile from a JSON file.

    Raises:
        ConfigError: the file cannot be read, is no profile, or holds a value that makes no sense; says which.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:  # ValidationError is one; says where, as `$.layers[2].forward_s`
        raise ConfigError(f"{path} is no profile: {error}", hint=_FORM) from None
    for what, wrong in (
        ("samples must be at least 1", profile.samples < 1),
        ("itemsize must be at least 1", profile.itemsize < 1),
        ("layers must not be empty", not profile.layers),
        ("no layer has parameters", not profile.num_elements),
    ):
        if wrong:
            raise ConfigError(f"{path}: {what}", hint=_FORM)
    for layer in profile.layers:
        if any(length < 0 for shape in layer.shapes for length in shape):
            raise ConfigError(f"{path}: layer {layer.name!r} has a shape with a negative length")
        if not all(0 <= seconds < math.inf for seconds in (layer.forward_s, layer.backward_s)):
            raise ConfigError(f"{path}: layer {layer.name!r} has a time that is negative")
    if not profile.compute_s:
        raise ConfigError(f"{path}: all forward_s and backward_s are 0", hint="they are seconds, as 0.0013")
    return profile


_FORM = (
    'the form is {"name": "mine", "samples": 512, "layers": [{"name": "fc", "shapes": [[1000, 4096], [1000]], '
    '"forward_s": 0.001, "backward_s": 0.002}, ...]}, layers in the order of the forward pass'
)
