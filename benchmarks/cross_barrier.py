"""Training steps of stock DDP with and without `torch_bps.cross_barrier`, in turns, between hosts with links of a rate.

    python benchmarks/cross_barrier.py --workers 2 --rate 500 --layers 8 --layer 2M --compute-ms 20

Each layer has that much weight, and sleeps that long in its forward, twice as long in its backward pass, as a host does
while its accelerator computes. So the steps are the same in each run but for the links. Hosts are network namespaces
(benchmarks/netlab.py). Needs root and `ip`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_bps
from benchmarks.netlab import NetLab, why_not
from benchmarks.network import run_ranks
from torch_bps.bench.table import nbytes_of

WIDTH = 256
WARM_UP = 4
"""steps; DDP rebuilds its buckets in the second"""


class Busy(torch.autograd.Function):
    """Take time in both passes."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, compute_s: float) -> torch.Tensor:
        ctx.compute_s = compute_s
        time.sleep(compute_s)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.compute_s)
        return gradients[0], None


class Layer(nn.Module):
    """So many bytes of weight, used a row at a time: the time is in `Busy`."""

    def __init__(self, nbytes: int, compute_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes // 4 // WIDTH, WIDTH))
        self.compute_s = compute_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = Busy.apply(inputs, self.compute_s)
        return hidden + self.weight[:1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or a rank of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--rate", type=int, default=500, help="of each link, Mbit/s")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--layer", type=nbytes_of, default="2M", help="bytes of weight")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="of a layer's forward pass")
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--backend", default="byteps")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        return run_rank(options)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
    with NetLab(options.workers + options.servers, options.rate) as lab:
        print(f"# {options.workers} workers, {options.servers} servers, links of {options.rate} Mbit/s", flush=True)
        return run_ranks(lab, options.workers, command)


def run_rank(options: argparse.Namespace) -> int:
    """Measure in turns; rank 0 prints a line for each and the median ratio."""
    dist.init_process_group(options.backend)
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer(options.layer, options.compute_ms / 1000) for _ in range(options.layers)))
    model = DistributedDataParallel(net, bucket_cap_mb=options.layer / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ratios = []
    for turn in range(options.turns):
        plain_s = step_s(model, optimizer, options.steps)
        with torch_bps.cross_barrier(model, optimizer):
            crossing_s = step_s(model, optimizer, options.steps)
        ratios.append(plain_s / crossing_s)
        if dist.get_rank() == 0:
            print(f"{turn}: DDP {plain_s * 1e3:.0f} ms, with cross_barrier {crossing_s * 1e3:.0f} ms", flush=True)
    if dist.get_rank() == 0:
        print(f"DDP / cross_barrier: {statistics.median(ratios):.2f}", flush=True)
    dist.destroy_process_group()
    return 0


def step_s(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Return seconds a step: many in a row, then all of their sums."""
    inputs = torch.ones(1, WIDTH)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            begun = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    optimizer.state_dict()  # waits for what is under way
    return (time.perf_counter() - begun) / steps


if __name__ == "__main__":
    sys.exit(main())
