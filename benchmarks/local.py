"""Ranks of one host: every collective, ours beside gloo, and beside Open MPI and Horovod where they are installed.

    python benchmarks/local.py [--ranks 2,4] [--collectives all_reduce,broadcast] [--sizes 1M,16M]

A thin layer over `byteps bench`, which measures: all backends take turns in one run of each collective.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers
from benchmarks.harness import Column, Lines, Result, Row
from benchmarks.startup import free_port
from torch_bps.bench.table import COLLECTIVES

COLUMNS = (
    Column("collective", "collective"),
    Column("ranks", "ranks"),
    Column("size (B)", "nbytes", ","),
    Column("backend", "backend"),
    Column("time (us)", "seconds", ".1f", 1e6),
    Column("busbw (GB/s)", "busbw", ".2f"),
    Column("#wrong", "wrong"),
    Column("vs gloo", "faster", ".2f"),
    Column("vs limit", "of_limit", ".2f"),
    Column("CPU (s/GB)", "cpu_s_per_gb", ".2f"),
)
ALL_REDUCE_SIZES = {2: "1K,64K,1M,4M,16M,64M", 4: "64K,1M,16M,64M"}
OTHER_SIZES = "1M,16M"
RUN_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the first exit code that is not 0: 1 when a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default="", help="default: those of the bars")
    parser.add_argument("--seconds", default="1", help="for each size and backend")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    guests, notes = [], []
    for peer in peers.PEERS:
        if why := peers.why_not(peer):
            notes.append(f"skipped {why}")
        else:
            guests.append(peer)
    rows: list[Row] = []
    code = 0
    for ranks in map(int, options.ranks.split(",")):
        for collective in options.collectives.split(","):
            sizes = options.sizes or (
                ALL_REDUCE_SIZES.get(ranks, OTHER_SIZES) if collective == "all_reduce" else OTHER_SIZES
            )
            able = [peer for peer in guests if collective in getattr(peers.PEERS[peer], "COLLECTIVES", COLLECTIVES)]
            ended, more = run(collective, ranks, ["byteps", *able, "gloo"], sizes, options.seconds)
            code = code or ended
            rows += more
    for row in rows:
        (peer,) = (other for other in rows if other["backend"] == "gloo" and same_case(row, other))
        row["faster"] = peer["seconds"] / row["seconds"]
        row["of_limit"] = row["seconds"] / row["limit_s"] if row["limit_s"] else None
    lines = Lines("nbytes", "busbw", "backend", "collective")
    title = "Ranks of one host, taking turns with the peers"
    result = Result("local", title, COLUMNS, rows, {"seconds": options.seconds}, lines, notes)
    result.print()
    if options.json:
        result.write(options.json)
    return code


def same_case(row: Row, other: Row) -> bool:
    """Whether two rows differ in the backend only."""
    return all(row[key] == other[key] for key in ("collective", "ranks", "nbytes"))


def run(collective: str, ranks: int, backends: Sequence[str], sizes: str, seconds: str) -> tuple[int, list[Row]]:
    """Run one `byteps bench`; returns its exit code and rows."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        arguments = [collective, "--backend", ",".join(backends), "--sizes", sizes, "--seconds", seconds]
        arguments += ["--ranks", str(ranks), "--json", file.name]
        command = [sys.executable, "-m", "torch_bps.bench", *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if len(backends) > 2:
            mpirun = peers.launcher()
            assert mpirun is not None
            env["MASTER_PORT"] = str(free_port())
            flags = ["--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
            if os.geteuid() == 0:
                flags.append("--allow-run-as-root")
            command = [mpirun, *flags, sys.executable, peers.__file__, *arguments]
        print(f"# {collective}, {ranks} ranks: {', '.join(backends)}", file=sys.stderr, flush=True)
        done = subprocess.run(command, env=env, timeout=RUN_S, stdout=subprocess.PIPE, text=True, check=False)
        rows = Path(file.name).read_text()
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode, json.loads(rows) if rows else []


if __name__ == "__main__":
    sys.exit(main())
