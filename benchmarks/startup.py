"""Time from init_process_group to the end of the first all_reduce, ours beside gloo's, two ranks.

    python benchmarks/startup.py [--rounds 5]

Each round starts fresh processes for each way, alternating. Printed are medians over the rounds, of the slower rank,
and the difference to gloo. Importing torch is not counted.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys

WAYS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gloo", "gloo", {}),
    ("shared memory", "byteps", {}),
    ("server over shm", "byteps", {"BYTEPS_FORCE_DISTRIBUTED": "1"}),
    ("server over tcp", "byteps", {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": "tcp"}),
    ("server over zmq", "byteps", {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": "zmq"}),
    ("two nodes", "byteps", {"BYTEPS_NODE_ID": "rank"}),
)
RANK = """
import sys, time, torch, torch.distributed as dist
backend, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0)
store.add("here", 1)
while store.add("here", 0) < 2:
    time.sleep(0.001)
started = time.perf_counter()
dist.init_process_group(backend, store=store, rank=rank, world_size=2)
tensor = torch.ones(1000)
dist.all_reduce(tensor)
seconds = time.perf_counter() - started
assert tensor.sum() == 2000
dist.barrier()
dist.destroy_process_group()
print(seconds)
"""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(backend: str, settings: dict[str, str]) -> float:
    """Start two ranks once; returns the slower one's seconds."""
    port = free_port()
    ranks = []
    for rank in range(2):
        extra = {name: str(rank) if value == "rank" else value for name, value in settings.items()}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
        command = [sys.executable, "-c", RANK, backend, str(rank), str(port)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    return max(float(rank.communicate(timeout=120)[0]) for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {way: [] for way, _, _ in WAYS}
    for _ in range(rounds):
        for way, backend, settings in WAYS:
            taken[way].append(measure(backend, settings))
    gloo = statistics.median(taken["gloo"])
    print(f"{'way':<18}{'median s':>10}{'min':>8}{'max':>8}{'beside gloo':>14}")
    for way, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"{way:<18}{middle:>10.3f}{min(seconds):>8.3f}{max(seconds):>8.3f}{middle - gloo:>+13.3f}s")


if __name__ == "__main__":
    main()
