"""The examples do what their first lines say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration.rig import run_torchrun
from torch_bps.data import digits

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAIN = EXAMPLES / "train_digits.py"
EPOCH = re.compile(r"epoch (\d+): loss (\S+), test accuracy (\S+)%")


def test_digits_are_whole() -> None:
    images, labels = digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("train_*.py")), ids=lambda path: path.name)
def test_training_examples_are_short_and_import_nothing_of_ours(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    tree = ast.parse(text)
    assert f"{path.parent.name}/{path.name}" in (ast.get_docstring(tree) or "")
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert not {name for name in imported if name.startswith("torch_bps")}


@pytest.mark.processes
@pytest.mark.parametrize("nproc", [1, 3])
def test_digits_train_on_any_number_of_ranks(nproc: int, tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    (result,) = run_torchrun(TRAIN, "--backend=gloo", "--epochs=10", f"--save={saved}", nproc=nproc)
    epochs = EPOCH.findall(result.output)
    assert [int(number) for number, _, _ in epochs] == list(range(1, 11))
    assert float(epochs[-1][1]) < float(epochs[0][1]) / 10
    assert float(epochs[-1][2]) >= 97.0
    assert saved.stat().st_size > 1_000_000


@pytest.mark.processes
@pytest.mark.timeout(120)  # three jobs, one after the other
def test_digits_repeat_exactly_for_a_seed(tmp_path: Path) -> None:
    import torch

    saved = []
    for run, seed in enumerate((3, 3, 4)):
        path = tmp_path / f"{run}.pt"
        run_torchrun(TRAIN, "--backend=gloo", "--epochs=1", f"--seed={seed}", f"--save={path}")
        saved.append(torch.load(path, weights_only=True))
    first, again, other = saved
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.processes
@pytest.mark.timeout(120)  # three jobs, one after the other
def test_demo_compares_three_ways() -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--epochs=6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.splitlines()[-3:]
    assert [line.split("  ")[0] for line in table] == ["shared memory", "summation server", "gloo"]
    assert all(line.endswith("identical") for line in table)
    assert all(float(re.search(r"(\S+)%", line).group(1)) >= 97.0 for line in table)
    assert done.stdout.count("traffic:") == 4  # two ranks, two ways
