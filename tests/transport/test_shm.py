"""The contract through shared memory, and what is its own: hostile peers, memory without names."""

from __future__ import annotations

import array
import itertools
import os
import socket
import struct

import pytest

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import Kit, Rig, send
from torch_bps.errors import ProtocolError
from torch_bps.transport.arena import Arena
from torch_bps.transport.shm import ShmTransport
from torch_bps.wire.header import FIRST_PRIVATE_FRAME, PUSH, Header

_names = itertools.count()
_INLINE = struct.pack("<IxxxxQ", 0xFFFFFFFF, 0)


class _Raw:
    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("\0" + address.removeprefix("shm://"))

    def send(self, data: bytes) -> object:
        return self.sock.sendall(data + _INLINE)

    def close(self) -> None:
        self.sock.close()


class ShmKit(Kit):
    name = "shm"
    clog_nbytes = None

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

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


class TestShmContract(TransportContract):
    kit_class = ShmKit


@pytest.fixture
def rig() -> object:
    rig = Rig(ShmKit())
    yield rig
    rig.close()


def test_a_block_of_the_arena_is_not_copied_and_comes_back(rig: Rig) -> None:
    near, far = rig.pair()
    arena = rig.kit.arenas[1]  # type: ignore[attr-defined]
    block = arena.alloc(1 << 20)
    block.view[:5] = b"hello"
    place = (block.segment, block.offset)
    near.channel.send(Header(PUSH, nbytes=1 << 20), block)
    rig.until(lambda: far.log.frames, "the frame")
    data = far.log.frames[0][1]
    assert data is not None
    assert data[:5] == b"hello"
    rig.until(lambda: not near.channel._lent, "the release")  # type: ignore[attr-defined]
    again = arena.alloc(1 << 20)
    assert (again.segment, again.offset) == place
    again.release()


def _hostile(rig: Rig, data: bytes, fds: list[int]) -> Exception | None:
    number = len(rig.accepted)
    raw = _Raw(rig.listener.address)
    rig.until(lambda: len(rig.accepted) > number, "accept")
    raw.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    rig.until_closed(rig.accepted[number])
    raw.close()
    near, far = rig.pair()  # the listener goes on
    send(rig, near, b"still here")
    rig.until(lambda: far.log.frames, "a frame")
    return rig.accepted[number].log.closed[0]


def test_memory_that_could_shrink_is_refused(rig: Rig) -> None:
    fd = os.memfd_create("evil")
    os.ftruncate(fd, 4096)
    error = _hostile(rig, Header(FIRST_PRIVATE_FRAME).pack() + _INLINE, [fd])
    os.close(fd)
    assert isinstance(error, ProtocolError)
    assert "take away" in str(error)


def test_a_descriptor_that_is_no_memory_is_refused(rig: Rig) -> None:
    read, write = os.pipe()
    error = _hostile(rig, Header(FIRST_PRIVATE_FRAME).pack() + _INLINE, [read])
    os.close(read)
    os.close(write)
    assert isinstance(error, ProtocolError)


@pytest.mark.parametrize(
    "data",
    [
        Header(PUSH, nbytes=100).pack() + struct.pack("<IxxxxQ", 0, 0),
        Header(FIRST_PRIVATE_FRAME).pack() + _INLINE,
        Header(FIRST_PRIVATE_FRAME + 1, nbytes=12).pack() + _INLINE + struct.pack("<IQ", 3, 4),
        Header(FIRST_PRIVATE_FRAME + 1, nbytes=5).pack() + _INLINE + b"12345",
        Header(FIRST_PRIVATE_FRAME + 9).pack() + _INLINE,
    ],
    ids=["unknown segment", "no descriptor", "not lent", "odd release", "unknown private frame"],
)
def test_what_a_hostile_peer_may_send_closes_its_channel_only(rig: Rig, data: bytes) -> None:
    assert isinstance(_hostile(rig, data, []), ProtocolError)


def test_the_arena_has_a_bound() -> None:
    from torch_bps.errors import BytePSError

    arena = Arena(64 << 20)
    block = arena.alloc(1 << 20)
    with pytest.raises(BytePSError, match="BYTEPS_SHARED_MEMORY_BYTES"):
        arena.alloc(65 << 20)
    block.release()
    arena.close()


def test_blocks_do_not_overlap_and_are_aligned() -> None:
    arena = Arena(1 << 30)
    blocks = [arena.alloc(nbytes) for nbytes in (1, 64, 4096, 4097, 70_000, 1 << 20, 3_000_000, 40 << 20)]
    spans = sorted((b.segment, b.offset, b.offset + b.view.nbytes) for b in blocks)
    for (seg, _, end), (next_seg, start, _) in itertools.pairwise(spans):
        assert seg != next_seg or end <= start
    assert all(b.offset % 64 == 0 for b in blocks)
    for block in blocks:
        block.release()
    del block, blocks
    arena.close()
