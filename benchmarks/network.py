"""Collectives between hosts with links of a given rate: ours beside gloo's, with and without summation servers.

    python benchmarks/network.py --workers 4 --servers 4 --rate 500 --sizes 1M,25M

Hosts are network namespaces (benchmarks/netlab.py); a worker is a rank of `byteps bench`, a server is `byteps server`
on a host of its own. Fewer servers than workers: workers' hosts run co-located servers too, and share the load by the
optimum. "vs limit" compares with the wire: --goodput of the rate. Needs root and `ip`.

"retrans" counts the segments that the workers' hosts sent again in a backend's own turns. Servers talk to our ranks
only: what their hosts sent again, and what the links dropped on the way to them, is printed below for the whole run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Lines, Result, Row
from benchmarks.job import run_job
from benchmarks.netlab import NetLab, why_not
from torch_bps.bench.usage import tcp_counters
from torch_bps.theory.step import GOODPUT

TIMEOUT_S = 3600.0
COLUMNS = (
    Column("size (B)", "nbytes", ","),
    Column("backend", "backend"),
    Column("time (ms)", "seconds", ".2f", 1e3),
    Column("algbw (GB/s)", "algbw", ".3f"),
    Column("#wrong", "wrong"),
    Column("vs gloo", "faster", ".2f"),
    Column("vs limit", "of_limit", ".2f"),
    Column("CPU (s/GB)", "cpu_s_per_gb", ".2f"),
    Column("user", "user_s_per_gb", ".2f"),
    Column("system", "system_s_per_gb", ".2f"),
    Column("retrans/GB", "retransmits_per_gb", ".0f"),
)


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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    with NetLab(options.workers + options.servers, options.rate) as lab, tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "torch_bps.bench", options.collective, "--sizes", options.sizes]
        command += ["--seconds", str(options.seconds), "--gbps", str(options.rate * options.goodput / 1000)]
        code = run_ranks(lab, options.workers, [*command, "--json", file.name], quiet=True)
        rows = with_ratios(json.loads(Path(file.name).read_text() or "[]"))
        notes = _losses(lab, options.workers)
    result = Result(
        f"network_{options.workers}_workers_{options.servers}_servers",
        f"{options.collective}: {options.workers} workers, {options.servers} servers, links of {options.rate} Mbit/s",
        COLUMNS,
        rows,
        {"rate_mbit": options.rate, "seconds": options.seconds, "goodput": options.goodput},
        Lines("nbytes", "algbw", "backend"),
        notes,
    )
    result.print()
    if options.json:
        result.write(options.json)
    return code


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add to rows of `byteps bench` what they are beside the last backend of their size, and for each GB."""
    peers = {row["nbytes"]: row for row in rows}
    for row in rows:
        row["faster"] = peers[row["nbytes"]]["seconds"] / row["seconds"]
        row["of_limit"] = row["seconds"] / row["limit_s"]
        gigabytes = row["nbytes"] / 1e9
        row["user_s_per_gb"] = row["user_s"] / gigabytes
        row["system_s_per_gb"] = row["system_s"] / gigabytes
        row["retransmits_per_gb"] = row["retransmits"] / (gigabytes * row["calls"])
    return rows


def _losses(lab: NetLab, num_workers: int) -> list[str]:
    """Return a sentence each about the workers' and the servers' hosts: what was lost in the whole run."""
    sentences = []
    for who, hosts in (("workers", range(num_workers)), ("servers", range(num_workers, len(lab.hosts)))):
        counters = [tcp_counters(lab.run(host, ["cat", "/proc/net/snmp"])) for host in hosts]
        if not counters:
            continue
        sent, again = (sum(each[name] for each in counters) for name in ("OutSegs", "RetransSegs"))
        towards, away = (sum(counts) for counts in zip(*map(lab.drops, hosts), strict=True))
        sentences.append(
            f"{who}' hosts sent {again} of {sent} segments again; their links dropped {towards} packets on the way to "
            f"them, {away} from them"
        )
    return sentences


def run_ranks(lab: NetLab, workers: int, command: Sequence[str], quiet: bool = False) -> int:
    """Run `command` as a rank on each of the first hosts, servers on the others; returns the first exit code not 0.

    Args:
        quiet: do not let through what the ranks print.
    """
    return run_job(lab, command, nodes=workers, servers=len(lab.hosts) - workers, timeout_s=TIMEOUT_S, quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
