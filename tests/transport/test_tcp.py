"""The contract over TCP, and what is TCP's own."""

from __future__ import annotations

import socket

import pytest

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import Kit, Rig
from torch_bps.errors import ConfigError
from torch_bps.topology import split_address
from torch_bps.transport.tcp import TcpTransport


class _Raw:
    def __init__(self, address: str) -> None:
        self._sock = socket.create_connection(split_address(address.removeprefix("tcp://")), 5)

    def send(self, data: bytes) -> object:
        return self._sock.sendall(data)

    def close(self) -> None:
        self._sock.close()


class TcpKit(Kit):
    name = "tcp"
    cut_is_noticed = True

    def make(self) -> TcpTransport:
        return TcpTransport(self.ledger)

    def nowhere(self) -> str:
        return "tcp://127.0.0.1:1"

    def raw(self, address: str) -> _Raw:
        return _Raw(address)


class TestTcpContract(TransportContract):
    kit_class = TcpKit


class Tcp6Kit(TcpKit):
    def where(self) -> str:
        return "[::1]:0"


class TestTcp6Contract(TransportContract):
    kit_class = Tcp6Kit


def test_a_host_name_is_resolved() -> None:
    class NameKit(TcpKit):
        def where(self) -> str:
            return "localhost:0"

    rig = Rig(NameKit())
    rig.pair()
    rig.close()


@pytest.mark.parametrize("where", ["nowhere", "host:port", "::1:5", "no.such.host.invalid:0"])
def test_a_wrong_address_is_named(where: str) -> None:
    from torch_bps.transport.memory import Pool
    from torch_bps.transport.reactor import EpollReactor

    reactor = EpollReactor()
    try:
        with pytest.raises(ConfigError) as caught:
            TcpTransport(Pool()).listen(reactor, where, lambda channel: None)  # type: ignore[arg-type,return-value]
        assert where in str(caught.value)
    finally:
        reactor.stop()
