"""Shared memory between processes of one host. Addresses "shm://name", an abstract unix socket.

    sender: payload into its arena ──> header, segment, offset through the socket ──> receiver: a view of that memory
    sender: block free again <── RELEASE <── receiver: buffer released

Headers, small payloads and wake-ups go through the socket, which also tells when the peer is gone; a peer maps each
segment once, when its descriptor comes along (SCM_RIGHTS). Both ends must belong to the same user.

A prefix is the header, then segment (uint32, INLINE: the payload follows in the socket), padding, offset (uint64).
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from torch_bps.errors import BytePSError, ConfigError, PeerLostError, ProtocolError
from torch_bps.transport.arena import SEALS, Arena, ArenaBuffer, forget_view
from torch_bps.transport.base import Buffer, Channel, Handler, Reactor
from torch_bps.transport.memory import Pool, copy_bytes
from torch_bps.transport.stream import Segment, StreamChannel, StreamListener
from torch_bps.wire.header import FIRST_PRIVATE_FRAME, HEADER_NBYTES, Header

_TRAILER: Final = struct.Struct("<IxxxxQ")
_INLINE: Final = 0xFFFFFFFF
_INLINE_NBYTES: Final = 4096
"""payloads up to this go through the socket: copying them twice is cheaper than a release frame"""
_NO_PLACE: Final = _TRAILER.pack(_INLINE, 0)
_PLACE: Final = struct.Struct("<IQ")
_SEGMENT: Final = FIRST_PRIVATE_FRAME
_RELEASE: Final = FIRST_PRIVATE_FRAME + 1
_RELEASE_WITHIN_S: Final = 0.001
_MAX_RELEASES: Final = 512
_CREDENTIALS: Final = struct.Struct("iII")
_MAX_FDS: Final = 16
_ANCILLARY_NBYTES: Final = socket.CMSG_SPACE(_MAX_FDS * 4)


class ShmTransport:
    """transport.base.Transport through shared memory.

    Args:
        arena: of this process; what it sends is put there. Buffers that lie there already are not copied.
    """

    name = "shm"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pool = Pool()

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> StreamListener:
        """Listen under a name that is unique on this host. Raises ConfigError if it is taken."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{where}")
            sock.listen(1024)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"cannot listen at shm://{where}: {error.strerror or error}", hint="choose another name"
            ) from None
        return _ShmListener(self, reactor, sock, f"shm://{where}", accept)

    def connect(self, reactor: Reactor, address: str, handler: Handler) -> Channel:
        """Connect to "shm://name"."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        channel = ShmChannel(reactor, sock, address, self._arena, self._pool)
        channel.handler = handler
        try:
            sock.connect("\0" + address.removeprefix("shm://"))
            _check_owner(sock, address)
        except OSError as error:
            channel.close(
                PeerLostError(f"cannot connect to {address}: {error.strerror or error}", hint="see whether it runs")
            )
        except ProtocolError as refused:
            channel.close(refused)
        else:
            reactor.call(channel.opened)
        return channel


class _ShmListener(StreamListener):
    def __init__(
        self,
        transport: ShmTransport,
        reactor: Reactor,
        sock: socket.socket,
        address: str,
        accept: Callable[[Channel], Handler],
    ) -> None:
        super().__init__(reactor, sock, address)
        self._transport = transport
        self._accept = accept

    def _accepted(self, sock: socket.socket, address: Any) -> None:
        channel = ShmChannel(self._reactor, sock, self.address, self._transport._arena, self._transport._pool)
        channel.handler = self._accept(channel)
        try:
            _check_owner(sock, self.address)
        except ProtocolError as refused:
            channel.close(refused)
            return
        channel.opened()


def _check_owner(sock: socket.socket, address: str) -> None:
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    if uid != os.geteuid() and uid != 0:
        raise ProtocolError(f"process {pid} of user {uid} is at the other end of {address}, not of {os.geteuid()}")


class PeerBuffer(Buffer):
    """A payload in the peer's memory."""

    __slots__ = ("offset", "segment")

    def __init__(self, view: memoryview, on_free: Callable[[Buffer], None], segment: int, offset: int) -> None:
        super().__init__(view, on_free)
        self.segment = segment
        self.offset = offset


class ShmChannel(StreamChannel):
    """One connection; see the module."""

    transport = "shm"
    prefix_nbytes = HEADER_NBYTES + _TRAILER.size

    def __init__(self, reactor: Reactor, sock: socket.socket, peer: str, arena: Arena, pool: Pool) -> None:
        super().__init__(reactor, sock, peer, pool)
        self._arena = arena
        self._lent: dict[tuple[int, int], list[ArenaBuffer]] = {}
        """what the peer reads"""
        self._shown: set[int] = set()
        """our segments that the peer has"""
        self._mapped: list[memoryview] = []
        """the peer's segments"""
        self._fds: deque[int] = deque()
        self._owed: list[tuple[int, int]] = []
        """blocks of the peer that we no longer read"""
        self._release_due = False

    # ---- sending

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame (transport.base.Channel)."""
        if self._closed or self._ending:
            if buffer is not None:
                buffer.release()
            return
        if self._owed:
            self._send_owed()
        if buffer is None:
            self._put(header.pack() + _NO_PLACE, None)
            return
        is_ours = isinstance(buffer, ArenaBuffer) and buffer.arena is self._arena
        if buffer.view.nbytes <= _INLINE_NBYTES and not is_ours:
            self._put(header.pack() + _NO_PLACE, buffer)
            return
        if is_ours:
            assert isinstance(buffer, ArenaBuffer)
            block = buffer
        else:
            try:
                block = self._arena.alloc(buffer.view.nbytes)
            except BytePSError as error:
                buffer.release()
                self.close(error)
                return
            copy_bytes(block.view, buffer.view)
            buffer.release()
        segment, offset = block.segment, block.offset
        if segment not in self._shown:
            self._show(segment)
        self._lent.setdefault((segment, offset), []).append(block)
        self._put(header.pack() + _TRAILER.pack(segment, offset), None)

    def _show(self, segment: int) -> None:
        """Hand the descriptors of all segments up to this one to the peer, in order: their number is their place."""
        for number in range(len(self._shown), segment + 1):
            self._shown.add(number)
            prefix = Header(_SEGMENT, block=number).pack() + _NO_PLACE
            self._append(Segment(memoryview(prefix), None, self._arena.fds[number]))
        if self._is_open:
            self._flush()

    def _sendmsg(self, views: list[memoryview], fd: int) -> int:
        assert self._sock is not None
        if fd < 0:
            return self._sock.sendmsg(views)
        return self._sock.sendmsg(views, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    # ---- receiving

    def _receive(self, target: memoryview) -> int:
        assert self._sock is not None
        got, ancillary, flags, _ = self._sock.recvmsg_into([target], _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"{self.peer} sent more descriptors than it may")
        return got

    def _private_header(self, header: Header) -> None:
        if header.frame not in (_SEGMENT, _RELEASE) or header.nbytes > _MAX_RELEASES * _PLACE.size:
            raise ProtocolError(f"unexpected frame {header.frame} with {header.nbytes} bytes from {self.peer}")

    def _private(self, header: Header, payload: Buffer | None) -> None:
        if header.frame == _SEGMENT:
            if payload is not None:
                payload.release()
            self._map(header.block)
            return
        if payload is None or payload.view.nbytes % _PLACE.size:
            raise ProtocolError(f"a malformed release from {self.peer}")
        try:
            for place in _PLACE.iter_unpack(payload.view):
                blocks = self._lent.get(place)
                if not blocks:
                    raise ProtocolError(f"{self.peer} released memory that it was not lent")
                block = blocks.pop()
                if not blocks:
                    del self._lent[place]
                block.release()
        finally:
            payload.release()

    def _map(self, number: int) -> None:
        if not self._fds or number != len(self._mapped):
            raise ProtocolError(f"{self.peer} announced segment {number} without its descriptor")
        fd = self._fds.popleft()
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ProtocolError(f"{self.peer} offers memory that it could take away")
            mapped = mmap.mmap(fd, 0)
        except OSError as error:
            raise ProtocolError(f"{self.peer} sent a descriptor that is no shared memory: {error}") from None
        finally:
            os.close(fd)
        self._mapped.append(memoryview(mapped))

    def _shared_payload(self, header: Header, trailer: memoryview) -> Buffer | None:
        segment, offset = _TRAILER.unpack(trailer)
        if segment == _INLINE:
            return None
        if segment >= len(self._mapped) or offset + header.nbytes > self._mapped[segment].nbytes:
            raise ProtocolError(f"{self.peer} points outside of its memory")
        return PeerBuffer(self._mapped[segment][offset : offset + header.nbytes], self._give_back, segment, offset)

    def _give_back(self, buffer: Buffer) -> None:
        assert isinstance(buffer, PeerBuffer)
        forget_view(buffer)
        if self._closed or self._ending:
            return
        self._owed.append((buffer.segment, buffer.offset))
        if len(self._owed) >= _MAX_RELEASES:
            self._send_owed()
        elif not self._release_due:
            self._release_due = True  # unless a frame goes that way sooner and takes it along
            self._reactor.call_later(_RELEASE_WITHIN_S, self._release_now)

    def _release_now(self) -> None:
        self._release_due = False
        if self._owed and not self._closed and not self._ending:
            self._send_owed()

    def _send_owed(self) -> None:
        owed, self._owed = self._owed, []
        payload = b"".join([_PLACE.pack(*place) for place in owed])
        self._put(Header(_RELEASE, nbytes=len(payload)).pack() + _NO_PLACE, Buffer(memoryview(payload)))

    def _forget(self) -> None:
        lent, self._lent = self._lent, {}
        for blocks in lent.values():
            for block in blocks:
                block.release()
        self._mapped = []
        self._owed = []
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
