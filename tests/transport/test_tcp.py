"""The contract over TCP, and what is TCP's own."""

from __future__ import annotations

import errno
import random
import re
import resource
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import End, Kit, Recorder, Rig, send
from torch_bps.errors import ConfigError, PeerLostError, ProtocolError
from torch_bps.interfaces import Interface
from torch_bps.topology import join_address, split_address
from torch_bps.transport import stream, tcp
from torch_bps.transport.memory import Pool
from torch_bps.transport.reactor import EpollReactor
from torch_bps.transport.tcp import TcpTransport
from torch_bps.wire.header import FIRST_PRIVATE_FRAME, HEADER_NBYTES, PUSH, Header


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


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(TcpKit())
    yield rig
    rig.close()


@pytest.fixture
def stranger(rig: Rig) -> Iterator[socket.socket]:
    """A socket that is connected to the rig's listener; rig.accepted[0] is the other end."""
    sock = socket.create_connection(split_address(rig.listener.address.removeprefix("tcp://")), 5)
    rig.until(lambda: rig.accepted, "accept")
    yield sock
    sock.close()


# ---- addresses


@pytest.mark.parametrize("where", ["nowhere", "host:port", "::1:5", "no.such.host.invalid:0", f"{'a' * 70}:0"])
def test_a_wrong_place_to_listen_is_named(where: str) -> None:
    reactor = EpollReactor()
    try:
        with pytest.raises(ConfigError) as caught:
            TcpTransport(Pool()).listen(reactor, where, lambda channel: Recorder())
        assert where in str(caught.value)
    finally:
        reactor.stop()


@pytest.mark.parametrize("address", ["tcp://nowhere", "tcp://no.such.host.invalid:5", f"tcp://{'a' * 70}:5"])
def test_a_wrong_address_to_connect_to_is_reported_by_on_close(rig: Rig, address: str) -> None:
    near = rig.connect(address=address)
    send(rig, near, b"lost")
    rig.until_closed(near)
    assert isinstance(near.log.closed[0], (ConfigError, PeerLostError))
    assert address.removeprefix("tcp://") in str(near.log.closed[0])


def test_the_next_address_is_tried_when_one_refuses_or_does_not_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    for sock in waiting:  # fill the queue of the silent one: the kernel drops what comes after
        sock.setblocking(False)
        sock.connect_ex(silent.getsockname())
    resolve = tcp._resolve

    def four(host: str, port: int, flags: int) -> list[tcp._AddressInfo]:
        bad = [("255.255.255.255", 1), ("127.0.0.1", 1), silent.getsockname()]  # fails at once, refuses, says nothing
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in bad] + resolve(host, port, flags)

    monkeypatch.setattr(tcp, "_resolve", four)
    monkeypatch.setattr(tcp, "_CONNECT_TIMEOUT_S", 0.05)
    near, far = rig.pair()
    expected = send(rig, near, b"at last")
    rig.until(lambda: far.log.frames, "the frame")
    assert far.log.frames == [expected]
    monkeypatch.setattr(tcp, "_resolve", lambda *_: four("127.0.0.1", 1, 0)[:3])
    nobody = rig.connect()
    rig.until_closed(nobody)
    assert "no answer within 0.05 s" in str(nobody.log.closed[0])
    for sock in (silent, *waiting):
        sock.close()


def test_a_socket_that_met_itself_has_met_nobody() -> None:
    """Connecting to a free port can succeed: the kernel may choose that very port for our own end."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert tcp._connect_error(sock) == errno.ECONNREFUSED
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert tcp._connect_error(sock) == 0


# ---- bytes


def test_frames_are_found_however_the_bytes_are_cut(rig: Rig, stranger: socket.socket) -> None:
    stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rng = random.Random(6)
    payloads = [rng.randbytes(nbytes) for nbytes in (0, 1, 64, 0, 300, 16384, 16320, 16321, 40_000, 5)]
    data = b"".join(Header(PUSH, sequence=n, nbytes=len(p)).pack() + p for n, p in enumerate(payloads))
    far = rig.accepted[0]
    sent = 0
    while sent < len(data):
        sent += stranger.send(data[sent : sent + rng.choice((1, 7, 63, 64, 65, 999, 20_000))])
        rig.step(rig.server_reactor)
    rig.until(lambda: len(far.log.frames) >= len(payloads), "all frames")
    assert [frame or b"" for _, frame in far.log.frames] == payloads


def test_a_large_payload_is_received_into_the_handlers_memory(rig: Rig) -> None:
    given = [rig.sent.buffer(bytearray(3 << 20)) for _ in range(2)]
    rig.accept_with = lambda: Recorder(on_header=lambda channel, header: given[header.sequence])
    near, far = rig.pair()
    expected = [send(rig, near, random.Random(n).randbytes(3 << 20), n) for n in range(2)]
    rig.until(lambda: len(far.log.frames) >= 2, "both frames")
    assert far.log.frames == expected
    assert all(buffer is mine for buffer, mine in zip(far.log.received_into, given, strict=True))
    assert rig.kit.ledger.largest_nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 100])
def test_private_frames_are_not_for_tcp(rig: Rig, stranger: socket.socket, nbytes: int) -> None:
    stranger.sendall(Header(FIRST_PRIVATE_FRAME, nbytes=nbytes).pack() + bytes(nbytes))
    rig.until_closed(rig.accepted[0])
    assert isinstance(rig.accepted[0].log.closed[0], ProtocolError)


# ---- ends


@pytest.mark.parametrize("nbytes", [1, 63, 64 + 1, 64 + 99, 64 + 50_000])
def test_an_end_within_a_frame_is_a_loss(rig: Rig, stranger: socket.socket, nbytes: int) -> None:
    data = Header(PUSH, nbytes=100 if nbytes < 200 else 100_000).pack() + bytes(100_000)
    stranger.sendall(data[:nbytes])
    stranger.shutdown(socket.SHUT_WR)
    far = rig.accepted[0]
    rig.until_closed(far)
    assert isinstance(far.log.closed[0], PeerLostError)
    assert far.channel.peer in str(far.log.closed[0])
    assert far.log.frames == []


def test_an_end_between_frames_is_orderly(rig: Rig, stranger: socket.socket) -> None:
    stranger.sendall(Header(PUSH, nbytes=4).pack() + b"last")
    stranger.close()
    far = rig.accepted[0]
    rig.until_closed(far)
    assert far.log.closed == [None]
    assert len(far.log.frames) == 1


def test_a_reset_is_a_loss(rig: Rig, stranger: socket.socket) -> None:
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    far = rig.accepted[0]
    rig.until_closed(far)
    assert isinstance(far.log.closed[0], PeerLostError)
    assert "reset" in str(far.log.closed[0])


def test_the_last_words_of_a_peer_are_heard_before_its_reset(rig: Rig) -> None:
    near, far = rig.pair()
    send(rig, near, b"unread")
    expected = send(rig, far, b"I end because ...")
    far.channel.close()  # with input that it has not read: the kernel sends a reset
    near.channel.send(Header(PUSH))  # fails, before the last words were read
    near.channel.send(Header(PUSH, nbytes=3), rig.sent.buffer(b"abc"))
    rig.until_closed(near, far)
    assert near.log.frames == [expected]
    assert isinstance(near.log.closed[0], PeerLostError)


def test_an_end_waits_while_the_peer_takes_something_and_is_a_loss_when_it_does_not(rig: Rig) -> None:
    near, far = rig.pair()
    buffer = rig.sent.buffer(bytearray(1 << 20)).retain(63)
    for _ in range(64):
        near.channel.send(Header(PUSH, nbytes=1 << 20), buffer)
    near.channel.close_when_sent()
    for _ in range(2):
        before = near.channel.queued_nbytes
        rig.until(lambda: near.channel.queued_nbytes < before, "the peer takes some")  # noqa: B023
        near.channel._end_is_late(before)  # type: ignore[attr-defined]
        rig.step()
        assert near.log.closed == []
    assert near.channel.queued_nbytes > 0
    near.channel._end_is_late(near.channel.queued_nbytes)  # type: ignore[attr-defined]
    rig.until_closed(near, far)
    assert isinstance(near.log.closed[0], PeerLostError)
    assert "bytes are left" in str(near.log.closed[0])
    assert isinstance(far.log.closed[0], PeerLostError)


# ---- interfaces


def from_interfaces(*interfaces: Interface) -> Rig:
    class InterfacesKit(TcpKit):
        def make(self) -> TcpTransport:
            return TcpTransport(self.ledger, interfaces=interfaces)

    return Rig(InterfacesKit())


def test_lanes_come_from_the_interfaces_in_turn() -> None:
    rig = from_interfaces(Interface("a", "127.0.0.2", ""), Interface("b", "127.0.0.3", "::1"))
    for lane in range(3):
        log = Recorder()
        rig.connected.append(End(rig.client.connect(rig.client_reactor, rig.listener.address, log, lane), log))
        rig.until(lambda: len(rig.accepted) > lane and log.opened, "open")  # noqa: B023
    sources = [end.channel.peer.split(":")[1] for end in rig.accepted]
    assert sources == ["//127.0.0.2", "//127.0.0.3", "//127.0.0.2"]
    rig.close()


@pytest.mark.parametrize(
    ("interface", "why"),
    [
        (Interface("a", "", "::1"), r"from a \(::1\): a has no IPv4 address"),
        (Interface("b", "192.0.2.1", ""), r"from b \(192\.0\.2\.1\): Cannot assign requested address"),
    ],
)
def test_an_interface_that_cannot_be_used_is_named(interface: Interface, why: str) -> None:
    rig = from_interfaces(interface)
    near = rig.connect()
    rig.until_closed(near)
    assert isinstance(near.log.closed[0], PeerLostError)
    assert re.search(why, str(near.log.closed[0]))
    rig.close()


# ---- sockets


def test_options_of_both_ends() -> None:
    class SizedKit(TcpKit):
        def make(self) -> TcpTransport:
            return TcpTransport(self.ledger, 100_000, silence_s=1.5)

    rig = Rig(SizedKit())
    for end in rig.pair():
        sock = end.channel._sock  # type: ignore[attr-defined]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == tcp.UNSENT_NBYTES
        assert not sock.get_inheritable()
        assert not sock.getblocking()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            assert sock.getsockopt(socket.SOL_SOCKET, option) == 200_000  # the kernel doubles it
    rig.close()


def test_what_waits_in_a_channel_is_overtaken_by_what_is_urgent(rig: Rig) -> None:
    near, far = rig.pair()
    for n in range(40):  # the peer does not read yet: sockets take a few of them
        near.channel.send(Header(PUSH, sequence=n, nbytes=1 << 20), rig.sent.buffer(bytes(1 << 20)))
    near.channel.send(Header(PUSH, sequence=40, nbytes=4, priority=-5), rig.sent.buffer(b"soon"))
    rig.until(lambda: len(far.log.frames) >= 41, "all frames")
    order = [header.sequence for header, _ in far.log.frames]
    assert order.index(40) < 20
    order.remove(40)
    assert order == list(range(40))


def test_a_listener_without_descriptors_does_not_spin_and_recovers(rig: Rig) -> None:
    near = rig.connect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        rig.server_reactor.run_once(5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rig.accepted == []
    poll = select.poll()
    poll.register(rig.server_reactor.fds()[-1], select.POLLIN)
    assert poll.poll(0) == []  # the connection is there, but the listener looks away until it tries again
    rig.until(lambda: rig.accepted and near.log.opened, "accept")


def test_a_fixed_port_can_be_used_again_at_once() -> None:
    rig = Rig(TcpKit())
    near, far = rig.pair()
    far.channel.close()  # the listening side closes first: its end stays in TIME_WAIT
    rig.until_closed(near, far)
    where = rig.kit.taken(rig.listener.address)
    rig.close()

    class AgainKit(TcpKit):
        def where(self) -> str:
            return where

    again = Rig(AgainKit())
    again.pair()
    assert again.listener.address == f"tcp://{join_address(*split_address(where))}"
    again.close()


# ---- how often the loop wakes


def test_a_large_payload_wakes_the_loop_once_for_many_segments(rig: Rig, stranger: socket.socket) -> None:
    nbytes, piece = 8 * tcp._WAKE_NBYTES, bytes(1024)
    end = rig.accepted[0]
    wakes = []
    on_events = end.channel._on_events
    rig.server_reactor._callbacks[end.channel._sock.fileno()] = lambda events: (wakes.append(events), on_events(events))
    stranger.sendall(Header(PUSH, nbytes=nbytes).pack() + piece)
    rig.until(lambda: end.log.headers, "header")
    for _ in range(nbytes // len(piece) - 1):
        stranger.sendall(piece)
        rig.server_reactor.run_once()
    rig.until(lambda: end.log.frames, "payload")
    assert len(wakes) <= 2 * 8
    stranger.sendall(Header(PUSH, sequence=1).pack())  # the smallest frame wakes it at once
    rig.until(lambda: len(end.log.frames) == 2, "next frame")


def test_a_channel_whose_turn_ends_with_a_payload_wakes_for_the_next_frame(
    rig: Rig, stranger: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_FAIR_NBYTES", 1)
    end = rig.accepted[0]
    stranger.sendall(Header(PUSH, nbytes=65536).pack() + bytes(1000))
    rig.until(lambda: end.log.headers, "header")
    stranger.sendall(bytes(1000))
    rig.until(lambda: end.channel._wake_nbytes > HEADER_NBYTES, "asks for the rest at once")
    stranger.sendall(bytes(65536 - 2000))
    rig.until(lambda: end.log.frames, "payload")
    stranger.sendall(Header(PUSH, sequence=1).pack())
    rig.until(lambda: len(end.log.frames) == 2, "next frame")


@pytest.mark.parametrize("ending", ["orderly", "reset"])
def test_a_peer_that_ends_within_what_is_awaited_is_noticed(rig: Rig, stranger: socket.socket, ending: str) -> None:
    end = rig.accepted[0]
    stranger.sendall(Header(PUSH, nbytes=65536).pack() + bytes(1000))
    rig.until(lambda: end.log.headers, "header")
    rig.step(rig.server_reactor)
    if ending == "reset":
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    rig.until_closed(end)
    assert isinstance(end.log.closed[0], PeerLostError)


def test_buffers_smaller_than_what_is_awaited() -> None:
    class SmallKit(TcpKit):
        def make(self) -> TcpTransport:
            return TcpTransport(self.ledger, socket_buffer_nbytes=4096)

    rig = Rig(SmallKit())
    near, far = rig.pair()
    sent = send(rig, near, random.Random(0).randbytes(1 << 20))
    rig.until(lambda: far.log.frames, "payload")
    assert far.log.frames == [sent]
    rig.close()
