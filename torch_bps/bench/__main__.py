"""The command `byteps bench`.

    byteps bench all_reduce --backend byteps,gloo --ranks 2       on this host: starts the ranks itself
    torchrun --nnodes 4 ... -m torch_bps.bench all_reduce         as a rank of a job

Backends take turns, in one run, a few calls each time: on a shared machine only their ratio means something.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch_bps import config
from torch_bps.bench import table

if TYPE_CHECKING:
    from torch_bps.bench.cases import Case


def main(arguments: list[str] | None = None, peers: Mapping[str, type[Case]] | None = None) -> int:
    """Run the command; returns the exit code: 1 when a result was wrong.

    Args:
        peers: as of bench.measure.measure; for ranks that somebody else has started.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if config.under_torchrun():
        from torch_bps.bench.measure import measure

        return measure(options, peers)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    os.execv(sys.executable, [*command, "-m", "torch_bps.bench", *arguments])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="byteps bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collective", choices=table.COLLECTIVES)
    parser.add_argument("--backend", default="byteps,gloo", help="to measure; the last is compared with")
    parser.add_argument("--sizes", default="1K,64K,1M,4M,16M,64M", help="bytes, as 1K,1M")
    parser.add_argument("--dtype", default="float32", help="torch's name of it")
    parser.add_argument("--redop", default="sum", choices=("sum", "avg", "min", "max"))
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, when not under torchrun")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and backend")
    parser.add_argument(
        "--gbps", type=float, default=0.0, help="rate of each rank's link: makes the limit the network's"
    )
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args(arguments)
    try:
        options.sizes = [table.nbytes_of(text) for text in options.sizes.split(",")]
    except ValueError:
        parser.error(f"--sizes {options.sizes!r}: sizes look like 1K,64K,1M")
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: needs at least 2 ranks")
    return options


if __name__ == "__main__":
    sys.exit(main())
