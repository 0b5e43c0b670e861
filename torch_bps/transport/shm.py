"""Frames between two processes of one host: signals through a unix socket, payloads in shared memory.

The socket's name is abstract (no file to clean up); its stream, all of it small:

    header                                   a frame without payload
    header | payload                         up to INLINE_NBYTES: the payload comes along
    header | segment, offset, token          more: it lies in the sender's arena (transport.arena)

    private frames
    SEGMENT  sequence: a segment's number, total: its size; its memfd comes with this header's first byte
    FORGET   sequence: a segment that the sender gave up; its number does not come back
    RELEASE  payload: tokens of buffers that the receiver has read
    GOODBYE  flags: 0 orderly, CUT after an error; only RELEASE and FORGET may follow

Sending copies the payload into the sender's arena, or does not copy at all if it is there already. The receiver maps a
segment once and hands out buffers that lie in it: **who writes to such a buffer must be its only reader**.
A block is used again only when its RELEASE has come, or the peer's socket has ended. So that this is true also when a
channel is closed, its socket lingers: it is closed when every buffer has come home both ways. What does not come
within LINGER_S is given up: that block is never used again.

Every byte that arrives is checked, and a peer must run as the same user (or root).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from mmap import mmap
from typing import Final
from weakref import WeakValueDictionary

from torch_bps.errors import ConfigError, PeerLostError
from torch_bps.transport.arena import Arena, Segment, map_received
from torch_bps.transport.base import Channel, Handler, Reactor
from torch_bps.transport.shm_channel import ShmChannel
from torch_bps.transport.stream_listener import StreamListener

log = logging.getLogger("torch_bps.transport.shm")

CONNECT_S: Final = 10.0
_RETRY_S: Final = 0.005


class ShmListener(StreamListener):
    """Accepts connections at an abstract name, of processes of this user and of root."""

    def __init__(self, owner: ShmTransport, reactor: Reactor, name: str, accept: Callable[[Channel], Handler]) -> None:
        self._owner = owner
        self._accept = accept
        address = f"shm://{name}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.bind("\0" + name)
            listening.listen(socket.SOMAXCONN)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"cannot listen at {address}: {error.strerror or error}",
                hint="another process has this name, or it is longer than 107 bytes",
            ) from error
        super().__init__(reactor, listening, address)

    def _accepted(self, connection: socket.socket, address: object) -> None:
        pid, is_ours = _credentials(connection)
        if not is_ours:
            log.warning("%s: refused a process of another user", self.address)
            connection.close()
            return
        channel = ShmChannel(self._owner, self._reactor, f"process {pid}, a client of {self.address}")
        channel.handler = self._accept(channel)
        channel.open(connection)


class ShmTransport:
    """transport.base.Transport for processes of one host.

    Args:
        arena: where payloads are sent from. Closing it closes this transport.
    """

    name = "shm"

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.channels: set[ShmChannel] = set()
        """those that have a socket, or blocks that did not come back"""
        self._maps: WeakValueDictionary[tuple[int, int], mmap] = WeakValueDictionary()
        arena.on_drop.append(self._on_drop)
        arena.on_close.append(self.close)

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> ShmListener:
        """Listen at the name `where`, of at most 107 bytes."""
        return ShmListener(self, reactor, where, accept)

    def connect(self, reactor: Reactor, address: str, handler: Handler, lane: int = 0) -> ShmChannel:
        """Start to connect to "shm://NAME"."""
        channel = ShmChannel(self, reactor, address)
        channel.handler = handler
        reactor.call(_connect, channel, reactor, address.removeprefix("shm://"), time.monotonic() + CONNECT_S)
        return channel

    def close(self) -> None:
        """Close every socket, also those that linger, without telling handlers; the arena is not used after this."""
        for channel in list(self.channels):
            channel.abandon()

    def map(self, descriptor: int, nbytes: int) -> memoryview:
        """Return the memory of a received memfd, mapped once however many channels it comes through; closes it."""
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            mapped = self._maps.get(identity)
            if mapped is None or len(mapped) != nbytes:
                mapped = self._maps[identity] = map_received(descriptor, nbytes)
            return memoryview(mapped)
        finally:
            os.close(descriptor)

    def _on_drop(self, segment: Segment) -> None:
        for channel in list(self.channels):
            channel.forget(segment)


def _connect(channel: ShmChannel, reactor: Reactor, name: str, deadline_s: float) -> None:
    """Connect, or try again soon while the listener has too many waiting."""
    if channel.is_closed:
        return
    why, hint = "", ""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect("\0" + name)
        if _credentials(connection)[1]:
            channel.open(connection)
            return
        why, hint = "another user's process listens there", "run every rank and server of a node as the same user"
    except BlockingIOError:
        if time.monotonic() < deadline_s:
            reactor.call_later(_RETRY_S, lambda: _connect(channel, reactor, name, deadline_s))
        else:
            why, hint = "it accepts nobody", "its process may be frozen or overloaded"
    except OSError as error:
        why = error.strerror or str(error)
        hint = "its process has ended, or is in another network namespace"
    connection.close()
    if why:
        channel.close(PeerLostError(f"cannot connect to {channel.peer}: {why}", hint=hint))


def _credentials(connection: socket.socket) -> tuple[int, bool]:
    """Return the other end's process id, and whether it runs as this user or as root."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid in (0, os.geteuid())
