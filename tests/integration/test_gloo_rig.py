"""The rig itself, proved with gloo: what it says of ranks that end well, fail, hang, die or leave children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.netlab import NetLab
from tests.conftest import snapshot
from tests.integration.rig import Process, alive, json_lines, run_ranks, run_torchrun, start_ranks


def add_up(rank: int, world_size: int, scale: float) -> torch.Tensor:
    tensor = torch.full((4,), float(rank + 1) * scale)
    dist.all_reduce(tensor)
    return tensor


def fail_on(rank: int, world_size: int, failing: int) -> int:
    if rank == failing:
        raise KeyError(f"rank {rank} had enough")
    return rank


def stop_at(rank: int, world_size: int) -> None:
    print(f"rank {rank} is waiting", flush=True)
    threading.Event().wait(60)


def leave_child(rank: int, world_size: int) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize("store", ["tcp", "file", "rank0"])
def test_values_come_back(store: str) -> None:
    results = run_ranks(add_up, 2, 0.5, backend="gloo", store=store)
    assert [result.rank for result in results] == [0, 1]
    for result in results:
        assert torch.equal(result.value, torch.full((4,), 1.5))


def test_a_failure_is_told_with_its_rank_error_and_output() -> None:
    good, bad = run_ranks(fail_on, 2, 1, check=False)
    assert (good.value, good.exitcode, good.ok) == (0, 0, True)
    assert (bad.exitcode, bad.ok) == (1, False)
    assert isinstance(bad.error, KeyError)
    assert "rank 1 had enough" in bad.output
    with pytest.raises(AssertionError, match=r"(?s)ranks failed.*rank 1 \(exit code 1\).*rank 1 had enough"):
        run_ranks(fail_on, 2, 1)


def test_ranks_that_hang_are_named_and_ended() -> None:
    with start_ranks(stop_at, 2) as job:
        for rank, process in enumerate(job.ranks):
            process.wait_for(f"rank {rank} is waiting")
        with pytest.raises(AssertionError, match=r"ranks \[0, 1\] still running after 0.1 s"):
            job.results(timeout_s=0.1)
    assert [process.wait(0) for process in job.ranks] == [-signal.SIGKILL] * 2


def test_one_rank_can_be_killed() -> None:
    with start_ranks(stop_at, 2) as job:
        job.ranks[1].wait_for("is waiting")
        job.ranks[1].kill()
        with pytest.raises(AssertionError, match=r"ranks \[0\] still running"):
            job.results(timeout_s=0.5)
        job.ranks[0].kill(signal.SIGTERM)
        assert [result.exitcode for result in job.results()] == [-signal.SIGTERM, -signal.SIGKILL]


def test_children_left_behind_are_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integration.rig.ORPHAN_GRACE_S", 0.1)
    (result,) = run_ranks(leave_child, 1, check=False)
    assert result.exitcode == 0
    assert not result.ok
    (orphan,) = result.orphans
    assert "time.sleep(60)" in orphan
    assert not alive(int(orphan.split()[0]))


SCRIPT = """
import json, os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
print(json.dumps({"rank": dist.get_rank(), "node": int(os.environ["GROUP_RANK"]), "total": total.item()}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("nproc", "rendezvous"), [(2, "standalone"), ([1, 2], "static"), ([2, 1], "c10d")], ids=lambda value: str(value)
)
def test_torchrun(tmp_path: Path, nproc: int | list[int], rendezvous: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    results = run_torchrun(script, nproc=nproc, rendezvous=rendezvous)
    nodes = [json_lines(result.output) for result in results]
    counts = [nproc] if isinstance(nproc, int) else nproc
    assert sorted(len(node) for node in nodes) == sorted(counts)
    assert {line["total"] for node in nodes for line in node} == {float(sum(counts))}


@pytest.mark.netns
def test_ranks_on_different_hosts() -> None:
    with NetLab(2) as lab:
        results = run_ranks(
            add_up, 2, 2.0, backend="gloo", store="rank0", address=lab.hosts[0].ipv4, prefix=lab.prefix,
            env={"GLOO_SOCKET_IFNAME": "eth0"},
        )  # fmt: skip
    assert all(torch.equal(result.value, torch.full((4,), 6.0)) for result in results)


def test_the_leak_check_sees_each_kind() -> None:
    before = snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="byteps-left")
    thread.start()
    memfd = os.memfd_create("byteps-left")
    with Process([sys.executable, "-c", "import time; time.sleep(60)"]):
        found = "\n".join(snapshot() - before)
    end.set()
    thread.join()
    os.close(memfd)
    for kind in ("thread byteps-left", "/memfd:byteps-left", "child "):
        assert kind in found
    assert snapshot() == before
