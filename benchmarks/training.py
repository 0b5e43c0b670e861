"""DDP's step, ours beside gloo's in the same processes: two replicas of one model over two groups, taking turns.

    python benchmarks/training.py [--ranks 2] [--models digits,mlp]
    torchrun --nnodes 2 ... benchmarks/training.py                as a rank of a job

"step" is a whole step of training, "alone" that of a third replica that talks to nobody, "exposed" the difference: the
communication that the backward pass does not hide. "all_reduces" are those of DDP's own buckets, all at once, without
the model. Medians of the slowest rank; "x" is how many times as long gloo takes. All replicas see the same batches: at
the end, with 2 ranks, the two backends' parameters must be equal to the bit (with more, the order of additions may
differ).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Column, Result, Row
from examples.train_digits import BATCH, load_digits, make_model

BACKENDS = ("byteps", "gloo")
TIMEOUT = timedelta(minutes=5)
MLP_BATCH = 32
COLUMNS = (
    Column("model", "model"),
    Column("parameters", "parameters", ","),
    Column("backend", "backend"),
    Column("step (ms)", "step_s", ".2f", 1e3),
    Column("alone (ms)", "alone_s", ".2f", 1e3),
    Column("exposed (ms)", "exposed_s", ".2f", 1e3),
    Column("all_reduces (ms)", "reduces_s", ".2f", 1e3),
    Column("step x", "step_ratio", ".2f"),
    Column("exposed x", "exposed_ratio", ".2f"),
    Column("all_reduces x", "reduces_ratio", ".2f"),
)

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def digits(rank: int, size: int) -> tuple[nn.Module, Callable[[], Batches]]:
    """Return the demo's model, and what begins its batches."""
    images, labels = load_digits()[0].tensors
    per_rank = max(BATCH // size, 1)

    def batches() -> Batches:
        start = 0
        while True:
            rows = torch.arange(start + rank * per_rank, start + (rank + 1) * per_rank) % len(images)
            start += per_rank * size
            yield images[rows], labels[rows]

    return make_model(), batches


def mlp(rank: int, size: int, width: int = 3500) -> tuple[nn.Module, Callable[[], Batches]]:
    """Return an MLP of 25 million parameters, and what begins its batches: random ones."""
    model = nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
    )

    def batches() -> Batches:
        generator = torch.Generator().manual_seed(rank)
        while True:
            yield (
                torch.randn(MLP_BATCH, 64, generator=generator),
                torch.randint(10, (MLP_BATCH,), generator=generator),
            )

    return model, batches


def tiny(rank: int, size: int) -> tuple[nn.Module, Callable[[], Batches]]:
    """Return an MLP of some thousand parameters: to try the benchmark itself."""
    return mlp(rank, size, width=32)


MODELS = {"digits": digits, "mlp": mlp, "tiny": tiny}


class Trainer:
    """One replica with its own optimizer and its own view of the batches.

    Args:
        group: whose backend averages the gradients; None: nobody does.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        model, batches = MODELS[name](dist.get_rank(), dist.get_world_size())
        self._batches = batches()
        self._group = group
        self.model = model if group is None else DistributedDataParallel(model, process_group=group)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.steps_s: list[float] = []
        self.reduces_s: list[float] = []

    def step(self) -> None:
        """Take one step of training."""
        images, labels = next(self._batches)
        began = time.perf_counter()
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()
        self._optimizer.step()
        self.steps_s.append(time.perf_counter() - began)

    def reduce(self, buckets: Sequence[torch.Tensor]) -> None:
        """Reduce the tensors, all under way at once, as DDP does."""
        began = time.perf_counter()
        works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()
        self.reduces_s.append(time.perf_counter() - began)

    def buckets(self) -> list[torch.Tensor]:
        """Return tensors of the sizes of the buckets that DDP uses by now."""
        data = self.model._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return [torch.zeros(int(nbytes) // 4) for nbytes in str(sizes).split(",")]


def measure(name: str, groups: dict[str, dist.ProcessGroup], rounds: int, steps: int) -> list[Row]:
    """Train one model on every backend in turns, the first round to warm up; returns a row for each."""
    trainers = {backend: Trainer(name, group) for backend, group in groups.items()}
    alone = Trainer(name, None)
    everybody = [*trainers.values(), alone]
    for round_number in range(-1, rounds):
        for trainer in everybody:
            dist.barrier()
            for _ in range(steps):
                trainer.step()
        for trainer in trainers.values():
            buckets = trainer.buckets()
            dist.barrier()
            for _ in range(steps):
                trainer.reduce(buckets)
        if round_number < 0:
            for trainer in everybody:
                trainer.steps_s.clear()
                trainer.reduces_s.clear()
    first, *others = (list(trainer.model.parameters()) for trainer in trainers.values())
    differ = sum(int((ours != theirs).sum()) for other in others for ours, theirs in zip(first, other, strict=True))
    rows = [_row(name, backend, trainer, alone, differ) for backend, trainer in trainers.items()]
    peer = rows[-1]
    for row in rows:
        for key in ("step", "exposed", "reduces"):
            row[f"{key}_ratio"] = peer[f"{key}_s"] / row[f"{key}_s"]
    return rows


def _row(name: str, backend: str, trainer: Trainer, alone: Trainer, differ: int) -> Row:
    times = (trainer.steps_s, alone.steps_s, trainer.reduces_s)
    medians = torch.tensor([statistics.median(each) for each in times], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    differing = torch.tensor([differ])
    dist.all_reduce(differing)
    step_s, alone_s, reduces_s = medians.tolist()
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "backend": backend,
        "ranks": dist.get_world_size(),
        "step_s": step_s,
        "alone_s": alone_s,
        "exposed_s": step_s - alone_s,
        "reduces_s": reduces_s,
        "steps": len(trainer.steps_s),
        "buckets": len(trainer.buckets()),
        "differ": int(differing),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, alone or as a rank; returns the exit code: 1 if parameters differ that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="to start, when not under torchrun")
    parser.add_argument("--models", default="digits,mlp", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="of each backend, before it is the other's turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        os.execv(sys.executable, [*command, __file__, *(sys.argv[1:] if arguments is None else arguments)])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    groups = {backend: dist.new_group(backend=backend, timeout=TIMEOUT) for backend in BACKENDS}
    rows = [row for name in options.models.split(",") for row in measure(name, groups, options.rounds, options.steps)]
    size = dist.get_world_size()
    wrong = size == 2 and any(row["differ"] for row in rows)
    if dist.get_rank() == 0:
        settings = {"ranks": size, "rounds": options.rounds, "steps": options.steps}
        title = f"DistributedDataParallel, {size} ranks, ours beside gloo"
        result = Result("training", title, COLUMNS, rows, settings)
        differ = sum(row["differ"] for row in rows[:: len(BACKENDS)])
        result.notes.append(f"{differ} parameters differ between the backends after training")
        result.print()
        if options.json:
            result.write(options.json)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
