"""How long a small blocking all_reduce takes while large ones run in the background: ours beside gloo's.

    python benchmarks/overtake.py --workers 2 --servers 2 --rate 500       hosts are network namespaces (root, `ip`)
    python benchmarks/overtake.py --workers 2 --rate 0                     ranks of this host

In each round each backend starts --buckets async all_reduces of --bucket bytes and, after a part of the time that they
take, which differs from round to round, a blocking one of --small bytes, timed on the slowest rank. With --priority it
is an async one of that priority, waited for at once. The bar: under 5 % of the background's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_bps
from benchmarks.netlab import NetLab, why_not
from torch_bps.bench.table import nbytes_of

BACKENDS = ("byteps", "gloo")
BAR = 0.05
LATEST = 0.6
"""of the background's time: the latest moment for the small one"""

Row = tuple[float, float, int]
"""seconds of the large ones, of the small one, and wrong elements; of the slowest rank"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 when a sum was wrong, 3 when the bar was missed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rate", type=int, default=500, help="of each link, Mbit/s; 0: no network, ranks of this host")
    parser.add_argument("--bucket", type=nbytes_of, default=25_000_000, help="bytes, as 25000000 or 24M")
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--small", type=nbytes_of, default=4096, help="bytes")
    parser.add_argument("--priority", type=int, help="of the small one, which then is no blocking call (byteps)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        return _rank(options)
    command = [sys.executable, __file__, *arguments]
    if not options.rate:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.workers)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *launch, *command[1:]], env=env, check=False).returncode
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    from benchmarks.network import run_ranks

    with NetLab(options.workers + options.servers, options.rate) as lab:
        return run_ranks(lab, options.workers, command)


def _rank(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows: dict[str, list[Row]] = {backend: [] for backend in BACKENDS}
    background_s = dict.fromkeys(BACKENDS, 0.0)
    for round_number in range(-1, options.rounds):
        for backend, group in groups.items():
            dist.barrier()
            row = _round(options, group, background_s[backend] * (round_number % 4) * LATEST / 3)
            background_s[backend] = row[0]
            if round_number >= 0:
                rows[backend].append(row)
    table = [_line(backend, rows[backend]) for backend in BACKENDS]
    code = 0
    if dist.get_rank() == 0:
        code = _report(options, table)
    dist.destroy_process_group()
    return code


def _round(options: argparse.Namespace, group: object, pause_s: float) -> Row:
    """Run the large ones, and after `pause_s` the small one."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    large = [torch.full((options.bucket // 4,), float(rank + number)) for number in range(options.buckets)]
    small = torch.full((options.small // 4,), float(rank))
    dist.barrier()
    began = time.perf_counter()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in large]
    time.sleep(pause_s)
    asked = time.perf_counter()
    if options.priority is None:
        dist.all_reduce(small, group=group)
    else:
        with torch_bps.priority(options.priority):
            work = dist.all_reduce(small, group=group, async_op=True)
        work.wait()
    small_s = time.perf_counter() - asked
    for work in works:
        work.wait()
    total = time.perf_counter() - began
    base = sum(range(size))
    wrong = sum(int((tensor != base + size * number).sum()) for number, tensor in enumerate(large))
    wrong += int((small != base).sum())
    slowest = torch.tensor([total, small_s], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    errors = torch.tensor([wrong])
    dist.all_reduce(errors)
    return float(slowest[0]), float(slowest[1]), int(errors)


def _line(backend: str, rounds: list[Row]) -> dict[str, Any]:
    total_s = statistics.median(row[0] for row in rounds)
    small_s = [row[1] for row in rounds]
    return {
        "backend": backend,
        "background_s": total_s,
        "small_median_s": statistics.median(small_s),
        "small_max_s": max(small_s),
        "share": statistics.median(small_s) / total_s,
        "wrong": sum(row[2] for row in rounds),
    }


def _report(options: argparse.Namespace, table: list[dict[str, Any]]) -> int:
    network = f"links of {options.rate} Mbit/s" if options.rate else "one host"
    servers = options.servers if options.rate else 0
    print(
        f"# {options.workers} workers, {servers} servers, {network}; {options.small} bytes, blocking, behind "
        f"{options.buckets} x {options.bucket} bytes"
    )
    print(f"{'backend':>8} {'background ms':>14} {'small ms':>9} {'max ms':>8} {'of background':>14} {'wrong':>6}")
    for row in table:
        print(
            f"{row['backend']:>8} {row['background_s'] * 1e3:14.1f} {row['small_median_s'] * 1e3:9.2f} "
            f"{row['small_max_s'] * 1e3:8.2f} {row['share'] * 100:13.2f}% {row['wrong']:6d}"
        )
    ours, gloo = table
    print(f"# vs gloo: {gloo['small_median_s'] / ours['small_median_s']:.1f}x sooner", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    if any(row["wrong"] for row in table):
        return 1
    return 0 if ours["share"] < BAR else 3


if __name__ == "__main__":
    sys.exit(main())
