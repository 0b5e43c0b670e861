"""The headline benchmark from end to end, on a model so small that only its sums are of interest."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.integration.rig import Process

PROFILE = {
    "name": "tiny",
    "samples": 8,
    "layers": [
        {"name": f"layer{i}", "shapes": [[300_000], [3]], "forward_s": 0.002, "backward_s": 0.004} for i in range(4)
    ],
}


@pytest.mark.netns
def test_a_cell_with_its_timeline(tmp_path: Path) -> None:
    profile, results = tmp_path / "tiny.json", tmp_path / "results.json"
    profile.write_text(json.dumps(PROFILE))
    command = [sys.executable, "benchmarks/headline.py", "--models", str(profile), "--clusters", "2+1", "--timeline"]
    command += ["--bucket-mb", "1.5", "--divide", "2", "--rounds", "1", "--steps", "2", "--json", str(results)]
    with Process(command) as benchmark:
        assert benchmark.wait(time.monotonic() + 50) == 0, benchmark.output
    (result,) = json.loads(results.read_text())["cells"]
    variants = ["gloo", "byteps", "byteps+cross-barrier"]
    assert [(row["variant"], row["wrong"]) for row in result["rows"]] == [(variant, 0) for variant in variants]
    for variant in variants:
        events = result["timeline"][variant]
        layers = {(event["row"], event["name"]) for event in events}
        assert {(row, f"layer{i}") for row in ("backward", "forward") for i in range(4)} <= layers
        # in halves: buckets of 0.5 and then 0.75 MiB, of layers of 0.57
        sent = "bucket" if variant == "gloo" else "partition"
        operations = {event["name"].split("/")[0] for event in events if event["row"] == sent}
        assert len(operations) == 3
        assert all(event["begin_s"] <= event["end_s"] for event in events)
    assert "vs limit" in benchmark.output
