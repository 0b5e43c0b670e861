"""The published comparison, emulated: images/s of stock DDP through servers beside a ring's, with the theory's limit.

    python benchmarks/headline.py --models vgg16 --clusters 4+4 --gbps 20            one cell, two minutes
    python benchmarks/headline.py --table --json benchmarks/results/headline.json    the table, ...
    python benchmarks/headline.py --curve --models vgg16 --json ...                  the gain from 1 to 100 Gb/s
    python benchmarks/headline.py --ablation --models vgg16 --json ...               each mechanism taken away
    python benchmarks/headline.py --timeline ... --json ...                          one step's events, for a picture
    python benchmarks/plots.py benchmarks/results/headline.json                      pictures of what a file holds

The testbed: nodes of 8 V100, batch 64 a GPU, TCP at 20 Gb/s (published: ResNet50 +44 %, VGG16 +100 %). Here each
node is a network namespace with one rank, which replays such a node's step (benchmarks/replay.py); each server is one
too. Gradients and partitions are --divide times smaller; a link of --link-mbit stands for one of --gbps, and times are
stretched so that communication is to computing what it is there. Figures are in the testbed's time. gloo's ring and
ours take turns in one run. "vs limit" is the step over what torch_bps.theory allows for that configuration. Needs root
and `ip`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import torch_bps
from benchmarks import harness
from benchmarks.cells import BUCKET_MB, CROSS, OURS, RING, TABLE, Cell, ablation, profile_of, theory_s
from benchmarks.job import run_job
from benchmarks.netlab import NetLab, why_not
from benchmarks.replay import WARM_UP, Scale
from torch_bps.config import Config
from torch_bps.theory.architectures import MODELS

ROOT = Path(__file__).resolve().parents[1]
TOTAL_MBIT, MOST_MBIT = 1000, 125
"""over all hosts' links, and on one. Two cores carry four times that, but a rank's copies of its gradients, which take
a GPU no time, then show in its step (VGG16, 4+4: backward passes 2.5 ms late at 125 Mbit/s, twice that at 250)."""
START_S = 60.0
PATIENCE = 4
"""times what theory gives, for a machine that is shared; then a job is ended"""
GBPS_OF_CURVE = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 100.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 1 when a sum was wrong or a job failed."""
    options = _parse(arguments)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    cells = _cells(options)
    results: list[dict[str, Any]] = []
    failed = 0
    for cell in cells:
        try:
            result = _run(cell, options)
        except (TimeoutError, RuntimeError) as error:  # the other cells are worth having
            print(f"# {cell.title()} failed: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        results.append(result)
        print("\n".join(table(result)), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"about": about(arguments), "cells": results}, indent=1) + "\n")
    wrong = sum(row["wrong"] for result in results for row in result["rows"])
    return 1 if failed or wrong else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, or profiles' files")
    parser.add_argument("--clusters", default="4+4", help="nodes+servers, as 4+4,8+8,4+0")
    parser.add_argument("--gbps", default="20", help="of the testbed's links, as 5,20")
    parser.add_argument("--flow-gbps", type=float, default=0.0, help="of one connection; 0: no cap")
    parser.add_argument("--variants", default="", help=f"default: {RING},{OURS},{CROSS}")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--table", action="store_true", help="the cells that the project is held to")
    kinds.add_argument("--curve", action="store_true", help=f"at {', '.join(f'{g:g}' for g in GBPS_OF_CURVE)} Gb/s")
    kinds.add_argument("--ablation", action="store_true", help="one mechanism less at a time")
    parser.add_argument("--timeline", action="store_true", help="record what one step does when")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=3, help="a turn, beside the first")
    parser.add_argument("--divide", type=float, default=10.0, help="how much smaller gradients and partitions are")
    parser.add_argument("--link-mbit", type=int, default=0, help="rate of the emulated links; 0: what two cores carry")
    parser.add_argument("--bucket-mb", type=float, default=BUCKET_MB, help="DDP's bucket_cap_mb, as on the testbed")
    parser.add_argument("--lanes", type=int, default=2, help="BYTEPS_LANES")
    parser.add_argument("--without-priority", action="store_true", help="all of our calls alike")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    if options.divide <= 0 or options.link_mbit < 0 or options.bucket_mb <= 0:
        parser.error("--divide and --bucket-mb must be above 0, --link-mbit not below")
    try:
        options.clusters = [tuple(map(int, text.split("+", 1))) for text in options.clusters.split(",")]
        options.gbps = [float(text) for text in options.gbps.split(",")]
        for model in options.models.split(","):
            profile_of(model)
    except ValueError as error:  # a ConfigError is one
        parser.error(str(error))
    return options


def _cells(options: argparse.Namespace) -> list[Cell]:
    models = options.models.split(",")
    if options.table:
        return [replace(cell, model=model) for cell in TABLE for model in models]
    if options.ablation:
        return [replace(cell, model=model) for cell in ablation() for model in models]
    rates = GBPS_OF_CURVE if options.curve else options.gbps
    variants = tuple(options.variants.split(",")) if options.variants else (RING, OURS, CROSS)
    switches = ("--without-priority",) if options.without_priority else ()
    return [
        Cell(model, nodes, servers, gbps, options.flow_gbps, variants, switches=switches)
        for nodes, servers in options.clusters
        for gbps in rates
        for model in models
    ]


def _run(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Run a cell. Raises TimeoutError, RuntimeError."""
    hosts = cell.nodes + cell.servers
    link_mbit = options.link_mbit or min(MOST_MBIT, TOTAL_MBIT // max(hosts, 2 * cell.nodes))
    scale = Scale.of(cell.gbps, link_mbit, options.divide)
    flow_mbit = round(cell.flow_gbps / cell.gbps * link_mbit)
    profile = profile_of(cell.model)
    lanes = int(cell.env.get("BYTEPS_LANES", options.lanes))
    limits = {variant: theory_s(cell, variant, profile, options.bucket_mb, lanes) for variant in cell.variants}
    steps = WARM_UP + options.rounds * (options.steps + 1)
    timeout_s = START_S + PATIENCE * steps * scale.stretch * sum(limits.values())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "replay_rank.py"), "--model", cell.model]
        command += ["--variants", ",".join(cell.variants), "--output", str(output)]
        for name in ("rounds", "steps", "divide", "bucket_mb"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        command += ["--stretch", str(scale.stretch), *cell.switches, *(["--timeline"] if options.timeline else [])]

        def env(rank: int) -> dict[str, str]:
            node_id = {} if cell.local_sum else {"BYTEPS_NODE_ID": f"rank{rank}"}
            sizes = {"BYTEPS_PARTITION_BYTES": str(round(Config.partition_bytes / options.divide))}
            return {"BYTEPS_LANES": str(options.lanes), **sizes, **cell.env, **node_id}

        with NetLab(hosts, link_mbit, flow_mbit=flow_mbit) as lab:
            code = run_job(
                lab, command, nodes=cell.nodes, servers=cell.servers, ranks_per_node=cell.ranks_per_node, env=env,
                timeout_s=timeout_s,
            )  # fmt: skip
            dropped = sum(sum(lab.drops(host)) for host in range(hosts))
        if not output.exists():
            raise RuntimeError(f"exit code {code}, no result")
        rows = json.loads(output.read_text())
    ring_s = next((row["step_s"] for row in rows if row["variant"] == RING), None)
    for row in rows:
        row["limit_s"] = limits[row["variant"]]
        row["images_per_s"] = cell.nodes * profile.samples / row["step_s"]
        row["gain"] = ring_s / row["step_s"] if ring_s else None
        row["gain_limit"] = limits[RING] / row["limit_s"] if RING in limits else None
    events = {row["variant"]: row.pop("events") for row in rows}
    return {
        "cell": {**asdict(cell), "link_mbit": link_mbit, "lanes": lanes, "bucket_mb": options.bucket_mb},
        "scale": asdict(scale),
        "dropped": dropped,
        "rows": rows,
        **({"timeline": events} if options.timeline else {}),
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return a cell's lines."""
    cell = Cell.of(result)
    scale = result["scale"]
    lines = [
        f"# {cell.title()} (sizes / {scale['divide']:g}, times x {scale['stretch']:.3g}, "
        f"links of {result['cell']['link_mbit']} Mbit/s)",
        f"{'variant':<22}{'step (ms)':>11}{'min':>8}{'max':>8}{'images/s':>10}{'gain':>7}{'theory':>8}"
        f"{'limit (ms)':>12}{'vs limit':>10}{'#wrong':>8}",
    ]
    for row in result["rows"]:
        gain, most = (f"{row[name]:.2f}x" if row[name] else "" for name in ("gain", "gain_limit"))
        lines.append(
            f"{row['variant']:<22}{row['step_s'] * 1e3:>11.1f}{row['min_s'] * 1e3:>8.0f}{row['max_s'] * 1e3:>8.0f}"
            f"{row['images_per_s']:>10.0f}{gain:>7}{most:>8}{row['limit_s'] * 1e3:>12.1f}"
            f"{row['step_s'] / row['limit_s']:>9.2f}x{row['wrong']:>8}"
        )
    lines.append(f"# links dropped {result['dropped']} packets")
    return lines


def about(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return what a reader of the results must know of where they are from."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "command": harness.command([__file__, *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": commit.stdout.strip(),
        "torch_bps": torch_bps.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


if __name__ == "__main__":
    sys.exit(main())
