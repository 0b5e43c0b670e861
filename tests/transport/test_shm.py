"""The contract through shared memory, and what is its own: who may use a block when, and hostile peers."""

from __future__ import annotations

import array
import itertools
import os
import socket
from collections.abc import Iterator

import pytest

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import Kit, Recorder, Rig, descriptors, send
from torch_bps.errors import BytePSError, ConfigError, PeerLostError, ProtocolError
from torch_bps.transport import shm_channel
from torch_bps.transport.arena import Arena
from torch_bps.transport.base import Buffer, Channel
from torch_bps.transport.shm import ShmTransport
from torch_bps.transport.shm_channel import FORGET, GOODBYE, INLINE_NBYTES, PLACE, RELEASE, SEGMENT
from torch_bps.wire.header import CONTROL, PUSH, Header

MiB = 1 << 20
_names = itertools.count()


class _Raw:
    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("\0" + address.removeprefix("shm://"))

    def send(self, data: bytes) -> object:
        return self.sock.sendall(data)

    def close(self) -> None:
        self.sock.close()


class ShmKit(Kit):
    name = "shm"
    clog_nbytes = None  # payloads are copied at once: the sender's buffers do not wait for the peer

    def __init__(self) -> None:
        super().__init__()
        self.arenas: list[Arena] = []

    def make(self) -> ShmTransport:
        self.arenas.append(Arena(1 << 30))
        return ShmTransport(self.arenas[-1])

    def where(self) -> str:
        return f"byteps-test-{os.getpid()}-{next(_names)}"

    def nowhere(self) -> str:
        return "shm://byteps-test-nobody"

    def raw(self, address: str) -> _Raw:
        return _Raw(address)

    def received_alive(self) -> int:
        return sum(arena.used_blocks for arena in self.arenas)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


class TestShmContract(TransportContract):
    kit_class = ShmKit


class Keeper(Recorder):
    """Keeps the buffers that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Buffer] = []

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        assert buffer is not None
        self.kept.append(buffer.retain())
        super().on_frame(channel, header, buffer)

    def let_go(self) -> None:
        while self.kept:
            self.kept.pop().release()


@pytest.fixture
def rig() -> Iterator[Rig]:
    before = descriptors()
    rig = Rig(ShmKit())
    yield rig
    rig.close()
    assert descriptors() == before


@pytest.fixture
def keeper(rig: Rig) -> Keeper:
    keeper = Keeper()
    rig.accept_with = lambda: keeper
    return keeper


def arena_of_client(rig: Rig) -> Arena:
    assert isinstance(rig.client, ShmTransport)
    return rig.client.arena


# ---- who may use a block


def test_a_block_of_the_arena_is_not_copied_and_comes_back(rig: Rig, keeper: Keeper) -> None:
    near, _ = rig.pair()
    arena = arena_of_client(rig)
    block = arena.alloc(MiB)
    place = block.block
    near.channel.send(Header(PUSH, nbytes=MiB), block)
    rig.until(lambda: keeper.kept, "the frame")
    place.view[:5] = b"hello"  # after it was sent: the receiver looks at this very memory
    assert bytes(keeper.kept[0].view[:5]) == b"hello"
    assert near.channel.queued_nbytes == MiB
    keeper.let_go()
    rig.until(lambda: arena.used_blocks == 0, "the release")
    assert near.channel.queued_nbytes == 0
    again = arena.alloc(MiB)
    assert again.block is place
    again.release()


@pytest.mark.parametrize("end", ["close", "close_when_sent", "cut", "peer closes"])
def test_no_block_is_used_again_while_the_peer_reads_it(rig: Rig, keeper: Keeper, end: str) -> None:
    near, far = rig.pair()
    arena = arena_of_client(rig)
    send(rig, near, b"a" * MiB)
    rig.until(lambda: keeper.kept, "the frame")
    if end == "cut":
        near.channel.close(RuntimeError("cut"))
    else:
        getattr(far.channel if end == "peer closes" else near.channel, end.replace("peer closes", "close"))()
    rig.until_closed(near, far)
    for _ in range(3):
        rig.step()
    other = arena.alloc(MiB)
    other.view[:] = b"b" * MiB
    assert keeper.kept[0].view == b"a" * MiB
    other.release()
    keeper.let_go()
    rig.until(lambda: arena.used_blocks == 0, "the release")


def test_blocks_of_frames_that_come_after_the_peer_has_closed_come_back(rig: Rig) -> None:
    near, far = rig.pair()
    for n in range(10):
        send(rig, near, bytes(MiB), n)
    far.channel.close()
    rig.until_closed(near, far)
    rig.until(lambda: arena_of_client(rig).used_blocks == 0, "the release")


def test_a_closed_channel_still_gives_back(rig: Rig, keeper: Keeper) -> None:
    near, far = rig.pair()
    arena = arena_of_client(rig)
    send(rig, near, bytes(MiB))
    rig.until(lambda: keeper.kept, "the frame")
    far.channel.close()
    for n in range(3):
        send(rig, near, bytes(MiB), n)  # before the goodbye is read
    rig.until_closed(near, far)
    rig.until(lambda: arena.used_blocks == 1, "what nobody reads")
    keeper.let_go()
    rig.until(lambda: arena.used_blocks == 0, "what was held")


def test_a_clogged_channel_that_closes_still_gives_back(rig: Rig) -> None:
    keeper = Keeper()
    near, far = rig.pair(keeper)
    for n in range(2):
        send(rig, far, bytes(MiB), n)
    rig.until(lambda: len(keeper.kept) == 2, "the frames")
    while near.channel.queued_nbytes == 0:
        send(rig, near, bytes(INLINE_NBYTES))
    keeper.kept.pop().release()
    rig.step(rig.client_reactor)
    near.channel.close()
    rig.until_closed(near, far)
    assert isinstance(rig.server, ShmTransport)
    arena = rig.server.arena
    rig.until(lambda: arena.used_blocks == 1, "the release")
    keeper.let_go()
    rig.until(lambda: arena.used_blocks == 0, "the other")


def test_a_frame_that_is_half_sent_is_finished_before_the_goodbye(rig: Rig) -> None:
    near, far = rig.pair()
    numbers = itertools.count()
    while near.channel.queued_nbytes < MiB:
        send(rig, near, bytes(INLINE_NBYTES), next(numbers))
    for _ in range(100):
        rig.step(rig.server_reactor)
        rig.step(rig.client_reactor)
        if near.channel._out_offset:  # type: ignore[attr-defined]
            break
    assert near.channel._out_offset, "the kernel never took a part of a frame"  # type: ignore[attr-defined]
    near.channel.close()
    rig.until_closed(near, far)
    assert far.log.closed == [None]
    assert [header.sequence for header, _ in far.log.frames] == list(range(len(far.log.frames)))


def test_what_is_received_outlives_the_sender(rig: Rig, keeper: Keeper) -> None:
    near, far = rig.pair()
    send(rig, near, b"a" * MiB)
    near.channel.close_when_sent()
    rig.until(lambda: near.log.closed, "the end", rig.client_reactor)
    arena_of_client(rig).close()  # as a process does when it ends: the segment's descriptor is still under way
    rig.until_closed(far)
    assert keeper.kept[0].view == b"a" * MiB
    keeper.let_go()


def test_a_peer_that_dies_gives_all_blocks_back(rig: Rig) -> None:
    near, far = rig.pair()
    for n in range(4):
        send(rig, near, bytes(MiB), n)
    rig.server.close()  # type: ignore[attr-defined]
    rig.until_closed(near)
    assert isinstance(near.log.closed[0], PeerLostError)
    assert arena_of_client(rig).used_blocks == 0
    far.channel.close()
    far.log.closed.append(None)  # its transport was closed under it: nobody tells it


def test_a_peer_that_never_releases_keeps_the_socket_only_for_a_while(
    rig: Rig, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_channel, "LINGER_S", 0.05)
    near, far = rig.pair()
    send(rig, near, bytes(MiB))
    rig.until(lambda: keeper.kept, "the frame")
    near.channel.close()
    rig.until_closed(near, far)
    rig.until(lambda: not rig.server.channels, "giving up")  # type: ignore[attr-defined]
    assert arena_of_client(rig).used_blocks == 1  # lost for good, rather than overwritten
    keeper.let_go()


def test_an_arena_that_is_full_closes_the_channel(rig: Rig) -> None:
    rig.client.arena = Arena(MiB)  # type: ignore[attr-defined]
    near, far = rig.pair()
    send(rig, near, bytes(2 * MiB))
    rig.until_closed(near, far)
    assert type(near.log.closed[0]) is BytePSError
    assert isinstance(far.log.closed[0], PeerLostError)


def test_a_segment_is_mapped_once_and_forgotten_with_its_end(rig: Rig) -> None:
    keepers = [Keeper(), Keeper()]
    rig.accept_with = lambda: keepers[len(rig.accepted)]
    rig.client.arena = arena = Arena(keep_nbytes=0)  # type: ignore[attr-defined]
    arena.on_drop.append(rig.client._on_drop)  # type: ignore[attr-defined]
    ends = [rig.pair() for _ in range(2)]
    buffer = arena.alloc(MiB)
    for near, _ in ends:
        near.channel.send(Header(PUSH, nbytes=MiB), buffer.retain())
    rig.until(lambda: all(keeper.kept for keeper in keepers), "the frames")
    maps = rig.server._maps  # type: ignore[attr-defined]
    assert keepers[0].kept[0].view.obj is keepers[1].kept[0].view.obj
    for keeper in keepers:
        keeper.let_go()
    buffer.release()
    del buffer
    rig.until(lambda: not maps, "unmapping")
    assert arena.nbytes == 0
    arena.close()


def test_a_control_message_is_parsed_from_memory_of_our_own(rig: Rig, keeper: Keeper) -> None:
    near, _ = rig.pair()
    block = arena_of_client(rig).alloc(INLINE_NBYTES + 1)
    view = block.block.view
    view[:2] = b"ok"
    near.channel.send(Header(CONTROL, nbytes=INLINE_NBYTES + 1), block)
    rig.until(lambda: keeper.kept, "the message")
    view[:2] = b"no"
    assert bytes(keeper.kept[0].view[:2]) == b"ok"
    keeper.let_go()


def test_many_segments_and_small_frames_keep_their_order(rig: Rig) -> None:
    rig.client.arena = Arena(1 << 28, segment_nbytes=1 << 16)  # type: ignore[attr-defined]
    near, far = rig.pair()
    expected = [send(rig, near, bytes([n % 251]) * (20_000 if n % 3 else 100), n) for n in range(300)]
    rig.until(lambda: len(far.log.frames) >= 300, "all frames")
    assert far.log.frames == expected
    rig.until(lambda: near.channel.queued_nbytes == 0, "the releases")
    rig.client.arena.close()  # type: ignore[attr-defined]


# ---- strangers


def test_another_user_is_refused_on_both_sides(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_bps.transport import shm

    monkeypatch.setattr(shm, "_credentials", lambda connection: (1, False))
    near = rig.connect()
    rig.until_closed(near)
    assert "another user" in str(near.log.closed[0])
    raw = _Raw(rig.listener.address)
    raw.sock.setblocking(False)
    rig.until(lambda: _has_ended(raw.sock), "the refusal")
    raw.close()
    assert rig.accepted == []


def _has_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_name_that_is_too_long_is_a_config_error(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="too long"):
        rig.server.listen(rig.server_reactor, "x" * 200, lambda channel: Recorder())


def _hostile(rig: Rig, data: bytes, *fds: int) -> Exception | None:
    number = len(rig.accepted)
    raw = _Raw(rig.listener.address)
    raw.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    rig.until(lambda: len(rig.accepted) > number and rig.accepted[number].log.closed, "the stranger's end")
    raw.close()
    assert rig.accepted[number].log.frames == []
    near, far = rig.pair()  # the listener goes on
    send(rig, near, b"still here")
    rig.until(lambda: far.log.frames, "a frame")
    return rig.accepted[number].log.closed[0]


def _memfd(nbytes: int, seal: bool) -> int:
    import fcntl

    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize("kind", ["unsealed", "another size", "a pipe", "two", "without a segment"])
def test_descriptors_that_are_refused(rig: Rig, kind: str) -> None:
    read, write = os.pipe()
    fd = _memfd(8192, seal=kind != "unsealed")
    segment = Header(SEGMENT, sequence=3, total=4096 if kind == "another size" else 8192).pack()
    try:
        if kind == "two":
            error = _hostile(rig, segment, fd, fd)
        elif kind == "a pipe":
            error = _hostile(rig, segment, read)
        elif kind == "without a segment":
            error = _hostile(rig, Header(RELEASE, nbytes=8).pack() + bytes(8), fd)
        else:
            error = _hostile(rig, segment, fd)
    finally:
        for number in (read, write, fd):
            os.close(number)
    assert isinstance(error, ProtocolError)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 8193), (4096, 4097), (8192, 4097), ((1 << 64) - 1, 5000), (1 << 40, 5000)]
)
def test_bytes_outside_of_the_segment_are_refused(rig: Rig, offset: int, nbytes: int) -> None:
    fd = _memfd(8192, seal=True)
    frame = Header(PUSH, nbytes=nbytes).pack() + PLACE.pack(3, offset, 1)
    error = _hostile(rig, Header(SEGMENT, sequence=3, total=8192).pack() + frame, fd)
    os.close(fd)
    assert isinstance(error, ProtocolError)


def test_descriptors_are_not_collected(rig: Rig) -> None:
    raw = _Raw(rig.listener.address)
    fd = array.array("i", [raw.sock.fileno()])
    for _ in range(2):
        raw.sock.sendmsg([Header(FORGET).pack()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd)])
    rig.until(lambda: rig.accepted and rig.accepted[0].log.closed, "the stranger's end")
    raw.close()
    assert isinstance(rig.accepted[0].log.closed[0], ProtocolError)


HOSTILE = {
    "unknown segment": Header(PUSH, nbytes=5000).pack() + PLACE.pack(0, 0, 1),
    "no descriptor": Header(SEGMENT, total=4096).pack(),
    "not lent": Header(RELEASE, nbytes=8).pack() + bytes(8),
    "odd release": Header(RELEASE, nbytes=5).pack() + b"12345",
    "long release": Header(RELEASE, nbytes=8000).pack() + PLACE.pack(0, 0, 1),
    "unknown private frame": Header(GOODBYE + 1).pack(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_hostile_peer_may_send_closes_its_channel_only(rig: Rig, kind: str) -> None:
    assert isinstance(_hostile(rig, HOSTILE[kind]), ProtocolError)


def test_forgetting_a_segment_that_never_was_does_no_harm(rig: Rig) -> None:
    error = _hostile(rig, Header(FORGET, sequence=9).pack() + Header(GOODBYE).pack())
    assert error is None
