"""The ranks' side of the benchmark: backends take turns, a few calls each time."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_bps import topology
from torch_bps.bench import table
from torch_bps.bench.cases import Case
from torch_bps.bench.usage import Usage, usage

_ROUNDS = 5
_MIN_CALLS, _MAX_CALLS = 2, 200
"""a round"""


def measure(options: argparse.Namespace, peers: Mapping[str, type[Case]] | None = None) -> int:
    """Be a rank of the benchmark; returns the exit code.

    Args:
        peers: what `--backend` may name that is no backend of torch.distributed, and how it runs a case.
    """
    peers = peers or {}
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames what it still accepts
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SystemExit(f"--dtype {options.dtype!r} is no dtype of torch")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    backends = options.backend.split(",")
    groups = {backend: dist.new_group(backend="gloo" if backend in peers else backend) for backend in backends}
    rank, size = dist.get_rank(), dist.get_world_size()
    rows: list[table.Row] = []
    if rank == 0:
        print(f"# {options.collective}, {size} ranks, torch {torch.__version__}, medians of the slowest rank")
        print(table.heading(backends[-1]))
    for nbytes in options.sizes:
        cases = {
            backend: peers.get(backend, Case)(options.collective, nbytes, dtype, options.redop, group)
            for backend, group in groups.items()
        }
        limit_s = _limit_s(options.gbps, options.collective, cases[backends[0]].nbytes, size)
        these = _rows(options, cases, limit_s)
        rows += these
        if rank == 0:
            for row in these:
                print(table.line(row, these[-1]), flush=True)
    if rank == 0 and options.json:
        options.json.write_text(json.dumps(table.as_json(rows), indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if any(row.wrong for row in rows) else 0


def _rows(options: argparse.Namespace, cases: dict[str, Case], limit_s: float) -> list[table.Row]:
    """Measure one size on all backends in turns."""
    times: dict[str, list[float]] = {backend: [] for backend in cases}
    used = dict.fromkeys(cases, Usage())
    wrong = dict.fromkeys(cases, 0)
    calls: dict[str, int] = {}
    for round_number in range(-1, _ROUNDS):
        for backend, case in cases.items():
            dist.barrier()
            if round_number in (-1, _ROUNDS - 1):
                case.fill()
                case.run()
                wrong[backend] += case.wrong()
            before = usage()
            for _ in range(calls.get(backend, 3)):
                began = time.perf_counter()
                case.run()
                times[backend].append(time.perf_counter() - began)
            used[backend] = used[backend].plus(usage().since(before))
            if round_number < 0:
                wanted = options.seconds / _ROUNDS / max(statistics.median(times[backend]), 1e-6)
                count = torch.tensor([int(wanted)])
                dist.broadcast(count, 0)
                calls[backend] = min(max(int(count), _MIN_CALLS), _MAX_CALLS)
                times[backend].clear()
                used[backend] = Usage()
    return [
        _row(options, backend, case, times[backend], used[backend], wrong[backend], limit_s)
        for backend, case in cases.items()
    ]


def _row(
    options: argparse.Namespace,
    backend: str,
    case: Case,
    times: list[float],
    used: Usage,
    wrong: int,
    limit_s: float,
) -> table.Row:
    """Put together what all ranks measured of one size on one backend."""
    spread = [statistics.median(times), min(times), sorted(times)[int(0.99 * len(times))]]
    slowest = torch.tensor(spread, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    totals = torch.tensor([used.user_s, used.system_s, wrong], dtype=torch.float64)
    dist.all_reduce(totals)
    retransmits: list[tuple[str, int]] = [("", 0)] * case.size
    dist.all_gather_object(retransmits, (topology.node_identity(), used.retransmits))
    seconds, min_s, p99_s = slowest.tolist()
    user_s, system_s, all_wrong = totals.tolist()
    return table.Row(
        options.collective,
        backend,
        case.size,
        case.nbytes,
        case.count,
        options.dtype,
        options.redop if case.has_redop else "none",
        seconds,
        limit_s,
        int(all_wrong),
        calls=len(times),
        min_s=min_s,
        p99_s=p99_s,
        user_s=user_s / case.size / len(times),
        system_s=system_s / case.size / len(times),
        retransmits=sum(dict(retransmits).values()),  # ranks of one host count the same segments
    )


def _limit_s(gbps: float, collective: str, nbytes: int, size: int) -> float:
    """Return the least time the operation can take.

    With --gbps what a rank must send, or receive, through its link: all of an all_reduce's bytes once (servers), the
    share of the others for the rest. Else, on one host, a copy of the data into shared memory and one out of it, at the
    rate of all ranks copying at once, as measured just now.
    """
    if gbps:
        once = collective in ("all_reduce", "broadcast")
        return nbytes * (1.0 if once else (size - 1) / size) / (gbps * 1e9 / 8)
    source = torch.ones(max(nbytes, 1), dtype=torch.uint8)
    target = torch.ones_like(source)
    times = []
    dist.barrier()
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    seconds = torch.tensor([2 * statistics.median(times)], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)
