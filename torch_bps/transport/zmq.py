"""ZeroMQ: the control plane of every server, and a simple data plane. Addresses "zmq://host:port" (TCP inside).

    connecting end: DEALER ──OPEN──> ROUTER (one a listener, a channel for each identity) ──OPENED──> DEALER
    either end ──BYE──> the other

Each message is [header, payload]. ZeroMQ does not tell a ROUTER that a peer has died: the layer above has heartbeats;
the connecting end watches its socket's monitor. The only module that imports zmq.
"""

from __future__ import annotations

import logging
import select
import socket
import uuid
from collections.abc import Callable
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from torch_bps.errors import ConfigError, PeerLostError, ProtocolError
from torch_bps.topology import join_address, split_address
from torch_bps.transport.base import Buffer, Channel, Handler, Reactor, Timer
from torch_bps.wire.header import FIRST_PRIVATE_FRAME, HEADER_NBYTES, Header, unpack

log = logging.getLogger("torch_bps.transport")

_OPEN: Final = Header(FIRST_PRIVATE_FRAME).pack()
_OPENED: Final = Header(FIRST_PRIVATE_FRAME + 1).pack()
_BYE: Final = Header(FIRST_PRIVATE_FRAME + 2).pack()
_CONNECT_TIMEOUT_S: Final = 10.0
_LINGER_MS: Final = 1000
_FAIR_FRAMES: Final = 256
_GONE: Final = (
    zmq.Event.DISCONNECTED | zmq.Event.CLOSED | zmq.Event.CONNECT_RETRIED | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)


class ZmqTransport:
    """transport.base.Transport over ZeroMQ. `close` after the reactor has stopped."""

    name = "zmq"

    def __init__(self) -> None:
        self._context: zmq.Context[Any] | None = None

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> _Router:
        """Listen at "host:port". Raises ConfigError."""
        host, port = _split(where)
        sock = self._socket(zmq.ROUTER)
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            sock.bind("tcp://" + join_address(_numeric(host), port))
        except (zmq.ZMQError, OSError) as error:
            sock.close(0)
            raise ConfigError(
                f"cannot listen at {where}: {error}",
                hint="choose another port (0 takes any free one) or an address of this host",
            ) from None
        bound = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        _, bound_port = split_address(bound.removeprefix("tcp://"))
        return _Router(reactor, sock, f"zmq://{join_address(host, bound_port)}", accept)

    def connect(self, reactor: Reactor, address: str, handler: Handler) -> Channel:
        """Start to connect to "zmq://host:port"."""
        sock = self._socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        return _Dealer(reactor, sock, address, handler)

    def close(self) -> None:
        """End the context; waits up to a second for what lingers."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(_LINGER_MS)

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        """Return a new socket with the options that all have (the place for CURVE)."""
        if self._context is None:
            self._context = zmq.Context()
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops silently at its mark: the layer above bounds what is in flight
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        sock.setsockopt(zmq.IPV6, 1)
        return sock


class _Pump:
    """A zmq socket in the reactor. Its descriptor only tells of edges: drained after every wake-up and send."""

    def __init__(self, reactor: Reactor, sock: zmq.Socket[Any]) -> None:
        self._reactor = reactor
        self._sock = sock
        self._fd = int(sock.getsockopt(zmq.FD))
        self._looking = False
        self._closed = False
        reactor.add(self._fd, select.EPOLLIN, self._on_events)

    def _on_events(self, events: int) -> None:
        for _ in range(_FAIR_FRAMES):
            if self._closed:
                return
            try:
                parts = self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._message(parts)
        self.look()

    def look(self) -> None:
        """Look for messages once more, soon: sending may have eaten the edge."""
        if not self._looking and not self._closed:
            self._looking = True
            self._reactor.call(self._look)

    def _look(self) -> None:
        self._looking = False
        if not self._closed:
            self._on_events(select.EPOLLIN)

    def _message(self, parts: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            self._reactor.remove(self._fd)
            self._sock.close()


def _dispatch(channel: Channel, handler: Handler, parts: list[zmq.Frame]) -> bool:
    """Give one message to the handler; returns False for a goodbye. Raises for what is malformed."""
    if len(parts) != 2 or len(parts[0].buffer) != HEADER_NBYTES:
        raise ProtocolError(f"{channel.peer} sent {len(parts)} parts, the first of {len(parts[0].buffer)} bytes")
    header = unpack(parts[0].buffer)
    if header.frame >= FIRST_PRIVATE_FRAME:
        if parts[0].bytes == _BYE:
            return False
        raise ProtocolError(f"unexpected frame {header.frame}")
    payload = parts[1].buffer
    if payload.nbytes != header.nbytes:
        raise ProtocolError(f"{channel.peer} sent {payload.nbytes} bytes and said {header.nbytes}")
    handler.on_frame(channel, header, Buffer(payload) if header.nbytes else None)
    return True


class _Dealer(_Pump):
    """The connecting end: a channel with a socket of its own."""

    transport = "zmq"

    def __init__(self, reactor: Reactor, sock: zmq.Socket[Any], address: str, handler: Handler) -> None:
        super().__init__(reactor, sock)
        self.peer = address
        self.queued_nbytes = 0
        self.handler = handler
        self._is_open = False
        self._monitor = sock.get_monitor_socket(int(_GONE))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        reactor.add(self._monitor_fd, select.EPOLLIN, self._on_monitor)
        self._timer: Timer = reactor.call_later(_CONNECT_TIMEOUT_S, self._too_late)
        try:
            host, port = _split(address.removeprefix("zmq://"))
            sock.connect(f"tcp://{join_address(host, port)}")
        except (zmq.ZMQError, ConfigError) as error:
            self.close(PeerLostError(f"cannot connect to {address}: {error}"))
            return
        sock.send_multipart((_OPEN, b""))
        self.look()
        reactor.call(self._on_monitor, select.EPOLLIN)

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame (transport.base.Channel)."""
        if self._closed:
            if buffer is not None:
                buffer.release()
            return
        self._sock.send_multipart((header.pack(), b"" if buffer is None else buffer.view))
        if buffer is not None:
            buffer.release()
        self.look()

    def _message(self, parts: list[zmq.Frame]) -> None:
        try:
            if not self._is_open:
                unpack(parts[0].buffer)  # another version shows here
                if parts[0].bytes != _OPENED:
                    raise ProtocolError(f"{self.peer} did not open the connection")
                self._is_open = True
                self._timer.cancel()
                self.handler.on_open(self)
            elif not _dispatch(self, self.handler, parts):
                self.close(None)
        except Exception as error:
            self.close(error)

    def _on_monitor(self, events: int) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] & _GONE:
                self._on_events(select.EPOLLIN)  # what came before the end
                what = "the connection to" if self._is_open else "cannot connect to"
                why = "it ended" if self._is_open else "connection refused"
                self.close(PeerLostError(f"{what} {self.peer}: {why}", hint="see whether it runs"))

    def _too_late(self) -> None:
        self.close(PeerLostError(f"cannot connect to {self.peer}: no answer within {_CONNECT_TIMEOUT_S:g} s"))

    def close_when_sent(self) -> None:
        """Close; what was sent lingers until it is out."""
        self._end(None, _LINGER_MS)

    def close(self, error: Exception | None = None) -> None:
        """Close now (transport.base.Channel)."""
        self._end(error, _LINGER_MS if self._is_open else 0)

    def _end(self, error: Exception | None, linger_ms: int) -> None:
        if self._closed:
            return
        self._timer.cancel()
        self._reactor.remove(self._monitor_fd)
        self._sock.disable_monitor()
        self._monitor.close(0)
        try:
            self._sock.send_multipart((_BYE, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # not connected: nobody to say it to
        self._sock.setsockopt(zmq.LINGER, linger_ms)
        self._stop()
        self._reactor.call(self.handler.on_close, self, error)


class _Router(_Pump):
    """The listening end: one socket, a channel for each peer. It outlives its `close` until its channels are closed."""

    def __init__(
        self, reactor: Reactor, sock: zmq.Socket[Any], address: str, accept: Callable[[Channel], Handler]
    ) -> None:
        super().__init__(reactor, sock)
        self.address = address
        self._accept = accept
        self._channels: dict[bytes, _RouterChannel] = {}
        self._accepting = True
        self.look()

    def _message(self, parts: list[zmq.Frame]) -> None:
        identity = parts[0].bytes
        channel = self._channels.get(identity)
        if channel is None:
            self._first(identity, parts[1:])
            return
        try:
            if not _dispatch(channel, channel.handler, parts[1:]):
                channel.end(None, say=False)
        except Exception as error:
            channel.close(error)

    def _first(self, identity: bytes, parts: list[zmq.Frame]) -> None:
        """Somebody new: answer with our own header first, so that a peer of another version learns of it."""
        if not self._accepting or len(parts) != 2 or parts[0].bytes[:2] != _OPEN[:2]:
            return
        if not self.put(identity, _OPENED, b"") or parts[0].bytes != _OPEN:
            return
        channel = self._channels[identity] = _RouterChannel(self, self._reactor, identity)
        try:
            channel.handler = self._accept(channel)
        except Exception:
            log.exception("%s: accepting a connection failed", self.address)
            del self._channels[identity]
            self.put(identity, _BYE, b"")
            return
        try:
            channel.handler.on_open(channel)
        except Exception as error:
            channel.close(error)

    def put(self, identity: bytes, header: bytes, payload: bytes | memoryview) -> bool:
        """Send to one peer; returns whether it is there."""
        try:
            self._sock.send_multipart((identity, header, payload), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self.look()
        return True

    def forget(self, identity: bytes) -> None:
        """A channel is closed."""
        self._channels.pop(identity, None)
        if not self._accepting and not self._channels:
            self._stop()

    def close(self) -> None:
        """Accept no more."""
        if self._accepting:
            self._accepting = False
            self._sock.unbind(self._sock.getsockopt_string(zmq.LAST_ENDPOINT))
        if not self._channels:
            self._stop()


class _RouterChannel:
    """One peer of a listener."""

    transport = "zmq"

    def __init__(self, router: _Router, reactor: Reactor, identity: bytes) -> None:
        self.peer = f"{router.address} peer {identity[:8]!r}"
        self.queued_nbytes = 0
        self.handler: Handler
        self._router = router
        self._reactor = reactor
        self._identity = identity
        self._closed = False

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame (transport.base.Channel)."""
        there = not self._closed and self._router.put(
            self._identity, header.pack(), b"" if buffer is None else buffer.view
        )
        if buffer is not None:
            buffer.release()
        if not there:
            self.end(PeerLostError(f"{self.peer} has gone"), say=False)

    def close_when_sent(self) -> None:
        """Close; what was sent lingers until it is out."""
        self.end(None, say=True)

    def close(self, error: Exception | None = None) -> None:
        """Close now (transport.base.Channel)."""
        self.end(error, say=True)

    def end(self, error: Exception | None, say: bool) -> None:
        """Close, telling the peer or not."""
        if self._closed:
            return
        self._closed = True
        if say:
            self._router.put(self._identity, _BYE, b"")
        self._router.forget(self._identity)
        self._reactor.call(self.handler.on_close, self, error)


def _split(where: str) -> tuple[str, int]:
    try:
        return split_address(where)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _numeric(host: str) -> str:
    """Return an address to bind: ZeroMQ takes an interface's name or number there, no host name."""
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
