"""Hugging Face accelerate and PyTorch Lightning with backend "byteps": they train to the same weights as with gloo."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integration.rig import json_lines, run_torchrun

SCRIPT = Path(__file__).with_name("frameworks.py")
PACKAGES = {"accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning"}


@functools.cache
def trained(name: str, backend: str, through_server: bool) -> list[Any]:
    """Return a digest of what each rank ended with."""
    env = {"BYTEPS_FORCE_DISTRIBUTED": "1"} if through_server else {}
    results = run_torchrun(SCRIPT, name, backend, nproc=2, env=env, timeout_s=100)
    ranks = sorted(json_lines(results[0].output), key=lambda line: line["rank"])
    assert [rank["backend"] for rank in ranks] == [backend] * 2, results[0].output
    return [rank["weights"] for rank in ranks]


@pytest.mark.slow
@pytest.mark.timeout(220)
@pytest.mark.parametrize("through_server", [False, True], ids=["shm", "server"])
@pytest.mark.parametrize("name", PACKAGES)
def test_framework(name: str, through_server: bool) -> None:
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    ours, theirs = trained(name, "byteps", through_server), trained(name, "gloo", False)
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
