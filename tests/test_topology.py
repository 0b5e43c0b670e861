"""Where a process runs: identities that say who shares memory, addresses that others can reach."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import NetLab
from torch_bps import topology
from torch_bps.errors import ConfigError

ROOT = Path(__file__).parents[1]


def fake_root(path: Path, boot: str = "boot-1", namespace: bool = True) -> str:
    boot_id = path / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text(f"{boot}\n")
    if namespace:
        (path / "proc/self/ns").mkdir(parents=True)
        (path / "proc/self/ns/net").touch()
    return str(path)


def has_ipv6_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.bind(("::1", 0))
        return True
    return False


# ---- identity


def test_identity_is_boot_id_and_network_namespace(tmp_path: Path) -> None:
    root = fake_root(tmp_path)
    namespace = os.stat(tmp_path / "proc/self/ns/net").st_ino
    assert topology.node_identity(root=root) == f"boot-1/{namespace}"


def test_either_makes_another_identity(tmp_path: Path) -> None:
    roots = [fake_root(tmp_path / "a"), fake_root(tmp_path / "b"), fake_root(tmp_path / "c", "boot-2")]
    os.remove(tmp_path / "c/proc/self/ns/net")
    os.link(tmp_path / "a/proc/self/ns/net", tmp_path / "c/proc/self/ns/net")
    assert len({topology.node_identity(root=root) for root in roots}) == 3


def test_the_override_wins_and_is_no_kernels_identity(tmp_path: Path) -> None:
    root = fake_root(tmp_path)
    own = topology.node_identity(root=root)
    assert topology.node_identity("rack1", root) == topology.node_identity("rack1") == "id:rack1"
    assert topology.node_identity(own, root) != own


@pytest.mark.parametrize("what", ["nothing", "no namespace"])
def test_without_the_kernels_help_it_is_the_host_name(what: str, tmp_path: Path) -> None:
    root = str(tmp_path) if what == "nothing" else fake_root(tmp_path, namespace=False)
    assert topology.node_identity(root=root) == f"host:{socket.gethostname()}"
    assert topology.host_label() == socket.gethostname()


def test_identity_is_the_same_in_one_process() -> None:
    assert topology.node_identity() == topology.node_identity()
    assert not topology.node_identity().startswith(("host:", "id:"))


def in_host(lab: NetLab, host: int, expression: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from torch_bps import topology; print({expression})"
    return lab.run(host, [sys.executable, "-c", code]).strip()


@pytest.mark.netns
@pytest.mark.processes
def test_namespaces_are_nodes_of_their_own_with_addresses_of_their_own() -> None:
    with NetLab(2) as lab:
        identities = [in_host(lab, host, "topology.node_identity()") for host in (0, 0, 1)]
        assert identities[0] == identities[1]
        assert len({*identities, topology.node_identity()}) == 3
        first, second = lab.hosts
        assert in_host(lab, 0, f"topology.address_towards({second.ipv4!r}, 80)") == first.ipv4
        assert in_host(lab, 0, f"topology.address_towards({second.ipv6!r}, 80)") == first.ipv6
        assert in_host(lab, 0, f"topology.address_towards({first.ipv4!r}, 80)") == first.ipv4
        assert in_host(lab, 0, "topology.address_towards('192.0.2.1', 80)") == "127.0.0.1"  # no route


# ---- addresses


def test_towards_loopback_it_is_loopback() -> None:
    assert topology.address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert topology.is_loopback(topology.address_towards("localhost", 0))


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 here")
def test_towards_ipv6_loopback_it_is_ipv6_loopback() -> None:
    assert topology.address_towards("::1", 80) == "::1"


def test_a_host_that_cannot_be_resolved_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'no\.such\.invalid' cannot be resolved") as caught:
        topology.address_towards("no.such.invalid", 80)
    assert "MASTER_ADDR" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback(address: str) -> None:
    assert topology.is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "128.0.0.1", "fe80::1", "12.7.0.1", "a-host"])
def test_not_loopback(address: str) -> None:
    assert not topology.is_loopback(address)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("host", 1, "host:1"),
        ("10.0.0.1", 65535, "10.0.0.1:65535"),
        ("::1", 0, "[::1]:0"),
        ("fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
    ],
)
def test_join_and_split_are_inverse(host: str, port: int, text: str) -> None:
    assert topology.join_address(host, port) == text
    assert topology.split_address(text) == (host, port)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no HOST:PORT"),
        ("host", "no HOST:PORT"),
        (":1", "no HOST:PORT"),
        ("[]:1", "no HOST:PORT"),
        ("host:", "'' is no port"),
        ("host:x", "'x' is no port"),
        ("host:65536", "'65536' is no port"),
        ("host:+1", r"'\+1' is no port"),
        ("host: 1", "' 1' is no port"),
        ("host:²", "'²' is no port"),
        ("::1", "needs brackets"),
        ("fe80::1:80", r"needs brackets, \[fe80::1\]:80"),
        ("[::1]", r"'\[::1\]' is no HOST:PORT"),
        ("[::1:80", "no HOST:PORT"),
        ("host:" + "9" * 5000, "is no port"),
    ],
)
def test_what_cannot_be_split(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        topology.split_address(text)
