"""The benchmarks, each as a user runs it, at a tiny size; and what one of them shows of a server's memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import ROOT, Row
from benchmarks.netlab import NetLab


def rows_of(file: Path, script: str, *arguments: str) -> list[Row]:
    command = [sys.executable, f"benchmarks/{script}", *arguments, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = harness.read(file)
    assert found is not None
    assert found[0].title in done.stdout
    return found[0].rows


def test_benchmarks_of_one_process_and_of_two(tmp_path: Path) -> None:
    engine = rows_of(tmp_path / "a", "engine.py", "--seconds", "0", "--parts", "4", "--ranks", "3")
    assert [row["events"] for row in engine] == [3 * 4 + 2 * 4, 3 * 4, 3 * 4, 3 * 32 * 4]
    reducer = rows_of(tmp_path / "b", "reducer.py", "--seconds", "0", "--sizes", "4K", "--threads", "2")
    assert all(row["adding"] > 0 and row["copying"] > 0 for row in reducer)
    transport = rows_of(tmp_path / "c", "transport.py", "--seconds", "0", "--sizes", "64,100K")
    assert [row["transport"] for row in transport] == ["inproc", "tcp", "shm", "zmq"] * 2
    assert all(row["samples"] >= 30 for row in transport)


def test_training_ends_with_equal_parameters(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a", "training.py", "--models", "tiny", "--rounds", "2")
    assert [row["backend"] for row in rows] == ["byteps", "gloo"]
    assert not any(row["differ"] for row in rows)


def test_collectives_of_one_host(tmp_path: Path) -> None:
    small = ("--collectives", "broadcast", "--ranks", "2", "--sizes", "1K", "--seconds", "0.01")
    rows = rows_of(tmp_path / "a", "local.py", *small)
    assert {row["backend"] for row in rows} >= {"byteps", "gloo"}
    assert not any(row["wrong"] for row in rows)


def test_a_servers_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (8, 160):
        model = ("--ranks", "2", "--megabytes", str(megabytes), "--bucket", "8", "--steps", "2")
        rows = rows_of(tmp_path / str(megabytes), "memory.py", *model)
        assert rows[-1]["pushed"] == 2 * 2 * megabytes * 10**6
        peaks.append(rows[-1]["peak"])
    # two ranks have six partitions of at most 1 MiB under way each, whose sums wait beside them
    assert peaks[1] - peaks[0] < 3 * 6 << 20


@pytest.mark.netns
def test_collectives_between_hosts(tmp_path: Path) -> None:
    small = ("--workers", "2", "--servers", "1", "--sizes", "64K", "--seconds", "0.05")
    rows = rows_of(tmp_path / "a", "network.py", *small)
    assert [row["backend"] for row in rows] == ["byteps", "gloo"]
    assert all(row["user_s"] + row["system_s"] > 0 and not row["wrong"] for row in rows)


@pytest.mark.netns
def test_what_a_link_drops_is_counted() -> None:
    flood = (  # several sockets: one alone waits until its own packets have gone
        "import socket\n"
        "sockets = [socket.socket(type=socket.SOCK_DGRAM) for _ in range(20)]\n"
        "for _ in range(50): [each.sendto(bytes(1400), {!r}) for each in sockets]"
    )
    with NetLab(3, rate_mbit=10) as lab:
        assert [lab.drops(host) for host in range(3)] == [(0, 0)] * 3
        for host in (0, 1):  # each as fast as its link, both to one
            lab.run(host, [sys.executable, "-c", flood.format((lab.hosts[2].ipv4, 9))])
        deadline_s = time.monotonic() + 10
        while not lab.drops(2)[0]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert [lab.drops(host)[1] for host in range(3)] == [0] * 3  # a host drops nothing of its own
