"""torchrun's ways to meet: dedicated servers that find the job by its rendezvous, agents that make several nodes."""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration import jobs
from tests.integration.rig import Process, RankResult, free_port, json_lines, run_ranks, run_torchrun

TRAIN = """
import hashlib, json, pathlib, sys
import torch.distributed as dist
from tests.integration import jobs

if len(sys.argv) > 1:
    pathlib.Path(sys.argv[1]).touch()
dist.init_process_group("byteps")
done = jobs.train(dist.get_rank(), dist.get_world_size(), steps=3)
digest = hashlib.sha256(b"".join(p.tobytes() for p in done["parameters"])).hexdigest()
print(json.dumps({"rank": dist.get_rank(), "digest": digest, "how": done["how"]}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rdzv") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def gloo_parameters() -> list[np.ndarray]:
    """What two ranks train with gloo."""
    results = run_ranks(jobs.train, 2, 3, backend="gloo", check=False)  # gloo aborts now and then at exit
    parameters: list[np.ndarray] = results[0].value["parameters"]
    return parameters


def digest(parameters: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(parameter.tobytes() for parameter in parameters)).hexdigest()


def told(nodes: Sequence[RankResult], num_ranks: int) -> list[dict[str, Any]]:
    """Return what the ranks printed, in order; they must agree."""
    lines = sorted((line for node in nodes for line in json_lines(node.output)), key=lambda line: line["rank"])
    assert [line["rank"] for line in lines] == list(range(num_ranks)), [node.output[-3000:] for node in nodes]
    assert len({line["digest"] for line in lines}) == 1
    return lines


# ---- dedicated servers that find the job


def server_for(port: int, *more: str) -> Process:
    command = [sys.executable, "-m", "torch_bps.cli.main", "server", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return Process([*command, "--rdzv-id", f"rig{port}", *more], name="server")


def ends_by_itself(server: Process) -> None:
    assert server.wait(time.monotonic() + 15) == 0, server.output
    assert "has gone" in server.output
    for noise in ("Traceback", "frame #", "ERROR", "WARNING"):
        assert noise not in server.output


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_a_server_finds_the_job_that_starts_later(
    script: Path, gloo_parameters: list[np.ndarray], rendezvous: str
) -> None:
    port = free_port()
    with server_for(port) as server:
        server.wait_for("ready at")
        nodes = run_torchrun(script, nproc=[2], rendezvous=rendezvous, port=port, env={"BYTEPS_NUM_SERVERS": "1"})
        ends_by_itself(server)
    ranks = told(nodes, 2)
    assert "1 dedicated server" in ranks[0]["how"]
    assert "co-located" not in ranks[0]["how"]
    assert ranks[0]["digest"] == digest(gloo_parameters)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_a_job_waits_for_the_server_that_starts_later(
    script: Path, tmp_path: Path, gloo_parameters: list[np.ndarray], rendezvous: str
) -> None:
    port = free_port()
    started = tmp_path / "started"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            run_torchrun,
            script,
            str(started),
            nproc=[2],
            rendezvous=rendezvous,
            port=port,
            env={"BYTEPS_NUM_SERVERS": "1"},
        )
        pause = threading.Event()
        while not started.exists() and not job.done():
            pause.wait(0.02)
        with server_for(port) as server:
            nodes = job.result()
            ends_by_itself(server)
    assert told(nodes, 2)[0]["digest"] == digest(gloo_parameters)


def test_a_server_that_finds_no_job_says_so_and_fails() -> None:
    port = free_port()
    with server_for(port, "--rdzv-timeout", "0.5") as server:
        assert server.wait(time.monotonic() + 20) == 1, server.output
        assert f"no job's store at 127.0.0.1:{port} within 0.5 s" in server.output
        assert "Traceback" not in server.output


def test_a_server_that_looks_for_a_job_can_be_told_to_end() -> None:
    with server_for(free_port()) as server:
        server.wait_for("ready at")
        server.kill(signal.SIGTERM)
        assert server.wait(time.monotonic() + 10) == 0, server.output


# ---- several nodes, a co-located server each


@pytest.mark.parametrize(("nproc", "rendezvous"), [((1, 1), "c10d"), ((2, 1), "static")])
def test_agents_of_several_nodes(
    script: Path, gloo_parameters: list[np.ndarray], nproc: tuple[int, ...], rendezvous: str
) -> None:
    nodes = run_torchrun(script, nproc=nproc, rendezvous=rendezvous, env=lambda node: {"BYTEPS_NODE_ID": f"node{node}"})
    ranks = told(nodes, sum(nproc))
    assert f"2 nodes ({'+'.join(map(str, nproc))} ranks), 2 co-located servers" in ranks[0]["how"]
    if nproc == (1, 1):
        assert ranks[0]["digest"] == digest(gloo_parameters)
