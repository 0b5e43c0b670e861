"""Run code on several ranks as real processes, and look at what became of each.

    def train(rank: int, world_size: int, scale: float) -> float: ...      # at a test module's top level

    results = run_ranks(train, 2, 0.5, backend="byteps")                    # [RankResult(value=...), ...]
    with start_ranks(train, 3, 0.5, backend="byteps") as job:               # the same, to interfere with
        job.ranks[2].wait_for("step 3")
        job.ranks[2].kill()
        results = job.results()
    nodes = run_torchrun(script, nproc=[2, 1], rendezvous="c10d")           # one agent a node, on loopback
    with Process([sys.executable, "-m", "torch_bps.server"]) as server: ... # anything else

Each process leads a session of its own, all of which is ended (by process id) when the `with` block is left, so nothing
outlives a test. What a session still held after its leader had exited is an error: `orphans` in the results.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch.distributed import TCPStore

from tests.integration.process import Process, alive

__all__ = [
    "Job",
    "Process",
    "RankResult",
    "alive",
    "free_port",
    "json_lines",
    "run_ranks",
    "run_torchrun",
    "start_ranks",
]

Store = Literal["tcp", "file", "rank0"]
Prefix = Callable[[int], Sequence[str]]
Env = Mapping[str, str] | Callable[[int], Mapping[str, str]]

TIMEOUT_S = 45.0
ORPHAN_GRACE_S = 5.0


@dataclass
class RankResult:
    """What became of one rank.

    Args:
        exitcode: of the process; negative for a signal.
        value: what the function returned, None if it did not return.
        error: what it raised, None if it returned or was killed.
        output: its stdout and stderr together.
        orphans: processes that it left running, "pid command".
    """

    rank: int
    exitcode: int
    value: Any = None
    error: BaseException | None = None
    output: str = field(default="", repr=False)
    orphans: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.exitcode == 0 and self.error is None and not self.orphans


class Job:
    """Ranks that are running; made by start_ranks. Leaving the `with` block ends what still runs."""

    def __init__(self, ranks: list[Process], folder: tempfile.TemporaryDirectory[str], store: object) -> None:
        self.ranks = ranks
        self._folder = folder
        self._store = store  # the ranks' TCPStore lives in this process

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def results(self, timeout_s: float = TIMEOUT_S, *, check: bool = False) -> list[RankResult]:
        """Wait until all ranks are gone and return their results.

        Raises:
            AssertionError: ranks were still running at the deadline, or, with `check`, one did not end well.
        """
        deadline = time.monotonic() + timeout_s
        running = [i for i, process in enumerate(self.ranks) if process.wait(deadline) is None]
        results = [self._result(rank, process) for rank, process in enumerate(self.ranks) if rank not in running]
        if running or (check and not all(result.ok for result in results)):
            what = f"ranks {running} still running after {timeout_s} s" if running else "ranks failed"
            raise AssertionError(what + "".join(_describe(process) for process in self.ranks))
        return results

    def close(self) -> None:
        """End what still runs; harmless when repeated."""
        for process in self.ranks:
            process.close()
        self._store = None
        self._folder.cleanup()

    def _result(self, rank: int, process: Process) -> RankResult:
        exitcode = process.wait(time.monotonic())
        assert exitcode is not None
        result = RankResult(rank, exitcode, output=process.output, orphans=process.orphans(ORPHAN_GRACE_S))
        try:
            outcome = Path(self._folder.name, f"result-{rank}").read_bytes()
        except FileNotFoundError:
            return result
        result.value, result.error = pickle.loads(outcome)
        return result


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    backend: str | None = None,
    store: Store = "tcp",
    group_timeout_s: float = 30.0,
    env: Env | None = None,
    prefix: Prefix | None = None,
    address: str = "127.0.0.1",
    fresh: bool = False,
) -> Job:
    """Start `function(rank, world_size, *args)` in `world_size` processes.

    Args:
        function: importable (at the top level of a module); what it returns must pickle.
        backend: init_process_group before and destroy_process_group after it; None: the function does that itself,
            and `dist.init_process_group(name)` finds all it needs in the environment (except with store="file").
        store: "tcp": this process holds it, as torchrun's agent does; "file": a FileStore; "rank0": rank 0 holds it.
        env, prefix: settings and what to put before the command, for a rank: `prefix=lambda rank: lab.prefix(rank)`
            runs it on a host of netlab.NetLab (then use store="rank0" and rank 0's address),
            `["unshare", "--ipc", "--net"]`-like commands make it look like another node.
        address: where the ranks find a "tcp" or "rank0" store.
        fresh: start new interpreters. Else ranks are forked where that makes no difference (tests.integration.forks).
    """
    folder = tempfile.TemporaryDirectory(prefix="bps-rig-")
    held: object = None
    port = 0
    if store == "tcp":
        held = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        port = held.port
    elif store == "rank0":
        port = free_port()
    task = (function.__module__, function.__qualname__, args, backend, store, group_timeout_s)
    Path(folder.name, "task").write_bytes(pickle.dumps(task))
    job = Job([], folder, held)
    try:
        for rank in range(world_size):
            settings = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if store == "tcp" else {}),
                **_of(env, rank),
            }
            command = [*(prefix(rank) if prefix else ()), sys.executable, "-m", "tests.integration.rank", folder.name]
            fork = not fresh and prefix is None and all(name.startswith("BYTEPS_") for name in _of(env, rank))
            job.ranks.append(Process(command, env=settings, name=f"rank {rank}", fork=fork))
    except BaseException:
        job.close()
        raise
    return job


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_s: float = TIMEOUT_S,
    check: bool = True,
    **options: Any,
) -> list[RankResult]:
    """Run `function(rank, world_size, *args)` on all ranks to the end; options as for start_ranks.

    Args:
        check: raise AssertionError, with all output, unless every rank returned, exited with 0 and left no orphans.
    """
    with start_ranks(function, world_size, *args, **options) as job:
        return job.results(timeout_s, check=check)


def run_torchrun(
    script: str | Path,
    *args: str,
    nproc: int | Sequence[int] = 2,
    rendezvous: Literal["standalone", "static", "c10d"] | None = None,
    options: Sequence[str] = (),
    env: Env | None = None,
    prefix: Prefix | None = None,
    address: str = "127.0.0.1",
    port: int = 0,
    timeout_s: float = TIMEOUT_S,
    check: bool = True,
) -> list[RankResult]:
    """Run `script args` under torchrun and return one result a node (its `rank` is the node's).

    Args:
        nproc: ranks a node; a sequence starts an agent for each of its items. Ranks per node may differ.
        rendezvous: default "standalone" for one node, "static" for several.
        options: more options of torchrun, such as "--max-restarts=1".
        env, prefix, address, check: as in start_ranks, for a node.
        port: of the rendezvous, whose id is then f"rig{port}"; 0: any free one.
    """
    nodes = [nproc] if isinstance(nproc, int) else list(nproc)
    rendezvous = rendezvous or ("standalone" if len(nodes) == 1 else "static")
    port = port or free_port()
    meeting = {
        "standalone": ["--standalone"],
        "static": ["--master-addr", address, "--master-port", str(port)],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", f"--rdzv-id=rig{port}"],
    }[rendezvous]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, *options]
    job = Job([], tempfile.TemporaryDirectory(prefix="bps-rig-"), None)
    with job:
        for node, count in enumerate(nodes):
            place = [] if rendezvous == "standalone" else [f"--nnodes={len(nodes)}", f"--node-rank={node}"]
            command = [*(prefix(node) if prefix else ()), *launcher, *place, f"--nproc-per-node={count}"]
            job.ranks.append(Process([*command, str(script), *args], env=_of(env, node), name=f"node {node}"))
        return job.results(timeout_s, check=check)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def json_lines(output: str) -> list[Any]:
    """Return the objects that scripts printed with `print(json.dumps(...))`, leaving out all other lines.

    The ranks share a pipe: two may share a line, and a line over 4096 bytes (PIPE_BUF) is cut by another rank's.
    """
    decoder = json.JSONDecoder()
    values = []
    for line in output.splitlines():
        while line.startswith("{"):
            value, end = decoder.raw_decode(line)
            values.append(value)
            line = line[end:]
    return values


def _of(env: Env | None, index: int) -> Mapping[str, str]:
    return (env(index) if callable(env) else env) or {}


def _describe(process: Process) -> str:
    state = process.wait(time.monotonic())
    ended = "still running" if state is None else f"exit code {state}"
    left = "".join(f"\norphan: {orphan}" for orphan in process.orphans(0))
    return f"\n--- {process.name} ({ended}) ---\n{process.output[-6000:]}{left}"
