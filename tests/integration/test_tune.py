"""`byteps tune` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROFILE = {
    "name": "tiny",
    "samples": 8,
    "layers": [{"name": "layer", "shapes": [[300_000], [3]], "forward_s": 0.002, "backward_s": 0.004}],
}


def tune(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_bps.cli.main", "tune", *arguments]
    around = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=55, check=False, env=around)


def test_settings_are_tried_and_sums_checked(tmp_path: Path) -> None:
    profile, results = tmp_path / "tiny.json", tmp_path / "results.json"
    profile.write_text(json.dumps(PROFILE))
    small = ("--model", str(profile), "--seconds", "0", "--json", str(results))
    done = tune(*small, BYTEPS_FORCE_DISTRIBUTED="1", BYTEPS_LANES="4")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["trials"][0] == {**found["trials"][0], "partition_bytes": 1 << 20, "scheduling_credit": 0, "lanes": 4}
    assert {row["lanes"] for row in found["trials"]} == {1, 2, 4, 8}
    assert all(row["seconds"] > 0 for row in found["trials"])
    assert "1.2 MB in 1 buckets, 2 ranks on 1 hosts" in done.stdout
    assert "set now" in done.stdout or "put down on every rank" in done.stdout


def test_ranks_of_one_host_have_nothing_to_tune() -> None:
    done = tune()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BYTEPS_FORCE_DISTRIBUTED=1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere.json"), "nowhere.json"),
        (("--ranks", "1"), "--ranks 1"),
        (("--megabytes", "0"), "--megabytes"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], words: str) -> None:
    done = tune(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
