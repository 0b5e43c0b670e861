"""Memory of summation servers while ranks train a large model: bounded by what is in flight, not by the model.

    python benchmarks/memory.py [--ranks 4] [--servers 1] [--megabytes 1000] [--bucket 25] [--steps 5]

Every rank reduces the model's gradients in buckets, all of a step under way at once; rank 0 reads each server's
/proc/PID/status after every step. All on this host, and over tcp: through shared memory a server would map the ranks'
memory, which is theirs. "peak" is the largest that it ever was.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Column, Result, Row
from benchmarks.startup import free_port

COLUMNS = (
    Column("server", "server"),
    Column("step", "step"),
    Column("pushed (MB)", "pushed", ",.0f", 1e-6),
    Column("RSS (MB)", "rss", ".1f", 1e-6),
    Column("peak (MB)", "peak", ".1f", 1e-6),
)
PIDS = "MEMORY_BENCHMARK_SERVER_PIDS"
"""variable that makes a process a rank, and tells it the servers' process ids"""
RUN_S = 900.0
END_S = 20.0
READY_S = 30.0


def memory_of(status: str) -> tuple[int, int]:
    """Return (resident, peak) bytes from the text of /proc/PID/status."""
    resident, peak = (int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, peak


def train(pids: Sequence[int], nbytes: int, bucket_nbytes: int, steps: int) -> list[Row]:
    """Reduce `nbytes` in buckets, `steps` times, as a rank; returns what the servers held, a row each and step."""
    import torch
    import torch.distributed as dist

    buckets = [torch.ones(bucket_nbytes // 4) for _ in range(nbytes // bucket_nbytes)]
    rows: list[Row] = []
    for step in range(1, steps + 1):
        works = [dist.all_reduce(bucket, dist.ReduceOp.AVG, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()
        if any(bucket[0] != 1 or bucket[-1] != 1 for bucket in buckets):
            raise AssertionError(f"a wrong sum in step {step}")
        for server, pid in enumerate(pids):
            resident, peak = memory_of(Path(f"/proc/{pid}/status").read_text())
            pushed = step * len(buckets) * bucket_nbytes * dist.get_world_size()
            rows.append({"server": server, "step": step, "pushed": pushed, "rss": resident, "peak": peak})
    return rows


def be_rank(options: argparse.Namespace, pids: Sequence[int]) -> None:
    """Train, and be the one who prints if this is rank 0."""
    import torch.distributed as dist

    dist.init_process_group("byteps")
    rows = train(pids, int(options.megabytes * 1e6), int(options.bucket * 1e6), options.steps)
    if dist.get_rank() == 0:
        settings = {"ranks": options.ranks, "megabytes": options.megabytes, "bucket_megabytes": options.bucket}
        title = f"Servers' memory: {options.ranks} ranks, a model of {options.megabytes:g} MB"
        result = Result("memory", title, COLUMNS, rows, settings)
        result.print()
        if options.json:
            result.write(options.json)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Start servers and ranks, or be one of these; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of the model's gradients")
    parser.add_argument("--bucket", type=float, default=25.0, help="MB of each all_reduce")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if pids := os.environ.get(PIDS):
        be_rank(options, [int(pid) for pid in pids.split(",")])
        return 0
    words = list(sys.argv[1:] if arguments is None else arguments)
    running: list[subprocess.Popen[str]] = []
    try:
        servers, addresses = [], []
        for _ in range(options.servers):
            command = [sys.executable, "-m", "torch_bps.server", "--host", "127.0.0.1"]
            servers.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
            running.append(servers[-1])
            addresses.append(_address(servers[-1]))
        pids = ",".join(str(server.pid) for server in servers)
        port = free_port()
        ranks = []
        for rank in range(options.ranks):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(options.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "BYTEPS_SERVERS": ",".join(addresses),
                "BYTEPS_FORCE_DISTRIBUTED": "1",
                "BYTEPS_TRANSPORT": "tcp",
                PIDS: pids,
                "BYTEPS_STALL_WARNING": str(RUN_S),  # the last of a step's buckets wait for all others
            }
            ranks.append(subprocess.Popen([sys.executable, __file__, *words], env=env, text=True))
            running.append(ranks[-1])
        codes = [rank.wait(RUN_S) for rank in ranks]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            _end(process)
    return next((code for code in codes if code), 0)


def _address(server: subprocess.Popen[str]) -> str:
    """Return where a server listens: it says so once it is ready."""
    assert server.stderr is not None
    too_late = threading.Timer(READY_S, server.kill)
    too_late.start()
    try:
        for line in server.stderr:
            if found := re.search(r"ready at (\S+)", line):
                return found[1]
    finally:
        too_late.cancel()
    raise RuntimeError(f"the server ended, or was not ready within {READY_S:g} s")


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stderr is not None:
        process.stderr.close()


if __name__ == "__main__":
    sys.exit(main())
