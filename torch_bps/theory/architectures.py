"""The layers of ResNet50, VGG16 and BERT-large, with the times of a node of 8 V100 at batch 64 a GPU.

Shapes and multiply-adds follow the papers' tables, so the sums of parameters are the published ones:

    VGG16        138.36 M   Simonyan, Zisserman 2014 (arXiv:1409.1556), table 1, configuration D
    ResNet50      25.56 M   He et al. 2015 (arXiv:1512.03385), table 1, column "50-layer"; stride in the 3x3 convolution
    BERT-large   335.14 M   Devlin et al. 2018 (arXiv:1810.04805): 24 layers of 1024, 16 heads, vocabulary 30522, pooler

A step's time is that of one V100, since the 8 of a node compute side by side. A layer's share goes by its
multiply-adds (so normalisations and embeddings take next to nothing); backward takes twice the forward's time.

    VGG16        261 ms   245 images/s: what float32 benchmarks of that time commonly report; no single source
    ResNet50     173 ms   370 images/s, float32: github.com/sandeepkumar-skb/pytorch_experiments (torchvision, 374)
    BERT-large   300 ms   213 sequences/s of 128 tokens, mixed precision: github.com/NVIDIA/DeepLearningExamples,
                          PyTorch/LanguageModeling/BERT, July 2019: 172 (DGX-1), 182 (DGX-2), 211 (DGX-2H);
                          gradients are sent as float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from torch_bps.theory.profile import Layer, Profile

_SAMPLES: Final = 8 * 64


class _Work(NamedTuple):
    """A layer: parameters' shapes, and multiply-adds for one sample."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    multiply_adds: float


def vgg16() -> Profile:
    """Return the profile of VGG16."""
    return _profile("vgg16", _vgg16(), step_s=0.261)


def resnet50() -> Profile:
    """Return the profile of ResNet50."""
    return _profile("resnet50", _resnet50(), step_s=0.173)


def bert_large() -> Profile:
    """Return the profile of BERT-large."""
    return _profile("bert-large", _bert_large(), step_s=0.300)


MODELS: Final[dict[str, Callable[[], Profile]]] = {"vgg16": vgg16, "resnet50": resnet50, "bert-large": bert_large}


def _profile(name: str, works: Iterator[_Work], step_s: float) -> Profile:
    layers = list(works)
    forward_s = step_s / 3 / sum(work.multiply_adds for work in layers)
    return Profile(
        name,
        _SAMPLES,
        tuple(
            Layer(work.name, work.shapes, work.multiply_adds * forward_s, 2 * work.multiply_adds * forward_s)
            for work in layers
        ),
    )


def _vgg16() -> Iterator[_Work]:
    channels, size = 3, 224
    for stage, (depth, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for number in range(1, depth + 1):
            yield _convolution(f"conv{stage}_{number}", channels, width, 3, size, bias=True)
            channels = width
        size //= 2
    yield _linear("fc6", channels * size * size, 4096)
    yield _linear("fc7", 4096, 4096)
    yield _linear("fc8", 4096, 1000)


def _resnet50() -> Iterator[_Work]:
    size = 112
    yield _convolution("conv1", 3, 64, 7, size)
    yield _batch_norm("bn1", 64, size)
    size //= 2
    channels = 64
    for stage, (depth, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for block in range(depth):
            name = f"conv{stage}_{block + 1}"
            before = size
            if stage > 2 and block == 0:
                size //= 2
            yield _convolution(f"{name}.1", channels, width, 1, before)
            yield _batch_norm(f"{name}.bn1", width, before)
            yield _convolution(f"{name}.2", width, width, 3, size)
            yield _batch_norm(f"{name}.bn2", width, size)
            yield _convolution(f"{name}.3", width, 4 * width, 1, size)
            yield _batch_norm(f"{name}.bn3", 4 * width, size)
            if block == 0:
                yield _convolution(f"{name}.shortcut", channels, 4 * width, 1, size)
                yield _batch_norm(f"{name}.shortcut_bn", 4 * width, size)
            channels = 4 * width
    yield _linear("fc", channels, 1000)


def _bert_large(tokens: int = 128, width: int = 1024, vocabulary: int = 30522) -> Iterator[_Work]:
    for name, rows in (("word", vocabulary), ("position", 512), ("token_type", 2)):
        yield _Work(f"embeddings.{name}", ((rows, width),), tokens * width)
    yield _layer_norm("embeddings.norm", width, tokens)
    for number in range(24):
        name = f"layer{number}"
        for part in ("query", "key", "value"):
            yield _linear(f"{name}.{part}", width, width, tokens)
        output = _linear(f"{name}.attention_output", width, width, tokens)
        attention = 2 * tokens * tokens * width  # queries by keys, weights by values: no parameters
        yield output._replace(multiply_adds=output.multiply_adds + attention)
        yield _layer_norm(f"{name}.attention_norm", width, tokens)
        yield _linear(f"{name}.intermediate", width, 4 * width, tokens)
        yield _linear(f"{name}.output", 4 * width, width, tokens)
        yield _layer_norm(f"{name}.norm", width, tokens)
    yield _linear("pooler", width, width)


def _convolution(name: str, inputs: int, outputs: int, kernel: int, size: int, bias: bool = False) -> _Work:
    """Return a convolution; `size` is the height and width of what it puts out."""
    weight = (outputs, inputs, kernel, kernel)
    shapes = (weight, (outputs,)) if bias else (weight,)
    return _Work(name, shapes, outputs * inputs * kernel * kernel * size * size)


def _linear(name: str, inputs: int, outputs: int, rows: int = 1) -> _Work:
    return _Work(name, ((outputs, inputs), (outputs,)), outputs * inputs * rows)


def _batch_norm(name: str, channels: int, size: int) -> _Work:
    return _Work(name, ((channels,), (channels,)), channels * size * size)


def _layer_norm(name: str, width: int, rows: int) -> _Work:
    return _Work(name, ((width,), (width,)), width * rows)
