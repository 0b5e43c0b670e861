"""ZeroMQ: the control plane of every server, and a simple data plane. Addresses "zmq://host:port" (TCP inside).

    connecting end: DEALER ──OPEN──> ROUTER (one a listener, a channel for each identity) ──OPENED──> DEALER
    either end ──BYE──> the other

Each message is [header, payload]. ZeroMQ tells nobody that a peer has died. The connecting end learns it from its
socket's monitor; so does the listening end, which then says NOP to every peer to see who it was. What a peer had sent
before is delivered first. Only this module and zmq_pump import zmq.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable
from typing import Any, Final

import zmq

from torch_bps.errors import ConfigError, PeerLostError, ProtocolError
from torch_bps.topology import join_address, split_address
from torch_bps.transport.base import Buffer, Channel, Handler, Reactor, Timer
from torch_bps.transport.zmq_pump import GONE, Pump
from torch_bps.wire.header import FIRST_PRIVATE_FRAME, HEADER_NBYTES, MAX_PAYLOAD_NBYTES, Header, unpack

log = logging.getLogger("torch_bps.transport")

_OPEN: Final = Header(FIRST_PRIVATE_FRAME).pack()
_OPENED: Final = Header(FIRST_PRIVATE_FRAME + 1).pack()
_BYE: Final = Header(FIRST_PRIVATE_FRAME + 2).pack()
_NOP: Final = Header(FIRST_PRIVATE_FRAME + 3).pack()
_CONNECT_TIMEOUT_S: Final = 10.0
_LINGER_MS: Final = 1000
_GOODBYE_LINGER_MS: Final = 100
_PROBES_S: Final = (0.05, 1.0)
"""when to look who has gone after a connection ended: the news may be ahead of the fact"""


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
            sock.bind("tcp://" + join_address(_resolve(host, port)[0], port))
        except (zmq.ZMQError, OSError) as error:
            sock.close(0)
            raise ConfigError(
                f"cannot listen at {where}: {error}",
                hint="choose another port (0 takes any free one) or an address of this host",
            ) from None
        bound = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        _, bound_port = split_address(bound.removeprefix("tcp://"))
        return _Router(reactor, sock, f"zmq://{join_address(host, bound_port)}", accept)

    def connect(self, reactor: Reactor, address: str, handler: Handler, lane: int = 0) -> Channel:
        """Start to connect to "zmq://host:port"."""
        return _Dealer(reactor, self._dealer, address, handler)

    def close(self) -> None:
        """End the context; waits up to a second for what lingers."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(_LINGER_MS)

    def _dealer(self) -> zmq.Socket[Any]:
        sock = self._socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        sock.setsockopt(zmq.RECONNECT_IVL, -1)  # a connection that has ended is over; nothing lingers for a new one
        return sock

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        """Return a new socket with the options that all have (the place for CURVE)."""
        if self._context is None:
            self._context = zmq.Context()
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops silently at its mark: the layer above bounds what is in flight
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_NBYTES)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        sock.setsockopt(zmq.IPV6, 1)
        return sock


def _dispatch(channel: Channel, handler: Handler, parts: list[zmq.Frame]) -> bool:
    """Give one message to the handler; returns False for a goodbye. Raises for what is malformed."""
    if len(parts) != 2 or len(parts[0].buffer) != HEADER_NBYTES:
        raise ProtocolError(
            f"{channel.peer} sent a message of parts of {[len(part.buffer) for part in parts[:8]]} bytes"
        )
    header = unpack(parts[0].buffer)
    if header.frame >= FIRST_PRIVATE_FRAME:
        if parts[0].bytes not in (_BYE, _NOP):
            raise ProtocolError(f"{channel.peer} sent an unexpected frame {header.frame}")
        return parts[0].bytes == _NOP
    payload = parts[1].buffer
    if payload.nbytes != header.nbytes:
        raise ProtocolError(f"{channel.peer} sent {payload.nbytes} bytes and said {header.nbytes}")
    handler.on_frame(channel, header, Buffer(payload) if header.nbytes else None)
    return True


class _Dealer(Pump):
    """The connecting end: a channel with a socket of its own (one after the other while names have more addresses)."""

    transport = "zmq"

    def __init__(self, reactor: Reactor, make: Callable[[], zmq.Socket[Any]], address: str, handler: Handler) -> None:
        super().__init__(reactor)
        self.peer = address
        self.queued_nbytes = 0
        self.handler = handler
        self._make = make
        self._is_open = False
        self._gone = ""
        """why the other end has gone"""
        self._early: list[tuple[bytes, bytes]] = []
        """what was sent before the connection stood, while there are addresses left to try"""
        self._port = 0
        self._candidates: list[str] = []
        self._timer: Timer = reactor.call_later(_CONNECT_TIMEOUT_S, self._too_late)
        self._use(make(), sum(GONE))
        try:
            host, self._port = _split(address.removeprefix("zmq://"))
            self._candidates = _resolve(host, self._port)
            self._connect()
        except (ConfigError, OSError) as error:
            self._cannot(getattr(error, "strerror", "") or str(error))

    def _connect(self) -> None:
        self._sock.connect(f"tcp://{join_address(self._candidates.pop(0), self._port)}")
        self._put(_OPEN, b"")
        for message in self._early:
            self._put(*message)

    def _cannot(self, why: str) -> None:
        """Try the next address, if there is one."""
        if self._candidates:
            self._drop(0)
            self._gone = ""
            self._use(self._make(), sum(GONE))
            self._connect()
            return
        hint = "see whether it runs, whether a firewall is between, and whether that is the port of its line 'ready at'"
        self.close(PeerLostError(f"cannot connect to {self.peer}: {why}", hint=hint))

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame (transport.base.Channel)."""
        if not self._closed:
            packed = header.pack()
            self._put(packed, b"" if buffer is None else buffer.view)
            if self._candidates and not self._is_open:
                self._early.append((packed, b"" if buffer is None else bytes(buffer.view)))
        if buffer is not None:
            buffer.release()

    def _put(self, header: bytes, payload: bytes | memoryview) -> None:
        try:
            self._sock.send_multipart((header, payload), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._gone = self._gone or "it closed the connection"
        self.look()

    def _message(self, parts: list[zmq.Frame]) -> None:
        try:
            if self._is_open:
                if not _dispatch(self, self.handler, parts):
                    self._end(None, 0)
                return
            if len(parts[0].buffer) != HEADER_NBYTES:
                raise ProtocolError(f"cannot connect to {self.peer}: {GONE[zmq.Event.HANDSHAKE_FAILED_PROTOCOL]}")
            unpack(parts[0].buffer)  # another version shows here
            if parts[0].bytes != _OPENED:
                raise PeerLostError(f"cannot connect to {self.peer}: it accepts no connections", hint="is it ending?")
            self._is_open = True
            self._early.clear()
            self._timer.cancel()
            self.handler.on_open(self)
        except Exception as error:
            self.close(error)

    def _ended(self, event: int) -> None:
        self._gone = GONE[event]
        self.look()

    def _drained(self) -> None:
        if self._gone and self._is_open:
            self.close(PeerLostError(f"the connection to {self.peer} has ended", hint="see whether it still runs"))
        elif self._gone:
            self._cannot(self._gone)

    def _too_late(self) -> None:
        self._timer = self._reactor.call_later(_CONNECT_TIMEOUT_S, self._too_late)
        self._cannot(f"no answer within {_CONNECT_TIMEOUT_S:g} s")

    def close_when_sent(self) -> None:
        """Close; what was sent lingers until it is out."""
        self._end(None, _LINGER_MS)

    def close(self, error: Exception | None = None) -> None:
        """Close now (transport.base.Channel)."""
        self._end(error, _GOODBYE_LINGER_MS if self._is_open else 0)

    def _end(self, error: Exception | None, linger_ms: int) -> None:
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        try:
            self._sock.send_multipart((_BYE, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # not connected: nobody to say it to
        self._drop(linger_ms)
        self._reactor.call(self.handler.on_close, self, error)


class _Router(Pump):
    """The listening end: one socket, a channel for each peer. It outlives its `close` until its channels are closed."""

    def __init__(
        self, reactor: Reactor, sock: zmq.Socket[Any], address: str, accept: Callable[[Channel], Handler]
    ) -> None:
        super().__init__(reactor)
        self.address = address
        self._accept = accept
        self._channels: dict[bytes, _RouterChannel] = {}
        self._accepting = True
        self._suspicious = False
        self._probe: Timer | None = None
        self._use(sock, int(zmq.Event.DISCONNECTED))
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
        opening = parts[0].bytes if len(parts) == 2 else b""
        if opening[:2] != _OPEN[:2] or opening[3:4] != _OPEN[3:4]:
            return
        if not self._accepting:
            self.put(identity, _BYE, b"")
            return
        self.put(identity, _OPENED, b"")  # where it has gone already, what it sent before is still here to be read
        if opening != _OPEN:
            log.warning("%s: a peer of wire version %d is refused", self.address, opening[2])
            return
        channel = _RouterChannel(self, self._reactor, identity)
        try:
            channel.handler = self._accept(channel)
        except Exception:
            log.exception("%s: accepting a connection failed", self.address)
            self.put(identity, _BYE, b"")
            return
        self._channels[identity] = channel
        try:
            channel.handler.on_open(channel)
        except Exception as error:
            channel.close(error)

    def put(self, identity: bytes, header: bytes, payload: bytes | memoryview) -> None:
        """Send to one peer."""
        if not self._send(identity, header, payload):
            self._suspicious = True
        self.look()

    def _send(self, identity: bytes, header: bytes, payload: bytes | memoryview) -> bool:
        try:
            self._sock.send_multipart((identity, header, payload), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _ended(self, event: int) -> None:
        """Some peer's connection has ended: look soon whose, and once more in case that was too soon."""
        if self._probe is not None:
            self._probe.cancel()
        soon_s, later_s = _PROBES_S

        def again() -> None:
            self._suspect()
            self._probe = self._reactor.call_later(later_s, self._suspect)

        self._probe = self._reactor.call_later(soon_s, again)

    def _suspect(self) -> None:
        self._suspicious = True
        self.look()

    def _drained(self) -> None:
        if not self._suspicious:
            return
        self._suspicious = False
        for identity, channel in list(self._channels.items()):
            if not self._closed and not self._send(identity, _NOP, b""):
                channel.end(PeerLostError(f"{channel.peer} has gone"), say=False)

    def forget(self, identity: bytes) -> None:
        """A channel is closed."""
        self._channels.pop(identity, None)
        if not self._accepting and not self._channels:
            self._stop()

    def close(self) -> None:
        """Accept no more. The socket stays bound: `unbind` would cut the channels that stand."""
        self._accepting = False
        if not self._channels:
            self._stop()

    def _stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
        self._drop(_LINGER_MS)


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
        if not self._closed:
            self._router.put(self._identity, header.pack(), b"" if buffer is None else buffer.view)
        if buffer is not None:
            buffer.release()

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


def _resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host: ZeroMQ binds to no host name, and connects to one address of several."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
