"""Run examples/train_digits.py three ways and compare: shared memory, a summation server, gloo.

    python examples/demo.py

Each rank starts in `rank_main` here, which shows what torch_bps logs and then runs the stock script.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_digits.py")
TIMEOUT_S = 120
EPOCH = re.compile(r"epoch \d+: loss \S+, test accuracy (\S+)%, (\S+) s")
WAYS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("shared memory", "byteps", {}),
    ("summation server", "byteps", {"BYTEPS_FORCE_DISTRIBUTED": "1"}),
    ("gloo", "gloo", {}),
)


@dataclass
class Outcome:
    """What one way of running gave."""

    way: str
    accuracy: float
    epoch_s: float
    parameters: Path


def rank_main(script: str, *args: str) -> None:
    """Run `script` as its own main program, with the log of torch_bps shown: all of rank 0's, others' traffic."""
    first = os.environ.get("RANK") == "0"
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: first or "traffic:" in record.getMessage())
    logger = logging.getLogger("torch_bps")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def train(way: str, backend: str, settings: dict[str, str], args: argparse.Namespace, folder: Path) -> Outcome:
    """Train on `args.nproc` ranks, print what they print, and return the outcome."""
    saved = folder / f"{way}.pt"
    shown = " ".join(f"{name}={value}" for name, value in settings.items())
    print(f"\n== {way}: --backend {backend} {shown}".rstrip(), flush=True)
    ours = [str(Path(__file__)), "--rank-main", str(SCRIPT)]
    theirs = ["--backend", backend, "--epochs", str(args.epochs), "--seed", str(args.seed), "--save", str(saved)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    with subprocess.Popen([*launcher, *ours, *theirs], env=env, stdout=subprocess.PIPE, text=True) as job:
        watchdog = threading.Timer(TIMEOUT_S, job.terminate)  # torchrun then ends its ranks
        watchdog.start()
        epochs = []
        try:
            for line in job.stdout or ():
                print(f"   {line}", end="", flush=True)
                epochs += EPOCH.findall(line)
        finally:
            watchdog.cancel()
    if job.returncode != 0 or not epochs:
        sys.exit(f"{way}: training failed (exit code {job.returncode}), see above")
    epoch_s = sorted(float(seconds) for _, seconds in epochs)[len(epochs) // 2]
    return Outcome(way, float(epochs[-1][0]), epoch_s, saved)


def difference(path: Path, reference: Path) -> float:
    """Return the largest difference between two saved models' parameters, 0.0 only if they are identical."""
    import torch

    ours, theirs = (torch.load(file, weights_only=True) for file in (path, reference))
    if all(torch.equal(ours[name], theirs[name]) for name in theirs):
        return 0.0
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train digits through shared memory, a server, and gloo; compare.")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [train(*way, args, Path(folder)) for way in WAYS]
        gaps = [difference(outcome.parameters, outcomes[-1].parameters) for outcome in outcomes]
    print(f"\n{args.nproc} ranks, {args.epochs} epochs, seed {args.seed}")
    print(f"{'way':<18} {'s/epoch (median)':>16} {'test accuracy':>14}   parameters beside gloo's")
    for outcome, gap in zip(outcomes, gaps, strict=True):
        same = "identical" if gap == 0 else f"differ by up to {gap:.1e}"
        print(f"{outcome.way:<18} {outcome.epoch_s:>16.3f} {outcome.accuracy:>13.2f}%   {same}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-main"]:
        rank_main(*sys.argv[2:])
    else:
        main()
