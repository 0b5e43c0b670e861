"""A rank of the headline benchmark: trains a replayed model on each variant in turns. Started by headline.py.

A variant is a backend, with "+cross-barrier" behind it or not: "gloo", "byteps", "byteps+cross-barrier". Each has a
model, a DistributedDataParallel and an SGD of its own; the process groups are of one job. What is timed is from the
end of one forward pass to that of the next, on the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import warnings
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as ddp

from benchmarks.recording import Recording, bucket_hook, partitions
from benchmarks.replay import WARM_UP, Device, ReplayModel, Scale
from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Profile, read
from torch_bps.theory.step import BUCKET_NBYTES, FIRST_BUCKET_NBYTES

LEARNING_RATE = 2.0**-7
"""a power of two: sums of small whole numbers times it are exact"""


class Variant:
    """One backend's training.

    Args:
        profile: already scaled.
        recording: what the timeline is drawn from, where it is wanted.
    """

    def __init__(self, name: str, profile: Profile, recording: Recording | None) -> None:
        self.name = name
        backend, _, cross = name.partition("+")
        if cross not in ("", "cross-barrier"):
            raise SystemExit(f"--variants {name!r}: a backend, or a backend and +cross-barrier")
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        self._device = Device()
        self._recording = recording
        self._model = ReplayModel(profile, self._device, dist.get_rank())
        self._ddp = ddp.DistributedDataParallel(self._model, process_group=group, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self._model.parameters(), LEARNING_RATE)
        self._barrier: Any = None
        if cross:
            import torch_bps

            self._barrier = torch_bps.cross_barrier(self._ddp, self._optimizer)
        elif recording is not None:
            self._ddp.register_comm_hook(None, bucket_hook(recording, group))
        if recording is not None:
            self._device.note = recording.note
        self._steps = self._patterned_steps = 0
        self.seconds: list[float] = []
        self.events: list[dict[str, Any]] = []

    def run(self, steps: int, *, patterned: bool = False) -> list[float]:
        """Train, all ranks beginning together; returns what each step but the first took."""
        self._model.gradients.set_patterned(patterned)
        dist.barrier()
        ends_s = []
        for number in range(steps):
            self._optimizer.zero_grad()
            loss = self._ddp(torch.ones(()))
            ends_s.append(time.monotonic())
            if self._recording is not None and number == steps - 2:
                self._recording.begin()
            elif self._recording is not None and number == steps - 1:
                self.events = self._recording.end()
            loss.backward()
            self._optimizer.step()
        if self._barrier is not None:
            self._barrier.synchronize()
        self._steps += steps
        self._patterned_steps += steps if patterned else 0
        return [end - begin for begin, end in itertools.pairwise(ends_s)]

    def wrong(self) -> int:
        """Return how many parameters of this rank are not what they should be."""
        return self._model.wrong(
            learning_rate=LEARNING_RATE,
            ranks=dist.get_world_size(),
            steps=self._steps,
            patterned_steps=self._patterned_steps,
        )


def main() -> int:
    """Run as a rank; returns the exit code: 1 when a sum was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name, or a profile's file")
    parser.add_argument("--variants", required=True)
    parser.add_argument("--divide", type=float, required=True)
    parser.add_argument("--stretch", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="a round")
    parser.add_argument("--bucket-mb", type=float, default=BUCKET_NBYTES / (1 << 20))
    parser.add_argument("--unpartitioned", action="store_true")
    parser.add_argument("--without-priority", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames what it still accepts
    _set_bucket_sizes(options.bucket_mb, options.divide)
    _switch_off(options)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    model = MODELS[options.model]() if options.model in MODELS else read(Path(options.model))
    profile = Scale(options.divide, options.stretch).apply(model)
    with ExitStack() as ending:
        recording = Recording() if options.timeline else None
        if recording is not None:
            ending.enter_context(partitions(recording))
        variants = [Variant(name, profile, recording) for name in options.variants.split(",")]
        for variant in variants:
            variant.run(WARM_UP, patterned=True)
        for _ in range(options.rounds):
            for variant in variants:
                variant.seconds += variant.run(options.steps + 1)
        rows = [_row(variant, options.stretch) for variant in variants]
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(rows))
    dist.destroy_process_group()
    return 1 if any(row["wrong"] for row in rows) else 0


def _row(variant: Variant, stretch: float) -> dict[str, Any]:
    """Return the result of a variant, in the testbed's time."""
    spread = torch.tensor([statistics.median(variant.seconds), min(variant.seconds), max(variant.seconds)])
    dist.all_reduce(spread, dist.ReduceOp.MAX)
    wrong = torch.tensor([variant.wrong()])
    dist.all_reduce(wrong)
    median_s, min_s, max_s = (spread / stretch).tolist()
    for event in variant.events:
        event["begin_s"] /= stretch
        event["end_s"] /= stretch
    return {
        "variant": variant.name,
        "step_s": median_s,
        "min_s": min_s,
        "max_s": max_s,
        "wrong": int(wrong),
        "events": variant.events,
    }


def _set_bucket_sizes(bucket_mb: float, divide: float) -> None:
    """Divide DDP's defaults too: setting them by argument would lose the smaller first bucket."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(min(FIRST_BUCKET_NBYTES, bucket_mb * (1 << 20)) / divide)
    ddp._DEFAULT_BUCKET_CAP_MB = bucket_mb / divide


def _switch_off(options: argparse.Namespace) -> None:
    """Take away, in this process, a mechanism that has no setting: for the ablation."""
    if options.unpartitioned:
        from torch_bps.core import partition

        partition._PIPELINE = 1  # type: ignore[misc] # a block is cut for the engines only
    if options.without_priority:
        from torch_bps.backend.priority import priority

        priority.__enter__ = lambda self: self  # type: ignore[method-assign]
        priority.__exit__ = lambda self, *_: None  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
