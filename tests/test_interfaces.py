"""BYTEPS_INTERFACE: which interfaces are taken, and what is said of those that cannot be."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import NetLab
from torch_bps import interfaces
from torch_bps.errors import ConfigError
from torch_bps.interfaces import Interface

ROOT = Path(__file__).parents[1]


def test_loopback_is_an_interface() -> None:
    assert "lo" in interfaces.names()
    (found,) = interfaces.find(["lo"])
    assert found.address == found.ipv4 == found.address_of(socket.AF_INET) == "127.0.0.1"
    assert found.address_of(socket.AF_INET6) in ("::1", "")
    assert interfaces.holding(["127.0.0.1"]) == ["lo"]
    assert interfaces.holding(["192.0.2.1", "a-name", "0.0.0.0"]) == []
    assert interfaces.find([]) == []


def test_without_an_ipv4_address_others_are_told_the_ipv6_one() -> None:
    assert Interface("eth0", "", "fd77::1").address == "fd77::1"


def fake_state(root: Path, state: str) -> str:
    folder = root / "sys/class/net/lo"
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    return str(root)


@pytest.mark.parametrize("state", ["down", "lowerlayerdown", "notpresent"])
def test_an_interface_that_is_down_is_refused(state: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"BYTEPS_INTERFACE='lo': lo is down \({state}\)") as caught:
        interfaces.find(["lo"], fake_state(tmp_path, state))
    assert "ip link set lo up" in caught.value.hint


@pytest.mark.parametrize("state", ["up", "unknown", "dormant"])
def test_other_states_are_as_good_as_up(state: str, tmp_path: Path) -> None:
    assert interfaces.find(["lo"], fake_state(tmp_path, state))[0].name == "lo"
    assert interfaces.find(["lo"], str(tmp_path / "none"))[0].ipv6 == ""  # neither /sys nor /proc


def test_a_missing_interface_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"BYTEPS_INTERFACE='lo,ib7': ib7 is no network interface") as caught:
        interfaces.find(["lo", "ib7"])
    for name in interfaces.names():
        assert name in caught.value.hint


def test_an_interface_that_is_named_twice_is_an_error_that_says_how_to_have_more_lanes() -> None:
    with pytest.raises(ConfigError, match=": lo stands there twice") as caught:
        interfaces.find(["lo", "lo"])
    assert "BYTEPS_LANES" in caught.value.hint


def in_host(lab: NetLab, host: int, expression: str) -> str:
    """Return what an expression is on a host; a ConfigError's first line if it raises one."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from torch_bps import interfaces\nfrom torch_bps.errors import ConfigError\n"
        f"try: print({expression})\nexcept ConfigError as error: print(error.what)"
    )
    return lab.run(host, [sys.executable, "-c", code]).strip()


@pytest.mark.netns
@pytest.mark.processes
def test_interfaces_of_a_host() -> None:
    with NetLab(2, num_links=2) as lab:
        first, host = lab.hosts
        assert in_host(lab, 1, "interfaces.names()") == "['lo', 'eth0', 'eth1']"
        both = [Interface(f"eth{link}", host.ipv4_of(link), host.ipv6_of(link)) for link in (1, 0)]
        assert in_host(lab, 1, "interfaces.find(['eth1', 'eth0'])") == str(both)
        held = f"interfaces.holding({[host.ipv6_of(1), first.ipv4, host.ipv4]!r})"
        assert in_host(lab, 1, held) == "['eth0', 'eth1']"
        lab.run(1, ["ip", "addr", "flush", "dev", "eth0", "scope", "global"])
        assert "eth0 has no address" in in_host(lab, 1, "interfaces.find(['eth1', 'eth0'])")
        lab.run(1, ["ip", "link", "set", "eth1", "down"])
        assert "eth1 is down" in in_host(lab, 1, "interfaces.find(['eth1'])")
