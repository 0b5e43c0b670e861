"""Where servers come from: each way really trains, and ends with gloo's parameters."""

from __future__ import annotations

import functools
import itertools
import re
import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.netlab import NetLab
from tests.integration import jobs
from tests.integration.rig import Process, RankResult, run_ranks


@functools.cache
def gloo_parameters(world_size: int) -> list[np.ndarray]:
    results = run_ranks(jobs.train, world_size, backend="gloo", check=False)  # gloo aborts now and then at exit
    return results[0].value["parameters"]


def check(results: list[RankResult]) -> str:
    """Compare with gloo: bit-identical at 2 ranks, closely from 3 on (another order of additions); returns how."""
    wanted = gloo_parameters(len(results))
    for result in results:
        assert "pushed" not in result.value
        for ours, theirs in zip(result.value["parameters"], wanted, strict=True):
            if len(results) == 2:
                np.testing.assert_array_equal(ours, theirs)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)  # rounding grows with training
    return str(results[0].value["how"])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_node_needs_no_server(world_size: int) -> None:
    how = check(run_ranks(jobs.train, world_size, backend="byteps"))
    assert "shared memory, without a server" in how


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", ["auto", "tcp", "zmq"])
def test_one_node_through_a_server(world_size: int, transport: str) -> None:
    env = {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": transport}
    how = check(run_ranks(jobs.train, world_size, backend="byteps", env=env))
    assert "1 co-located server" in how
    assert ("over shm" if transport == "auto" else f"over {transport}") in how


def nodes(*ranks_per_node: int) -> list[int]:
    return [node for node, count in enumerate(ranks_per_node) for _ in range(count)]


@pytest.mark.parametrize("per_node", [(1, 1), (2, 1), (2, 2), (1, 1, 1)])
def test_several_nodes_start_a_server_each(per_node: tuple[int, ...]) -> None:
    """BYTEPS_NODE_ID makes one machine look like several."""
    node = nodes(*per_node)
    results = run_ranks(jobs.train, len(node), backend="byteps", env=lambda rank: {"BYTEPS_NODE_ID": f"n{node[rank]}"})
    how = check(results)
    assert f"{len(per_node)} nodes" in how
    assert f"{len(per_node)} co-located servers" in how


@pytest.mark.netns
def test_hosts_in_namespaces_start_a_server_each() -> None:
    with NetLab(2) as lab:
        host = [0, 0, 1]
        results = run_ranks(
            jobs.train,
            3,
            backend="byteps",
            store="rank0",
            address=lab.hosts[0].ipv4,
            prefix=lambda rank: lab.prefix(host[rank]),
        )
    how = check(results)
    assert "2 nodes (2+1 ranks), 2 co-located servers" in how
    assert lab.hosts[0].ipv4 in how
    assert lab.hosts[1].ipv4 in how
    assert "0.0.0.0" not in how


@pytest.mark.netns
def test_ipv6_only_addresses() -> None:
    with NetLab(2) as lab:
        results = run_ranks(
            jobs.train, 2, backend="byteps", store="rank0", address=lab.hosts[0].ipv6, prefix=lab.prefix
        )
    how = check(results)
    assert f"[{lab.hosts[1].ipv6}]" in how


@pytest.mark.netns
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_lanes_go_over_all_interfaces_and_the_loss_of_one_is_noticed(family: str) -> None:
    with NetLab(2, num_links=2) as lab:
        address = lab.hosts[0].ipv4
        if family == "ipv6":
            address = lab.hosts[0].ipv6
            for host, link in itertools.product((0, 1), (0, 1)):
                lab.run(host, ["ip", "addr", "del", f"{lab.hosts[host].ipv4_of(link)}/24", "dev", f"eth{link}"])
        env = {"BYTEPS_INTERFACE": "eth0,eth1", "BYTEPS_HEARTBEAT_TIMEOUT": "2"}
        results = run_ranks(
            jobs.stripe, 2, 6, backend="byteps", store="rank0", address=address, prefix=lab.prefix, env=env
        )
    for result in results:
        assert result.value["how"].count("2 lanes to 2 addresses") == 1, result.value["how"]  # its own server is near
        assert min(result.value["sent"]) > 0.2 * sum(result.value["sent"])
        assert "is lost" in result.value["error"] or "connection to" in result.value["error"], result.value["error"]


@pytest.fixture
def servers() -> Iterator[list[int]]:
    """Two long-lived servers; yields their ports."""
    started = [Process([sys.executable, "-m", "torch_bps.server", "--host", "127.0.0.1"]) for _ in range(2)]
    try:
        ports = [int(re.findall(r":(\d+) \(also", process.wait_for("ready at"))[0]) for process in started]
        yield ports
        for process in started:
            process.kill(signal.SIGTERM)
        for process in started:
            assert process.wait(time.monotonic() + 20) == 0, process.output
    finally:
        for process in started:
            process.close()


def test_long_lived_servers_serve_one_job_after_another(servers: list[int]) -> None:
    env = {"BYTEPS_SERVERS": ",".join(f"127.0.0.1:{port}" for port in servers)}
    for _ in range(2):
        how = check(run_ranks(jobs.train, 2, backend="byteps", env=env))
        assert "2 dedicated servers" in how


def test_two_jobs_share_a_server(servers: list[int]) -> None:
    from tests.integration.rig import start_ranks

    env = {"BYTEPS_SERVERS": f"localhost:{servers[0]}"}
    with (
        start_ranks(jobs.train, 2, backend="byteps", env=env) as one,
        start_ranks(jobs.train, 2, backend="byteps", env=env) as other,
    ):
        check(one.results(check=True))
        check(other.results(check=True))


def test_dedicated_and_colocated_together(servers: list[int]) -> None:
    env = {"BYTEPS_SERVERS": f"127.0.0.1:{servers[0]}", "BYTEPS_ENABLE_MIXED_MODE": "1"}
    results = run_ranks(jobs.train, 3, backend="byteps", env=lambda rank: {**env, "BYTEPS_NODE_ID": str(rank)})
    how = check(results)
    assert "3 co-located and 1 dedicated servers" in how


def halves(rank: int, world_size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for size in (1, 1000, 300_001):
            for kind, wanted in ((dist.ReduceOp.SUM, 6), (dist.ReduceOp.AVG, 2)):
                tensor = torch.full((size,), rank + 1.0, dtype=dtype)
                dist.all_reduce(tensor, kind)
                assert bool((tensor == wanted).all()), (dtype, size, kind, tensor)


def test_half_precision_goes_through_a_nodes_float32_sum() -> None:
    run_ranks(halves, 3, backend="byteps", env=lambda rank: {"BYTEPS_NODE_ID": str(rank // 2)})
