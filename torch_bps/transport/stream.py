"""Frames over a connected stream socket: what tcp and shm have in common. Knows nothing of addresses.

    send ──> sendmsg at once ──(kernel full)──> turns ──EPOLLOUT──> queue, some frames ahead ──> sendmsg
    EPOLLIN ──> read-ahead (prefixes, small payloads) ──> frames;  a large payload's rest ──> straight into its buffer

Data frames that wait go by priority (transport.turns); all other kinds keep their place among what was sent before and
after them. A prefix is the 64-byte header and, for shm, a few bytes more.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from itertools import islice
from typing import Final

from torch_bps.errors import BytePSError, PeerLostError, ProtocolError
from torch_bps.transport.base import Buffer, Handler, Memory, Reactor, Timer
from torch_bps.transport.turns import Turns
from torch_bps.wire.header import DONE, FIRST_PRIVATE_FRAME, HEADER_NBYTES, PULL, PUSH, RESULT, Header, unpack

log = logging.getLogger("torch_bps.transport")

READ_AHEAD_NBYTES: Final = 16384
_MAX_SEGMENTS: Final = 64  # in one sendmsg; the kernel takes up to 1024
_AHEAD_NBYTES: Final = 64 << 10  # brought in order for the kernel at once: nothing overtakes it any more
_DATA_FRAMES: Final = frozenset((PUSH, PULL, RESULT, DONE))
_FAIR_NBYTES: Final = 4 << 20  # read from one channel before the others get their turn
_END_TIMEOUT_S: Final = 5.0


class Segment:
    """Bytes that wait to be sent."""

    __slots__ = ("buffer", "view")

    def __init__(self, view: memoryview, buffer: Buffer | None) -> None:
        self.view = view
        self.buffer = buffer


class StreamChannel:
    """transport.base.Channel over a non-blocking stream socket.

    Thread safety: the reactor's thread.

    Args:
        sock: connected, or connecting (then call `opened` when it is).
    """

    transport = ""
    prefix_nbytes = HEADER_NBYTES

    def __init__(self, reactor: Reactor, sock: socket.socket | None, peer: str, pool: Memory) -> None:
        self.peer = peer
        self.queued_nbytes = 0
        self.handler: Handler
        self._reactor = reactor
        self._sock = sock
        self._pool = pool
        self._queue: deque[Segment] = deque()
        """in the order in which they go"""
        self._turns: Turns[tuple[bytes, Buffer | None]] = Turns()
        """frames behind the queue: (prefix, payload)"""
        self._is_open = False
        self._closed = False
        self._ending = False  # close_when_sent was called
        self._said_end = False
        self._watching_out = False
        self._end_timer: Timer | None = None
        self._send_error: OSError | None = None  # the peer takes no more
        self._ahead = memoryview(bytearray(READ_AHEAD_NBYTES))
        self._start = 0
        self._end = 0
        self._header: Header | None = None
        self._payload: Buffer | None = None
        self._filled = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.peer}>"

    # ---- opening

    def opened(self) -> None:
        """The socket is connected: report it, then send what waits."""
        if self._closed:
            return
        assert self._sock is not None
        self._is_open = True
        self._reactor.add(self._sock.fileno(), select.EPOLLIN, self._on_events)
        self._guarded_open()
        if (self._queue or self._turns) and not self._closed:
            self._flush()

    def _guarded_open(self) -> None:
        try:
            self.handler.on_open(self)
        except Exception as error:
            self.close(error)

    # ---- sending

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame (transport.base.Channel)."""
        if self._closed or self._ending or self._send_error is not None:
            if buffer is not None:
                buffer.release()
            return
        self._put(header, header.pack(), buffer)

    def _put(self, header: Header, prefix: bytes, buffer: Buffer | None) -> None:
        """Send a prefix and its payload now, or queue what the kernel does not take."""
        if self._queue or not self._is_open:
            self._queue_frame(header, prefix, buffer)
            return
        assert self._sock is not None
        try:
            sent = self._sock.send(prefix) if buffer is None else self._sock.sendmsg((prefix, buffer.view))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            if buffer is not None:
                buffer.release()
            self._send_failed(error)
            return
        size = len(prefix)
        if sent < size:
            self._append(Segment(memoryview(prefix)[sent:], None))
        if buffer is not None:
            rest = buffer.view[max(0, sent - size) :]
            if rest.nbytes:
                self._append(Segment(rest, buffer))
            else:
                buffer.release()
        if self._queue:
            self._watch_out(True)

    def _queue_frame(self, header: Header, prefix: bytes, buffer: Buffer | None) -> None:
        self.queued_nbytes += len(prefix) + (0 if buffer is None else buffer.view.nbytes)
        if header.frame in _DATA_FRAMES:
            self._turns.put(header.priority, header.nbytes, (prefix, buffer))
            return
        while self._turns:
            self._line_up(*self._turns.take())
        self._line_up(prefix, buffer)

    def _line_up(self, prefix: bytes, buffer: Buffer | None) -> int:
        """Give a frame its place in the queue and return its size."""
        self._queue.append(Segment(memoryview(prefix), None))
        if buffer is None:
            return len(prefix)
        self._queue.append(Segment(buffer.view, buffer))
        return len(prefix) + buffer.view.nbytes

    def _append(self, segment: Segment) -> None:
        self._queue.append(segment)
        self.queued_nbytes += segment.view.nbytes

    def _flush(self) -> None:
        queue, turns = self._queue, self._turns
        assert self._sock is not None
        while queue or turns:
            if not queue:
                nbytes = 0
                while turns and nbytes < _AHEAD_NBYTES:
                    nbytes += self._line_up(*turns.take())
            try:
                sent = self._sock.sendmsg([segment.view for segment in islice(queue, _MAX_SEGMENTS)])
            except BlockingIOError:
                break
            except OSError as error:
                self._send_failed(error)
                return
            self.queued_nbytes -= sent
            while queue and sent >= queue[0].view.nbytes:
                segment = queue.popleft()
                sent -= segment.view.nbytes
                if segment.buffer is not None:
                    segment.buffer.release()
            if sent:
                queue[0].view = queue[0].view[sent:]
        self._watch_out(bool(queue))
        if self._ending and not queue:
            self._say_end()

    def _send_failed(self, error: OSError) -> None:
        """Send no more, but read what the peer said before it went: it may say why."""
        self._send_error = error
        self._drop_queue()
        self._watch_out(False)
        self._reactor.call(self._hear_out, error)

    def _hear_out(self, error: OSError) -> None:
        if not self._closed:
            self._on_events(select.EPOLLIN)
        self.close(self._lost(error))

    def _drop_queue(self) -> None:
        while self._turns:
            self._line_up(*self._turns.take())
        queue, self._queue = self._queue, deque()
        for segment in queue:
            if segment.buffer is not None:
                segment.buffer.release()
        self.queued_nbytes = 0

    def _watch_out(self, wanted: bool) -> None:
        if wanted != self._watching_out and self._sock is not None and self._is_open:
            self._watching_out = wanted
            self._reactor.modify(self._sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    # ---- receiving

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT and not self._closed:
            try:
                self._read()
            except BytePSError as error:
                self.close(error)
            except OSError as error:
                self.close(self._lost(error))
            except Exception as error:  # a handler's
                self.close(error)

    def _read(self) -> None:
        budget = _FAIR_NBYTES
        while budget > 0 and not self._closed:
            payload = self._payload
            target = self._ahead[self._end :] if payload is None else payload.view[self._filled :]
            try:
                got = self._receive(target)
            except BlockingIOError:
                self._sleep_until_due()
                return
            if got == 0:
                self._peer_ended()
                return
            budget -= got
            if self._ending:
                continue  # discard: only the peer's end matters now
            if payload is None:
                self._end += got
                self._parse()
                if got < target.nbytes and self._payload is None:
                    self._sleep_until_due()
                    return  # the kernel has no more: save a system call
            else:
                self._filled += got
                if self._filled == payload.view.nbytes:
                    header, self._header, self._payload = self._header, None, None
                    assert header is not None
                    self._deliver(header, payload)
                elif got < target.nbytes:
                    self._sleep_until_due()
                    return
        if not self._closed:
            self._sleep_until_due()  # there may be more, and less than the last payload waited for

    def _sleep_until_due(self) -> None:
        """Reading pauses: a transport may say how much must be there before the loop wakes for it."""

    def _receive(self, target: memoryview) -> int:
        assert self._sock is not None
        return self._sock.recv_into(target)

    def _parse(self) -> None:
        """Deliver the frames in the read-ahead."""
        ahead, size = self._ahead, self.prefix_nbytes
        while self._end - self._start >= size:
            start = self._start
            header = unpack(ahead[start : start + HEADER_NBYTES])
            self._start = start + size
            nbytes = header.nbytes
            if header.frame >= FIRST_PRIVATE_FRAME:
                self._private_header(header)
            buffer = self._shared_payload(header, ahead[start + HEADER_NBYTES : start + size]) if nbytes else None
            if nbytes and buffer is None:
                buffer = None if header.frame >= FIRST_PRIVATE_FRAME else self.handler.on_header(self, header)
                if self._closed:
                    return
                if buffer is None:
                    buffer = self._pool.alloc(nbytes)
                elif buffer.view.nbytes != nbytes:
                    raise ProtocolError(f"{nbytes} bytes for a buffer of {buffer.view.nbytes}")
                have = min(self._end - self._start, nbytes)
                buffer.view[:have] = ahead[self._start : self._start + have]
                self._start += have
                if have < nbytes:
                    self._header, self._payload, self._filled = header, buffer, have
                    break
            self._deliver(header, buffer)
            if self._closed:
                return
        left = self._end - self._start
        if left and self._start:
            ahead[:left] = bytes(ahead[self._start : self._end])
        self._start, self._end = 0, left

    def _deliver(self, header: Header, buffer: Buffer | None) -> None:
        if header.frame >= FIRST_PRIVATE_FRAME:
            self._private(header, buffer)
        else:
            self.handler.on_frame(self, header, buffer)

    def _private_header(self, header: Header) -> None:
        """A frame of the transport's own begins."""
        raise ProtocolError(f"unexpected frame {header.frame}")

    def _private(self, header: Header, payload: Buffer | None) -> None:
        """A frame of the transport's own is here; releases the payload."""

    def _shared_payload(self, header: Header, trailer: memoryview) -> Buffer | None:
        """Return the payload if it lies in shared memory, None if it follows in the stream."""
        return None

    # ---- the end

    def _peer_ended(self) -> None:
        if self._send_error is not None:
            self.close(self._lost(self._send_error))
        elif self._ending:
            self.close(None)
        elif self._payload is not None or self._end:
            self.close(PeerLostError(f"the connection to {self.peer} ended within a frame"))
        else:
            self.close(None)

    def _lost(self, error: OSError) -> PeerLostError:
        return PeerLostError(f"the connection to {self.peer} broke: {error.strerror or error}")

    def close_when_sent(self) -> None:
        """Close once the peer can read everything (transport.base.Channel)."""
        if self._closed or self._ending:
            return
        self._ending = True
        if self._is_open and not self._queue:
            self._say_end()
        if not self._closed:
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        queued_nbytes = self.queued_nbytes
        self._end_timer = self._reactor.call_later(_END_TIMEOUT_S, lambda: self._end_is_late(queued_nbytes))

    def _end_is_late(self, before_nbytes: int) -> None:
        """Go on waiting only while the peer takes what is queued."""
        if self.queued_nbytes < before_nbytes:
            self._wait_for_end()
        elif self.queued_nbytes:
            left = f"{self.queued_nbytes} bytes are left"
            self.close(PeerLostError(f"{self.peer} took nothing more within {_END_TIMEOUT_S:g} s: {left}"))
        else:
            self.close(None)

    def _say_end(self) -> None:
        """Tell the peer that no more comes, then wait for its own end: closing now could discard what is under way."""
        if self._said_end:
            return
        self._said_end = True
        if self._payload is not None:
            self._payload.release()
            self._payload = None
        assert self._sock is not None
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.close(self._lost(error))
            return
        self._start = self._end = 0

    def close(self, error: Exception | None = None) -> None:
        """Close now (transport.base.Channel)."""
        if self._closed:
            return
        self._closed = True
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._sock is not None:
            self._reactor.remove(self._sock.fileno())
            if error is not None:
                self._cut(self._sock)
            self._sock.close()
        self._drop_queue()
        if self._payload is not None:
            self._payload.release()
            self._payload = None
        self._forget()
        self._reactor.call(self.handler.on_close, self, error)

    def _cut(self, sock: socket.socket) -> None:
        """Make the coming close look like a break to the peer, where that is possible."""

    def _forget(self) -> None:
        """Let go of what the transport itself holds for this channel."""
