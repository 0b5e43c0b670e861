"""The command `byteps tune`: tries partition sizes, credits and lanes on the cluster itself, and says what to put down.

    torchrun --nnodes 4 ... --no-python byteps tune --model resnet50      as a rank of a job, on every worker
    BYTEPS_FORCE_DISTRIBUTED=1 byteps tune --model resnet50 --ranks 2     on this host: starts the ranks itself

A trial sums a model's gradients in DDP's buckets, all under way at once, over a process group opened with the settings
to try; its figure is the median of the slowest rank. Each setting is tried in turn, the best kept (bench.descent). At
the end the best and what is set now take turns: a cluster that others use is never the same twice. Nothing is changed
but by the user, who puts the settings down.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torch_bps import config
from torch_bps.bench.descent import Choice
from torch_bps.errors import ConfigError
from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Profile, read
from torch_bps.theory.step import buckets_of

VALUES = {
    "partition_bytes": (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20),
    "scheduling_credit": (0, 4, 8, 16, 32),
    "lanes": (1, 2, 4, 8),
}
"""setting -> what to try; a credit of 0 is what the shape of the job gives"""
WORTH_IT = 1.03
"""a smaller gain than this is noise"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 when a sum was wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if config.under_torchrun():
        from torch_bps.bench.trials import tune

        return tune(options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    os.execv(sys.executable, [*command, "-m", "torch_bps.bench.tune", *arguments])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="byteps tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="resnet50", help=f"{', '.join(MODELS)}, or a JSON file (torch_bps/theory/profile.py)"
    )
    parser.add_argument("--megabytes", type=float, default=256.0, help="of the model's gradients, at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each trial, two steps at least")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, when not under torchrun")
    parser.add_argument("--json", type=Path, help="write the trials there too")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: needs at least 2 ranks")
    if options.megabytes <= 0 or options.seconds < 0:
        parser.error("--megabytes must be above 0, --seconds not below")
    try:
        options.profile = MODELS[options.model]() if options.model in MODELS else read(Path(options.model))
    except ConfigError as error:
        parser.error(str(error))
    return options


def bucket_sizes(profile: Profile, megabytes: float) -> list[int]:
    """Return the bytes of DDP's buckets, in the order of the backward pass, as far as `megabytes` reach."""
    left, sizes = round(megabytes * 1e6), []
    for bucket in buckets_of(profile):
        sizes.append(min(bucket.nbytes, left) // 4 * 4)
        left -= sizes[-1]
        if left < 4:
            break
    return sizes


def advice(begin: Choice, best: Choice, gain: float) -> list[str]:
    """Return the lines that say what to put down."""
    if best == begin or gain < WORTH_IT:
        return [f"keep what is set now: nothing was {(WORTH_IT - 1) * 100:.0f} % faster"]
    changed = [f"export {config.env_name(name)}={value}" for name, value in best.items() if value != begin[name]]
    return [f"put down on every rank, for steps {gain:.2f}x as fast:", *changed]


if __name__ == "__main__":
    sys.exit(main())
