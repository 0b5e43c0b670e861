"""Accepts connections for tcp and shm."""

from __future__ import annotations

import logging
import select
import socket

from torch_bps.transport.base import Reactor

log = logging.getLogger("torch_bps.transport")


class StreamListener:
    """Accepts connections on a listening socket; pauses when the process has no descriptor left."""

    def __init__(self, reactor: Reactor, sock: socket.socket, address: str) -> None:
        self.address = address
        self._reactor = reactor
        self._sock = sock
        self._open = True
        reactor.add(sock.fileno(), select.EPOLLIN, self._on_events)

    def _on_events(self, events: int) -> None:
        for _ in range(64):
            if not self._open:
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:  # no descriptors, no memory: looking again at once would spin
                self._reactor.modify(self._sock.fileno(), 0)
                self._reactor.call_later(0.1, self._resume)
                return
            sock.setblocking(False)
            try:
                self._accepted(sock, address)
            except Exception:
                log.exception("%s: accepting a connection failed", self.address)
                sock.close()

    def _accepted(self, sock: socket.socket, address: object) -> None:
        raise NotImplementedError

    def _resume(self) -> None:
        if self._open:
            self._reactor.modify(self._sock.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Accept no more."""
        if self._open:
            self._open = False
            self._reactor.remove(self._sock.fileno())
            self._sock.close()
