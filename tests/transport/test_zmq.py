"""The contract over ZeroMQ, strangers, other versions, and peers that die."""

from __future__ import annotations

import logging
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.conformance.transport_contract import HOSTILE, TransportContract
from tests.conformance.transport_rig import Kit, Recorder, Rig, descriptors, send
from tests.integration.process import Process
from torch_bps.errors import PeerLostError, ProtocolError, VersionError
from torch_bps.transport import zmq as zmq_module
from torch_bps.transport.reactor import EpollReactor
from torch_bps.transport.zmq import ZmqTransport
from torch_bps.wire.header import FIRST_PRIVATE_FRAME, PUSH, Header

OPEN = Header(FIRST_PRIVATE_FRAME).pack()
BYE = Header(FIRST_PRIVATE_FRAME + 2).pack()


def other_version(header: bytes) -> bytes:
    return header[:2] + bytes([header[2] + 1]) + header[3:]


class Dealer:
    """Somebody who speaks ZeroMQ, and of our protocol what a test makes it say."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address.replace("zmq://", "tcp://"))

    def say(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def hear(self) -> list[bytes]:
        return self.socket.recv_multipart(zmq.NOBLOCK) if self.socket.poll(0) else []

    def send(self, data: bytes) -> None:
        self.say(OPEN, b"")
        self.say(data, b"")

    def close(self) -> None:
        self.context.destroy(1000)


class ZmqKit(Kit):
    name = "zmq"
    clog_nbytes = None

    def make(self) -> ZmqTransport:
        return ZmqTransport()

    def nowhere(self) -> str:
        return "zmq://127.0.0.1:1"

    def raw(self, address: str) -> Dealer:
        return Dealer(address)


class TestZmqContract(TransportContract):
    kit_class = ZmqKit

    def test_channels_that_end_leave_no_descriptor(self, rig: Rig) -> None:
        """As in the contract, but ZeroMQ closes its descriptors a moment later: counted beside a pair that stands."""
        self._still_works(rig, rig.pair())
        before = len(descriptors())
        for _ in range(5):
            rig.until_closed(*self._opened_and_closed(rig))
        rig.until(lambda: len(descriptors()) == before, f"{before} descriptors, not {len(descriptors())}")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(ZmqKit())
    yield rig
    rig.close()


@pytest.fixture
def stranger(rig: Rig) -> Iterator[Dealer]:
    dealer = Dealer(rig.listener.address)
    yield dealer
    dealer.close()


def talks(rig: Rig) -> None:
    """A new connection works."""
    near, far = rig.pair()
    expected = send(rig, near, b"there"), send(rig, far, b"and back")
    rig.until(lambda: near.log.frames and far.log.frames, "a frame each way")
    assert (far.log.frames[0], near.log.frames[0]) == expected


# ---- strangers


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"", b""],
        [b"BP"],
        [Header(PUSH).pack()],
        [Header(PUSH).pack(), b"", b""],
        [Header(PUSH).pack()[:63], b""],
        [Header(PUSH).pack() + b"x", b""],
        [Header(PUSH, nbytes=5).pack(), b"four"],
        [Header(PUSH, nbytes=3).pack(), b"four"],
        [Header(FIRST_PRIVATE_FRAME + 9).pack(), b""],
        [OPEN, b""],
    ],
    ids=lambda parts: "+".join(str(len(part)) for part in parts),
)
def test_a_malformed_message_closes_only_its_channel(rig: Rig, stranger: Dealer, parts: list[bytes]) -> None:
    good = rig.pair()
    stranger.say(OPEN, b"")
    stranger.say(*parts)
    rig.until(lambda: len(rig.accepted) == 2 and rig.accepted[1].log.closed, "the stranger's end")
    assert type(rig.accepted[1].log.closed[0]) is ProtocolError
    assert rig.accepted[1].log.frames == []
    heard: list[list[bytes]] = []
    rig.until(lambda: (heard.append(stranger.hear()), [BYE, b""] in heard)[1], "a goodbye to the stranger")
    expected = send(rig, good[0], b"still here")
    rig.until(lambda: good[1].log.frames, "a frame")
    assert good[1].log.frames == [expected]


@pytest.mark.parametrize(
    "parts", [[b""], [b"hello", b"you"], [Header(PUSH).pack(), b""], [BYE, b""], [OPEN], [b"x"] * 9]
)
def test_one_who_does_not_open_is_never_accepted(rig: Rig, stranger: Dealer, parts: list[bytes]) -> None:
    stranger.say(*parts)
    stranger.say(OPEN, b"")  # overtakes nothing: once it is accepted, what it said before was read
    rig.until(lambda: rig.accepted, "accept")
    assert rig.accepted[0].log.frames == []
    assert rig.accepted[0].log.closed == []
    talks(rig)


def test_raw_bytes_on_the_port_harm_nothing(rig: Rig) -> None:
    port = int(rig.listener.address.rpartition(":")[2])
    rng = random.Random(4)
    signature = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(54, b"\0")
    for data in [b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), b"\xff" * 64, signature + b"\x02" + b"\xff" * 8]:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(data)
    talks(rig)
    assert len(rig.accepted) == 1


# ---- versions


def test_a_server_tells_peers_of_another_version_and_serves_on(
    rig: Rig, stranger: Dealer, caplog: pytest.LogCaptureFixture
) -> None:
    good = rig.pair()
    with caplog.at_level(logging.WARNING, "torch_bps.transport"):
        stranger.say(other_version(OPEN), b"")
        heard: list[list[bytes]] = []
        rig.until(lambda: heard.append(stranger.hear()) or heard[-1], "an answer")
    answer, _ = heard[-1]
    assert answer[:3] == OPEN[:3]  # our magic and version: whatever else follows in theirs, they can tell
    assert "wire version 2" in caplog.text
    assert len(rig.accepted) == 1
    expected = send(rig, good[0], b"still here")
    rig.until(lambda: good[1].log.frames, "a frame")
    assert good[1].log.frames == [expected]
    talks(rig)


def test_a_client_names_both_versions(rig: Rig) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    near = rig.connect(address=f"zmq://127.0.0.1:{port}")

    def answer() -> object:
        if router.poll(0):
            identity, *_ = router.recv_multipart()
            router.send_multipart([identity, other_version(OPEN), b""])
        return near.log.closed

    rig.until(answer, "on_close")
    context.destroy(0)
    assert type(near.log.closed[0]) is VersionError
    assert "version 2" in str(near.log.closed[0])
    assert "this process 1" in str(near.log.closed[0])
    assert near.log.opened == 0
    assert HOSTILE["another version"][1] is VersionError


# ---- peers that die


def listen_forever() -> None:
    """The server of test_a_killed_server_is_noticed."""
    reactor = EpollReactor()
    listener = ZmqTransport().listen(reactor, "127.0.0.1:0", lambda channel: Recorder())
    print(listener.address, flush=True)
    while True:
        reactor.run_once(10)


def connect_forever(address: str) -> None:
    """The client of test_a_killed_client_is_noticed."""
    reactor = EpollReactor()
    channel = ZmqTransport().connect(reactor, address, Recorder())
    for number in range(3000):
        channel.send(Header(PUSH, sequence=number))
    while True:
        reactor.run_once(10)


def other_process(function: Callable[..., None], *arguments: str) -> Process:
    code = f"from {__name__} import {function.__name__} as f; f(*{arguments!r})"
    return Process([sys.executable, "-c", code], name=function.__name__)


def test_a_killed_server_is_noticed(rig: Rig) -> None:
    with other_process(listen_forever) as server:
        near = rig.connect(address=server.wait_for("zmq://"))
        rig.until(lambda: near.log.opened, "open")
        server.kill(signal.SIGKILL)
        rig.until_closed(near)
    assert type(near.log.closed[0]) is PeerLostError
    assert near.channel.peer in str(near.log.closed[0])


def test_a_killed_client_is_noticed_and_what_it_sent_is_delivered(rig: Rig) -> None:
    good = rig.pair()
    with other_process(connect_forever, rig.listener.address) as client:
        rig.until(lambda: len(rig.accepted) == 2, "accept")
        far = rig.accepted[1]
        client.kill(signal.SIGKILL)
        rig.until_closed(far)
    assert type(far.log.closed[0]) is PeerLostError
    assert far.channel.peer in str(far.log.closed[0])
    assert [header.sequence for header, _ in far.log.frames] == list(range(len(far.log.frames)))
    assert good[1].log.closed == []


def test_an_answer_to_one_who_has_said_goodbye_and_gone_loses_nothing(rig: Rig) -> None:
    rig.accept_with = lambda: Recorder(on_frame=lambda channel, header, buffer: channel.send(Header(PUSH)))
    near, far = rig.pair()
    for number in range(1000):
        send(rig, near, b"", number)
    near.channel.close_when_sent()
    rig.until(lambda: near.log.closed, "on_close", rig.client_reactor)
    rig.until_closed(far)
    assert len(far.log.frames) == 1000
    assert far.log.closed == [None]


def test_everything_that_was_sent_before_the_server_ended_arrives(rig: Rig) -> None:
    near, far = rig.pair()
    for number in range(1000):
        send(rig, far, b"x", number)
    far.channel.close_when_sent()
    rig.listener.close()
    rig.until(lambda: far.log.closed, "on_close", rig.server_reactor)
    rig.until_closed(near)
    assert len(near.log.frames) == 1000
    assert near.log.closed == [None]


def test_one_that_speaks_no_zeromq(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = rig.connect(address=f"zmq://127.0.0.1:{listener.getsockname()[1]}")
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"220 mail.example.com ESMTP\r\n" * 10)
            rig.until(lambda: send(rig, near, b"?") and near.log.closed, "on_close")  # send never blocks
    assert isinstance(near.log.closed[0], ConnectionError)
    assert "cannot connect" in str(near.log.closed[0])
    assert "no torch_bps server's control port" in str(near.log.closed[0])


# ---- names


def test_a_name_with_several_addresses(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answers: what was sent meanwhile arrives there, once."""
    found = [(2, 1, 6, "", (host, 0)) for host in ("127.0.0.9", "127.0.0.1")]
    monkeypatch.setattr(zmq_module.socket, "getaddrinfo", lambda *_, **__: found)
    port = int(rig.listener.address.rpartition(":")[2])
    near = rig.connect(address=f"zmq://twofold:{port}")
    expected = [send(rig, near, bytes([number]) * 100, number) for number in range(3)]
    rig.until(lambda: near.log.opened, "open")
    expected.append(send(rig, near, b"later", 3))
    rig.until(lambda: rig.accepted and len(rig.accepted[0].log.frames) >= 4, "frames")
    assert rig.accepted[0].log.frames == expected
    assert len(rig.accepted) == 1


def test_a_name_that_nobody_knows(rig: Rig) -> None:
    near = rig.connect(address="zmq://nobody.invalid:1")
    rig.until_closed(near)
    assert type(near.log.closed[0]) is PeerLostError
    assert "nobody.invalid" in str(near.log.closed[0])
    assert "refused" not in str(near.log.closed[0])
