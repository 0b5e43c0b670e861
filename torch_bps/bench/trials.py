"""The ranks' side of `byteps tune`: all try the same settings at the same time, and agree on the figures."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torch_bps
from torch_bps import topology
from torch_bps.bench.descent import Choice, descend
from torch_bps.bench.tune import VALUES, advice, bucket_sizes
from torch_bps.config import Config

LAST_TURNS = 3
TIMEOUT = timedelta(minutes=5)


class Trials:
    """Opens groups with settings to try and measures them: all ranks alike. Thread safety: one thread.

    Args:
        sizes: bytes of each bucket.
        seconds: for each trial.
    """

    def __init__(self, sizes: list[int], seconds: float) -> None:
        self._buckets = [torch.empty(nbytes // 4) for nbytes in sizes]
        self._seconds = seconds
        self.wrong = 0
        """elements that were not the sum, on all ranks"""

    def seconds_of(self, choice: Choice) -> float:
        """Return what a step takes with these settings, the same figure on every rank."""
        group = dist.new_group(backend="byteps", pg_options=torch_bps.Options(**choice), timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self._check(group)
        took_s: list[float] = []
        more = torch.ones(1)
        while more:
            dist.barrier()
            began = time.perf_counter()
            self._step(group)
            took_s.append(time.perf_counter() - began)
            more[0] = len(took_s) < 2 or sum(took_s) < self._seconds
            dist.broadcast(more, 0)
        dist.destroy_process_group(group)
        slowest_s = torch.tensor(statistics.median(took_s), dtype=torch.float64)
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
        return float(slowest_s)

    def _step(self, group: dist.ProcessGroup) -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in self._buckets]
        for work in works:
            assert work is not None
            work.wait()

    def _check(self, group: dist.ProcessGroup) -> None:
        """Sum once, and count what is wrong."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for bucket in self._buckets:
            bucket.fill_(rank + 1.0)
        self._step(group)
        wrong = torch.tensor([sum(int((bucket != size * (size + 1) / 2).sum()) for bucket in self._buckets)])
        dist.all_reduce(wrong)
        self.wrong += int(wrong)
        for bucket in self._buckets:
            bucket.zero_()  # sums of sums would overflow


def tune(options: argparse.Namespace) -> int:
    """Be a rank of `byteps tune`; returns the exit code. Rank 0's arguments and settings count."""
    present = Config.load()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, present.node_id or topology.node_identity())
    say = print if rank == 0 else _say_nothing
    through_servers = len({*hosts}) > 1 or present.force_distributed or present.servers or present.num_servers
    begin = {name: getattr(present, name) for name in VALUES}
    agreed: list[Any] = [through_servers, begin, bucket_sizes(options.profile, options.megabytes)]
    dist.broadcast_object_list(agreed, 0)  # hosts may have other settings, or another file
    through_servers, begin, sizes = agreed
    if not through_servers:
        say("byteps tune: ranks of one host sum in shared memory, where these settings do nothing", file=sys.stderr)
        say("hint: run it on several hosts, or set BYTEPS_FORCE_DISTRIBUTED=1", file=sys.stderr)
        dist.destroy_process_group()
        return 0
    trials = Trials(sizes, options.seconds)
    rows: list[dict[str, float]] = []
    say(f"# {options.model}: {sum(sizes) / 1e6:.1f} MB in {len(sizes)} buckets, {size} ranks on {len({*hosts})} hosts")
    say(f"{'partition (KiB)':>16}{'credit':>8}{'lanes':>7}{'step (ms)':>11}{'GB/s':>8}{'vs now':>9}", flush=True)

    def seconds_of(choice: Choice) -> float:
        seconds = trials.seconds_of(choice)
        rows.append({**choice, "seconds": seconds})
        gain = rows[0]["seconds"] / seconds
        credit = choice["scheduling_credit"] or "auto"
        say(
            f"{choice['partition_bytes'] / 1024:>16g}{credit:>8}{choice['lanes']:>7}{seconds * 1e3:>11.1f}"
            f"{sum(sizes) / seconds / 1e9:>8.3f}{gain:>8.2f}x",
            flush=True,
        )
        return seconds

    best, _ = descend(begin, VALUES, seconds_of)
    gain = 1.0
    if best != begin:
        say("# once more, in turns: what is set now, the best")
        pairs = [(seconds_of(begin), seconds_of(best)) for _ in range(LAST_TURNS)]
        gain = statistics.median(now_s / best_s for now_s, best_s in pairs)
    say("\n".join(advice(begin, best, gain)))
    if rank == 0 and options.json:
        options.json.write_text(json.dumps({"trials": rows, "best": best, "gain": gain}, indent=1) + "\n")
    if trials.wrong:
        say(f"byteps tune: {trials.wrong} elements were wrong", file=sys.stderr)
    dist.destroy_process_group()
    return 1 if trials.wrong else 0


def _say_nothing(*words: object, **how: object) -> None:
    """Stand in for print on the other ranks."""
