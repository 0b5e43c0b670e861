"""Profiles: the published sizes of the models known by name, and what is said about a wrong file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_bps.errors import ConfigError
from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Layer, Profile, read

MINE: dict[str, Any] = {
    "name": "mine",
    "samples": 8,
    "layers": [
        {"name": "conv", "shapes": [[8, 3, 3, 3]], "forward_s": 0.25, "backward_s": 0.5},
        {"name": "fc", "shapes": [[10, 8], [10]], "forward_s": 0.25, "backward_s": 0.5},
    ],
}


# torchvision's vgg16 and resnet50, and transformers' BertModel of bert-large-uncased, count these
@pytest.mark.parametrize(
    ("name", "num_elements", "compute_s"),
    [("vgg16", 138_357_544, 0.261), ("resnet50", 25_557_032, 0.173), ("bert-large", 335_141_888, 0.300)],
)
def test_sizes_are_the_published_ones(name: str, num_elements: int, compute_s: float) -> None:
    model = MODELS[name]()
    assert model.num_elements == num_elements
    assert model.nbytes == 4 * num_elements
    assert model.compute_s == pytest.approx(compute_s)
    assert model.forward_s == pytest.approx(compute_s / 3)


# multiply-adds: 15.47 G for VGG16 (0.80 % of it in the three last layers), 4.09 G for ResNet50
def test_time_goes_by_multiply_adds() -> None:
    vgg, resnet = MODELS["vgg16"](), MODELS["resnet50"]()
    last = sum(layer.forward_s for layer in vgg.layers[-3:])
    assert last / vgg.forward_s == pytest.approx(123.6e6 / 15.47e9, rel=0.01)
    first, fc = resnet.layers[0], resnet.layers[-1]
    assert first.forward_s / resnet.forward_s == pytest.approx(118.0e6 / 4.1e9, rel=0.01)
    assert first.forward_s / fc.forward_s == pytest.approx(118.0e6 / 2.05e6, rel=0.01)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MINE))
    assert read(path) == Profile(
        "mine", 8, (Layer("conv", ((8, 3, 3, 3),), 0.25, 0.5), Layer("fc", ((10, 8), (10,)), 0.25, 0.5))
    )
    assert read(path).nbytes == 4 * (216 + 90)


def changed(**fields: object) -> dict[str, Any]:
    return {**MINE, **fields}


def with_layer(**fields: object) -> dict[str, Any]:
    return changed(layers=[MINE["layers"][0], {**MINE["layers"][1], **fields}])


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (changed(samples=0), "samples must be at least 1"),
        (changed(itemsize=0), "itemsize must be at least 1"),
        (changed(layers=[]), "layers must not be empty"),
        (changed(layers=[{**MINE["layers"][0], "shapes": []}]), "no layer has parameters"),
        (changed(batch=3), "unknown field `batch`"),
        ({"name": "mine"}, "missing required field `samples`"),
        (with_layer(shapes=[[-1]]), "layer 'fc' has a shape with a negative length"),
        (with_layer(forward_s=-1.0), "layer 'fc' has a time that is negative"),
        (with_layer(forward_s="soon"), r"$.layers[1].forward_s"),
        (changed(layers=[{**MINE["layers"][0], "forward_s": 0, "backward_s": 0}]), "all forward_s and backward_s"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, document: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert complaint in str(raised.value)
    assert "wrong.json" in str(raised.value)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read(tmp_path / "none.json")
    path = tmp_path / "text"
    path.write_text("no json")
    with pytest.raises(ConfigError, match="is no profile"):
        read(path)
