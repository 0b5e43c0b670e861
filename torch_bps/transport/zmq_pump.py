"""Joins a ZeroMQ socket and its monitor to the reactor. Called by transport.zmq only."""

from __future__ import annotations

import select
import struct
from typing import Any, Final

import zmq

from torch_bps.transport.base import Reactor

_FAIR_FRAMES: Final = 256
_NEWS: Final = struct.Struct("=Hi")  # event, value; zmq.utils.monitor reads the same, but imports asyncio for it
GONE: Final = {
    int(zmq.Event.DISCONNECTED): "it closed the connection",
    int(zmq.Event.CLOSED): "connection refused",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "what listens there is no torch_bps server's control port",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "what listens there is no torch_bps server's control port",
}
"""what a connecting socket's monitor may tell -> what that means"""


class Pump:
    """A zmq socket in the reactor. Its descriptor only tells of edges: drained after every wake-up and send."""

    _sock: zmq.Socket[Any]

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._looking = False
        self._closed = False

    def _use(self, sock: zmq.Socket[Any], events: int) -> None:
        """Take messages from `sock`, and from its monitor news of the given kinds."""
        self._sock = sock
        self._fd = int(sock.getsockopt(zmq.FD))
        self._monitor = sock.get_monitor_socket(events)
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._reactor.add(self._fd, select.EPOLLIN, self._on_events)
        self._reactor.add(self._monitor_fd, select.EPOLLIN, self._on_monitor)
        self._reactor.call(self._on_monitor, select.EPOLLIN)

    def _drop(self, linger_ms: int) -> None:
        """Let go of the socket."""
        self._reactor.remove(self._monitor_fd)
        self._sock.disable_monitor()
        self._monitor.close(0)
        self._reactor.remove(self._fd)
        self._sock.close(linger_ms)

    def _on_events(self, events: int) -> None:
        for _ in range(_FAIR_FRAMES):
            if self._closed:
                return
            try:
                parts = self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._drained()
                return
            self._message(parts)
        self.look()

    def _on_monitor(self, events: int) -> None:
        while not self._closed:
            try:
                news, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._ended(_NEWS.unpack(news)[0])

    def look(self) -> None:
        """Look for messages once more, soon: sending may have eaten the edge."""
        if not self._looking and not self._closed:
            self._looking = True
            self._reactor.call(self._look)

    def _look(self) -> None:
        self._looking = False
        self._on_events(select.EPOLLIN)

    def _message(self, parts: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def _drained(self) -> None:
        """No further message is here."""

    def _ended(self, event: int) -> None:
        """The monitor tells that a connection has ended, or cannot be made."""
