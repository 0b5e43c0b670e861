"""Raw TCP: sendmsg straight from the tensor, recv_into straight into the result. Addresses "tcp://host:port"."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch_bps.errors import ConfigError, PeerLostError
from torch_bps.interfaces import Interface
from torch_bps.topology import join_address, split_address
from torch_bps.transport.base import Channel, Handler, Memory, Reactor, Timer
from torch_bps.transport.stream import StreamChannel
from torch_bps.transport.stream_listener import StreamListener

UNSENT_NBYTES: Final = 128 << 10
"""what a socket takes beyond what is on its way: the rest waits in the channel, where what is urgent overtakes it"""
_CONNECT_TIMEOUT_S: Final = 10.0
_WAKE_NBYTES: Final = 256 << 10
"""of a payload: for less the loop does not wake; with more, sockets would hold more memory than they save time"""
_BACKLOG: Final = 1024
_RESET: Final = struct.pack("ii", 1, 0)

_AddressInfo = tuple[Any, Any, int, str, Any]


class TcpTransport:
    """transport.base.Transport over TCP.

    Args:
        pool: memory for payloads that the handler has no place for.
        socket_buffer_nbytes: of each socket, both ways; 0 leaves it to the kernel.
        silence_s: a connection whose peer acknowledges nothing for so long is lost; 0 = never. A heartbeat only notices
            the end of its own interface.
        interfaces: connections are made from their addresses, in turn; none: the route decides.
    """

    name = "tcp"

    def __init__(
        self,
        pool: Memory,
        socket_buffer_nbytes: int = 0,
        silence_s: float = 0.0,
        interfaces: Sequence[Interface] = (),
    ) -> None:
        self._pool = pool
        self._socket_buffer_nbytes = socket_buffer_nbytes
        self._silence_s = silence_s
        self._interfaces = interfaces

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> StreamListener:
        """Listen at "host:port". Raises ConfigError."""
        host, port = _split(where)
        try:
            family, kind, proto, _, address = _resolve(host, port, socket.AI_PASSIVE)[0]
            sock = socket.socket(family, kind, proto)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._size_buffers(sock)
                sock.bind(address)
                sock.listen(_BACKLOG)
                sock.setblocking(False)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {where}: {error.strerror or error}",
                hint="choose another port (0 takes any free one) or an address of this host",
            ) from None
        return _TcpListener(self, reactor, sock, f"tcp://{join_address(host, sock.getsockname()[1])}", accept)

    def connect(self, reactor: Reactor, address: str, handler: Handler, lane: int = 0) -> Channel:
        """Start to connect to "tcp://host:port"."""
        channel = _TcpChannel(reactor, None, address, self._pool)
        channel.handler = handler
        try:
            candidates = _resolve(*_split(address.removeprefix("tcp://")), 0)
        except ConfigError as error:
            channel.close(error)
        except OSError as error:
            why = error.strerror or error
            channel.close(PeerLostError(f"cannot connect to {address}: {why}", hint="check the host name"))
        else:
            interface = self._interfaces[lane % len(self._interfaces)] if self._interfaces else None
            channel.connect(candidates, self._prepare, interface)
        return channel

    def _prepare(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._silence_s * 1000))
        self._size_buffers(sock)

    def _size_buffers(self, sock: socket.socket) -> None:
        if self._socket_buffer_nbytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._socket_buffer_nbytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._socket_buffer_nbytes)


class _TcpListener(StreamListener):
    def __init__(
        self,
        transport: TcpTransport,
        reactor: Reactor,
        sock: socket.socket,
        address: str,
        accept: Callable[[Channel], Handler],
    ) -> None:
        super().__init__(reactor, sock, address)
        self._transport = transport
        self._accept = accept

    def _accepted(self, sock: socket.socket, address: Any) -> None:
        self._transport._prepare(sock)
        channel = _TcpChannel(
            self._reactor, sock, f"tcp://{join_address(address[0], address[1])}", self._transport._pool
        )
        channel.handler = self._accept(channel)
        channel.opened()


class _TcpChannel(StreamChannel):
    transport = "tcp"
    _candidates: list[_AddressInfo]
    _prepare: Callable[[socket.socket], None]
    _interface: Interface | None
    _connect_timer: Timer | None = None
    _wake_nbytes = 1

    def connect(
        self,
        candidates: list[_AddressInfo],
        prepare: Callable[[socket.socket], None],
        interface: Interface | None,
    ) -> None:
        """Try each address in turn, from the address of the interface."""
        self._candidates = candidates
        self._prepare = prepare
        self._interface = interface
        self._try_next(OSError("no address"))

    def _try_next(self, last: OSError) -> None:
        while self._candidates:
            family, kind, proto, _, address = self._candidates.pop(0)
            try:
                self._sock = socket.socket(family, kind, proto)
                self._sock.setblocking(False)
                self._prepare(self._sock)
                self._bind(self._sock, family)
                self._sock.connect(address)
            except BlockingIOError:
                assert self._sock is not None
                self._reactor.add(self._sock.fileno(), select.EPOLLOUT, self._connected)
                self._connect_timer = self._reactor.call_later(_CONNECT_TIMEOUT_S, self._too_late)
                return
            except OSError as error:
                last = error
                self._give_up_socket()
                continue
            self._reactor.call(self.opened)
            return
        self.close(
            PeerLostError(
                f"cannot connect to {self.peer}{self._from()}: {last.strerror or last}",
                hint="see whether it runs, and whether a firewall is between",
            )
        )

    def _bind(self, sock: socket.socket, family: int) -> None:
        if self._interface is None:
            return
        address = self._interface.address_of(family)
        if not address:
            raise OSError(f"{self._interface.name} has no IPv{6 if family == socket.AF_INET6 else 4} address")
        sock.bind((address, 0))

    def _from(self) -> str:
        return f" from {self._interface.name} ({self._interface.address})" if self._interface is not None else ""

    def _connected(self, events: int) -> None:
        assert self._sock is not None
        self._forget()
        self._reactor.remove(self._sock.fileno())
        code = _connect_error(self._sock)
        if code:
            self._give_up_socket()
            self._try_next(OSError(code, os.strerror(code)))
        else:
            self.opened()

    def _too_late(self) -> None:
        assert self._sock is not None
        self._reactor.remove(self._sock.fileno())
        self._give_up_socket()
        self._try_next(OSError(f"no answer within {_CONNECT_TIMEOUT_S:g} s"))

    def _give_up_socket(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _sleep_until_due(self) -> None:
        """Let the kernel gather a payload's bytes. It wakes us sooner when its buffer is full, or the peer ends."""
        payload = self._payload
        wake_nbytes = 1 if payload is None else min(payload.view.nbytes - self._filled, _WAKE_NBYTES)
        if wake_nbytes != self._wake_nbytes and self._sock is not None:
            self._wake_nbytes = wake_nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_nbytes)

    def _cut(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _forget(self) -> None:
        if self._connect_timer is not None:
            self._connect_timer.cancel()


def _connect_error(sock: socket.socket) -> int:
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        return code
    try:
        to_itself = sock.getsockname() == sock.getpeername()
    except OSError as error:  # connected, and reset since
        return error.errno or errno.ECONNRESET
    # Nobody listens, and the kernel chose the port we are asking for as our own: TCP then joins a socket to itself.
    return errno.ECONNREFUSED if to_itself else 0


def _split(where: str) -> tuple[str, int]:
    try:
        return split_address(where)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _resolve(host: str, port: int, flags: int) -> list[_AddressInfo]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
    except ValueError:  # a label over 63 characters, a NUL
        raise OSError(f"{host[:80]!r} is no host name") from None
