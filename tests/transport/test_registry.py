"""Which transport is taken, and what is said about it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch_bps.errors import ConfigError
from torch_bps.transport.arena import Arena
from torch_bps.transport.registry import choose, make, scheme_of

OTHER_TCP = "tcp://10.0.1.1:2"
SHM, TCP, ZMQ = "shm://byteps-1", "tcp://10.0.0.1:2", "zmq://10.0.0.1:3"


@pytest.mark.parametrize(
    ("wanted", "offered", "same_node", "addresses"),
    [
        ("auto", [ZMQ, TCP, SHM], True, [SHM]),
        ("auto", [ZMQ, TCP, SHM], False, [TCP]),
        ("auto", [ZMQ, TCP], True, [TCP]),
        ("auto", [ZMQ], False, [ZMQ]),
        ("auto", ["rdma://7", ZMQ], True, [ZMQ]),  # a newer server offers what is unknown here
        ("zmq", [ZMQ, TCP, SHM], True, [ZMQ]),
        ("tcp", [ZMQ, TCP, SHM], True, [TCP]),
        ("shm", [ZMQ, TCP, SHM], True, [SHM]),
        ("tcp", [TCP, ZMQ, OTHER_TCP], False, [TCP, OTHER_TCP]),
        ("auto", [OTHER_TCP, TCP, SHM], False, [OTHER_TCP, TCP]),  # in the server's order
    ],
)
def test_the_choice_and_its_reason(wanted: str, offered: list[str], same_node: bool, addresses: list[str]) -> None:
    chosen, reason = choose(wanted, offered, same_node)
    assert chosen == addresses
    assert scheme_of(addresses[0]) in reason


@pytest.mark.parametrize(
    ("wanted", "offered", "same_node", "named"),
    [
        ("tcp", [ZMQ, SHM], True, ["tcp", "shm", "zmq"]),
        ("tcp", [], True, ["tcp", "nothing"]),
        ("shm", [TCP, SHM], False, ["shm", "another node"]),
        ("auto", [SHM], False, [SHM]),
        ("auto", [], True, ["none"]),
    ],
)
def test_what_cannot_be_had_is_a_config_error(
    wanted: str, offered: list[str], same_node: bool, named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(wanted, offered, same_node)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize("address", ["", "tcp", "tcp:", "tcp://", "10.0.0.1:5"])
def test_an_address_without_scheme_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        scheme_of(address)


@pytest.mark.parametrize("scheme", ["shm", "tcp", "zmq"])
def test_every_transport_of_the_table_can_be_made(scheme: str) -> None:
    arena = Arena(1 << 30)
    assert make(scheme, arena).name == scheme
    arena.close()


def test_a_transport_is_imported_only_when_it_is_made() -> None:
    code = (
        "import sys, torch_bps.transport.registry as registry\n"
        "loaded = {'zmq', 'torch', 'torch_bps.transport.tcp', 'torch_bps.transport.shm'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(loaded)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
