"""Collectives between hosts with links of a given rate: ours beside gloo's, with and without summation servers.

    python benchmarks/network.py --workers 4 --servers 4 --rate 500 --sizes 1M,25M

Hosts are network namespaces (benchmarks/netlab.py); a worker is a rank of `byteps bench`, a server is `byteps server`
on a host of its own. Fewer servers than workers: workers' hosts run co-located servers too, and share the load by the
optimum. "vs limit" compares with the wire: --goodput of the rate. Needs root and `ip`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.job import run_job
from benchmarks.netlab import NetLab, why_not
from torch_bps.theory.step import GOODPUT

TIMEOUT_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rate", type=int, default=500, help="of each link, Mbit/s")
    parser.add_argument("--sizes", default="64K,1M,25M")
    parser.add_argument("--collective", default="all_reduce")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size and backend")
    parser.add_argument("--goodput", type=float, default=GOODPUT)
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "torch_bps.bench", options.collective, "--sizes", options.sizes]
    command += ["--seconds", str(options.seconds), "--gbps", str(options.rate * options.goodput / 1000)]
    if options.json:
        command += ["--json", options.json]
    with NetLab(options.workers + options.servers, options.rate) as lab:
        print(f"# {options.workers} workers, {options.servers} servers, links of {options.rate} Mbit/s", flush=True)
        return run_ranks(lab, options.workers, command)


def run_ranks(lab: NetLab, workers: int, command: Sequence[str]) -> int:
    """Run `command` as a rank on each of the first hosts, servers on the others; returns the first exit code not 0."""
    return run_job(lab, command, nodes=workers, servers=len(lab.hosts) - workers, timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
