"""`byteps bench` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_bps.bench.table import COLLECTIVES


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_bps.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_right_on_both_backends(collective: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench(collective, "--sizes", "0,1K,300000", "--seconds", "0.02", "--ranks", "3", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [row["backend"] for row in rows] == ["byteps", "gloo"] * 3
    assert not any(row["wrong"] for row in rows)
    assert "vs gloo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_reduce", "--sizes", "1K,big"), "--sizes"),
        (("all_reduce", "--ranks", "1"), "--ranks 1"),
        (("all_reduce", "--dtype", "float99"), "float99"),
        (("all_sum",), "all_sum"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert words in done.stderr
