"""One connection of transport.shm: its stream of small frames, and who still uses which block.

Called by transport.shm, whose docstring has the layout of the stream.

    out   send ── _out (frames that the kernel has not taken) ── socket     _in_flight: blocks until their RELEASE
    in    socket ── _read_ahead ── handler                                  _num_held: buffers that the handler has
    end   close ── GOODBYE ── both counts at zero, or the peer's end, or no RELEASE in LINGER_S ── disconnect
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final

from torch_bps.errors import BytePSError, PeerLostError, ProtocolError
from torch_bps.transport.arena import ArenaBuffer, Segment, forget_view
from torch_bps.transport.base import Buffer, Handler, Reactor, Timer
from torch_bps.transport.memory import copy_bytes
from torch_bps.wire.header import CONTROL, FIRST_PRIVATE_FRAME, HEADER_NBYTES, Header, unpack

if TYPE_CHECKING:
    from torch_bps.transport.shm import ShmTransport

log = logging.getLogger("torch_bps.transport.shm")

INLINE_NBYTES: Final = 4096
LINGER_S: Final = 10.0
SEGMENT, FORGET, RELEASE, GOODBYE = range(FIRST_PRIVATE_FRAME, FIRST_PRIVATE_FRAME + 4)
CUT: Final = 1
PLACE: Final = struct.Struct("<QQQ")
"""segment, offset, token"""
_READ_AHEAD_NBYTES: Final = 64 << 10
_ONE_FD: Final = socket.CMSG_LEN(4)
_READ: Final = select.EPOLLIN
_READ_WRITE: Final = select.EPOLLIN | select.EPOLLOUT

_Frame = tuple[bytes, int, int]
"""bytes, token of the block that they announce (0: none, _KEEP: sent even after close), descriptor or -1"""
_KEEP: Final = -1


class ReceivedBuffer(Buffer):
    """A buffer in the peer's memory; the peer hears of its release."""

    __slots__ = ("token",)

    def __init__(self, view: memoryview, on_free: Callable[[Buffer], None], token: int) -> None:
        super().__init__(view, on_free)
        self.token = token


class ShmChannel:
    """One connection. Thread safety: the reactor's thread only."""

    transport = "shm"

    def __init__(self, owner: ShmTransport, reactor: Reactor, peer: str) -> None:
        self.peer = peer
        self.queued_nbytes = 0
        self.handler: Handler
        self._owner = owner
        self._arena = owner.arena
        self._reactor = reactor
        self._socket: socket.socket | None = None
        self._corked = True  # frames are only queued: until it is open, and while its events are worked on
        self._ending = False
        self.is_closed = False
        # out
        self._out: deque[_Frame] = deque()
        self._out_offset = 0
        self._waits_to_write = False
        self._announced: set[int] = set()
        self._last_token = 0
        self._in_flight: dict[int, ArenaBuffer] = {}
        # in
        self._read_ahead = memoryview(bytearray(_READ_AHEAD_NBYTES))
        self._read_end = 0
        self._descriptors: deque[int] = deque()
        self._segments: dict[int, memoryview] = {}
        self._num_held = 0
        self._released: list[int] = []
        self._release_is_due = False
        self._linger: Timer | None = None

    # ---- transport.base.Channel

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame."""
        if self.is_closed or self._ending:
            if buffer is not None:
                buffer.release()
            return
        nbytes = header.nbytes
        if nbytes > INLINE_NBYTES:
            assert buffer is not None
            self._share(header, buffer)
            return
        data = header.pack()
        if buffer is not None:
            data += buffer.view
            buffer.release()
        self._write(data)

    def close(self, error: Exception | None = None) -> None:
        """Close now."""
        if self.is_closed:
            return
        self.is_closed = True
        self.queued_nbytes = 0
        unsent = list(self._out)
        self._out.clear()
        for number, frame in enumerate(unsent):
            token = frame[1]
            if token == _KEEP or (number == 0 and self._out_offset):  # a frame that has begun must go out whole
                self._out.append(frame)
            elif token:
                self._in_flight.pop(token).release()
        self._reactor.call(self.handler.on_close, self, error)
        if self._socket is not None:
            self._out.append((Header(GOODBYE, flags=CUT if error else 0).pack(), _KEEP, -1))
            if not self._corked:
                self._flush()

    def close_when_sent(self) -> None:
        """Close once the kernel has every frame; the memory stays as long as the peer reads it."""
        self._ending = True
        if not self._out and not self._corked:
            self.close()

    # ---- coming up

    def open(self, connection: socket.socket) -> None:
        """Begin to move frames through `connection`."""
        self._socket = connection
        self._owner.channels.add(self)
        self._reactor.add(connection.fileno(), _READ, self._on_events)
        try:
            self.handler.on_open(self)
        except Exception as error:
            self.close(error)
        self._corked = False
        self._flush()

    # ---- out

    def _share(self, header: Header, buffer: Buffer) -> None:
        if not isinstance(buffer, ArenaBuffer) or buffer.arena is not self._arena:
            source = buffer
            try:
                buffer = self._arena.alloc(header.nbytes)
                copy_bytes(buffer.view, source.view)
            except BytePSError as error:
                self.close(error)
                return
            finally:
                source.release()
        segment, offset, _ = buffer.block
        if segment.number not in self._announced:
            self._announced.add(segment.number)
            self._write(Header(SEGMENT, sequence=segment.number, total=segment.nbytes).pack(), 0, segment.fd)
        self._last_token = token = self._last_token + 1
        self._in_flight[token] = buffer
        self.queued_nbytes += header.nbytes
        self._write(header.pack() + PLACE.pack(segment.number, offset, token), token)

    def forget(self, segment: Segment) -> None:
        """Tell the peer that it need not keep `segment` mapped."""
        if segment.number in self._announced and not self.is_closed:
            self._announced.remove(segment.number)
            self._write(Header(FORGET, sequence=segment.number).pack())

    def _write(self, data: bytes, token: int = 0, descriptor: int = -1) -> None:
        self._out.append((data, token, descriptor))
        if not token:
            self.queued_nbytes += len(data)
        if not self._corked:
            self._flush()

    def _flush(self) -> None:
        """Give the kernel what it takes, several frames at once; end the socket if it has nothing left to do."""
        connection, out, released = self._socket, self._out, self._released
        if connection is None:
            return
        self._release_is_due = False
        while released:
            tokens = array("Q", released[: INLINE_NBYTES // 8])
            del released[: len(tokens)]
            out.append((Header(RELEASE, nbytes=8 * len(tokens)).pack() + tokens.tobytes(), _KEEP, -1))
        try:
            while out:
                self._sent(_send_some(connection, out, self._out_offset))
        except BlockingIOError:
            pass
        except ConnectionError:  # the peer is gone; what it sent before is still to be read, and then its end
            out.clear()
            self._out_offset = 0
            return
        except OSError as error:
            self._fail(error)
            return
        if self._waits_to_write != bool(out):
            self._waits_to_write = bool(out)
            self._reactor.modify(connection.fileno(), _READ_WRITE if out else _READ)
        if self.is_closed:
            self._leave()
        elif self._ending and not out:
            self.close()

    def _sent(self, nbytes: int) -> None:
        out = self._out
        nbytes += self._out_offset
        while out and nbytes >= len(out[0][0]):
            data, token, _ = out.popleft()
            nbytes -= len(data)
            if not token and not self.is_closed:
                self.queued_nbytes -= len(data)
        self._out_offset = nbytes
        if nbytes and out[0][2] >= 0:
            out[0] = (out[0][0], out[0][1], -1)  # the descriptor went with the first byte

    # ---- in

    def _on_events(self, events: int) -> None:
        self._corked = True
        try:
            if events & ~select.EPOLLOUT:
                self._receive()
        except Exception as error:
            self._fail(error)
        self._corked = False
        self._flush()

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._read_ahead[self._read_end :]], _ONE_FD, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionResetError:  # how the kernel says that the peer closed without reading everything
            nbytes, ancillary, flags = 0, [], 0
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                self._descriptors.extend(array("i", data))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("more descriptors came with a frame than belong to it, or no more can be opened here")
        if nbytes == 0:
            self._fail(PeerLostError(f"{self.peer} has ended: its process died or was killed"))
            return
        self._read_end = self._parse(self._read_end + nbytes)
        if len(self._descriptors) > 1:
            raise ProtocolError("descriptors came that belong to no segment")

    def _parse(self, end: int) -> int:
        """Work on the whole frames in the read-ahead's first `end` bytes; return how many bytes are left there."""
        start, data = 0, self._read_ahead
        while end - start >= HEADER_NBYTES:
            header = unpack(data[start : start + HEADER_NBYTES])
            nbytes = header.nbytes
            body_start = start + HEADER_NBYTES
            body_end = body_start + (nbytes if nbytes <= INLINE_NBYTES else PLACE.size)
            if body_end > end:
                break
            start = body_end
            body = data[body_start:body_end]
            if header.frame >= FIRST_PRIVATE_FRAME:
                self._on_private(header, body)
            elif nbytes > INLINE_NBYTES:
                self._on_shared(header, *PLACE.unpack(body))
            elif not self.is_closed:
                self._on_small(header, body)
        left = end - start
        data[:left] = data[start:end]
        return left

    def _on_small(self, header: Header, body: memoryview) -> None:
        try:
            if not header.nbytes:
                self.handler.on_frame(self, header, None)
                return
            buffer = self.handler.on_header(self, header) or self._arena.alloc(header.nbytes)
            if self.is_closed:
                buffer.release()
                return
            buffer.view[:] = body
            self.handler.on_frame(self, header, buffer)
        except Exception as error:
            self.close(error)

    def _on_shared(self, header: Header, segment: int, offset: int, token: int) -> None:
        view = self._segments.get(segment)
        if view is None or offset + header.nbytes > view.nbytes:
            raise ProtocolError(f"{header.nbytes} bytes at {offset} of segment {segment} are not in the peer's memory")
        if self.is_closed:
            self._released.append(token)
            return
        self._num_held += 1
        buffer: Buffer = ReceivedBuffer(view[offset : offset + header.nbytes], self._on_freed, token)
        if header.frame == CONTROL:  # a parser must not see bytes that the peer can still change
            shared, buffer = buffer, self._arena.alloc(header.nbytes)
            copy_bytes(buffer.view, shared.view)
            shared.release()
        try:
            self.handler.on_frame(self, header, buffer)
        except Exception as error:
            self.close(error)

    def _on_freed(self, buffer: Buffer) -> None:
        assert isinstance(buffer, ReceivedBuffer)
        forget_view(buffer)
        self._num_held -= 1
        self._released.append(buffer.token)
        if not self._corked and not self._release_is_due and self._socket is not None:
            self._release_is_due = True
            self._reactor.call(self._flush)

    def _on_private(self, header: Header, body: memoryview) -> None:
        if header.frame == RELEASE and header.nbytes % 8 == 0:
            for token in body.cast("Q"):
                buffer = self._in_flight.pop(token, None)
                if buffer is None:
                    raise ProtocolError(f"buffer {token} was released that was not sent, or twice")
                if not self.is_closed:
                    self.queued_nbytes -= buffer.view.nbytes
                buffer.release()
        elif header.frame == SEGMENT and self._descriptors and header.sequence not in self._segments:
            self._segments[header.sequence] = self._owner.map(self._descriptors.popleft(), header.total)
        elif header.frame == FORGET:
            view = self._segments.pop(header.sequence, None)
            if view is not None:
                view.release()
        elif header.frame == GOODBYE:
            self.close(PeerLostError(f"{self.peer} closed the connection after an error") if header.flags else None)
        else:
            raise ProtocolError(f"frame {header.frame} is wrong here: {header}")

    # ---- the end

    def _fail(self, error: Exception) -> None:
        """Close at once: the peer has ended, or cannot be understood any more."""
        self._corked = True
        self.close(error)
        self.abandon()

    def _leave(self) -> None:
        if not self._out and not self._in_flight and not self._num_held:
            self._disconnect()
        elif self._linger is None and not self._num_held:  # what our handler holds, the peer must not use again
            self._linger = self._reactor.call_later(LINGER_S, self._give_up)

    def _give_up(self) -> None:
        log.warning("%s: %d buffers did not come back and will not be used again", self.peer, len(self._in_flight))
        self._disconnect()

    def abandon(self) -> None:
        """Close the socket and take back every block."""
        self.is_closed = True
        for buffer in self._in_flight.values():
            buffer.release()
        self._in_flight.clear()
        self._disconnect()
        self._owner.channels.discard(self)

    def _disconnect(self) -> None:
        """Close the socket. Blocks that the peer may still read stay out of use, until the transport is closed."""
        connection, self._socket = self._socket, None
        if connection is None:
            return
        self._reactor.remove(connection.fileno())
        connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        for view in self._segments.values():
            view.release()
        self._segments.clear()
        if self._linger is not None:
            self._linger.cancel()
        if not self._in_flight:
            self._owner.channels.discard(self)


def _send_some(connection: socket.socket, out: deque[_Frame], offset: int) -> int:
    """Send from the front of `out`, of whose first entry `offset` bytes are sent; return how many bytes went."""
    data, _, descriptor = out[0]
    if descriptor >= 0:
        return connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))])
    if len(out) > 1:
        several = takewhile(lambda frame: frame[2] < 0, islice(out, 32))
        data = b"".join([frame[0] for frame in several])
    return connection.send(memoryview(data)[offset:] if offset else data)
