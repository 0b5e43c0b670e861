"""Two peers in one process and one reactor: a rank's way to its own service, and the tests' network.

Buffers are handed over by reference, nothing is copied. Deliveries go through reactor.call, so a handler is never
called from inside another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_bps.errors import ConfigError, PeerLostError
from torch_bps.transport.base import Buffer, Channel, Handler, Reactor
from torch_bps.wire.header import Header

if TYPE_CHECKING:
    from torch_bps.transport.faults import FaultPlan

log = logging.getLogger("torch_bps.transport")


class InprocTransport:
    """transport.base.Transport within one object: addresses "inproc://name".

    Args:
        faults: what goes wrong, for tests.
    """

    name = "inproc"

    def __init__(self, faults: FaultPlan | None = None) -> None:
        self._names: dict[str, Callable[[Channel], Handler]] = {}
        self._faults = faults

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> _InprocListener:
        """Listen under a name. Raises ConfigError if it is taken."""
        if where in self._names:
            raise ConfigError(f"the name {where!r} is taken in this process", hint="choose another")
        self._names[where] = accept
        return _InprocListener(self._names, where)

    def connect(self, reactor: Reactor, address: str, handler: Handler, lane: int = 0) -> Channel:
        """Start to connect."""
        near = InprocChannel(reactor, address, self._faults)
        near.handler = handler
        reactor.call(self._meet, reactor, near, address)
        return near

    def _meet(self, reactor: Reactor, near: InprocChannel, address: str) -> None:
        if near.closed:
            return
        accept = self._names.get(address.removeprefix("inproc://"))
        if accept is None:
            near.close(PeerLostError(f"cannot connect to {address}: nobody listens there", hint="start it first"))
            return
        far = InprocChannel(reactor, address, self._faults)
        try:
            far.handler = accept(far)
        except Exception:
            log.exception("%s: accepting a connection failed", address)
            near.close(PeerLostError(f"{address} does not accept connections"))
            return
        near.other, far.other = far, near
        for channel in (far, near):
            try:
                if not channel.closed:
                    channel.handler.on_open(channel)
            except Exception as error:
                channel.close(error)
        near.start()
        far.start()


class _InprocListener:
    def __init__(self, names: dict[str, Callable[[Channel], Handler]], where: str) -> None:
        self.address = f"inproc://{where}"
        self._names = names
        self._where = where

    def close(self) -> None:
        """Accept no more."""
        self._names.pop(self._where, None)


class InprocChannel:
    """One end. Thread safety: the reactor's thread."""

    transport = "inproc"

    def __init__(self, reactor: Reactor, peer: str, faults: FaultPlan | None) -> None:
        self.peer = peer
        self.queued_nbytes = 0
        self.handler: Handler
        self.other: InprocChannel | None = None
        self.closed = False
        self._reactor = reactor
        self._faults = faults.of(self) if faults is not None else None
        self._waiting: list[tuple[Header, Buffer | None]] = []
        self._started = False
        self._ending = False
        self._under_way = 0

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Hand one frame over (transport.base.Channel)."""
        if self.closed or self._ending:
            if buffer is not None:
                buffer.release()
            return
        if buffer is not None and not header.nbytes:
            buffer.release()
            buffer = None
        self.queued_nbytes += header.nbytes
        if not self._started:
            self._waiting.append((header, buffer))
        else:
            self._go(header, buffer)

    def start(self) -> None:
        """The connection stands: send what waits."""
        self._started = True
        waiting, self._waiting = self._waiting, []
        for header, buffer in waiting:
            if self.closed:
                if buffer is not None:
                    buffer.release()
            else:
                self._go(header, buffer)

    def _go(self, header: Header, buffer: Buffer | None) -> None:
        self._under_way += 1
        if self._faults is None:
            self._reactor.call(self.deliver, header, buffer)
        else:
            self._faults.send(self, header, buffer)

    def deliver(self, header: Header, buffer: Buffer | None) -> None:
        """Give a frame to the other end's handler (called by the reactor, or by a fault plan)."""
        self._under_way -= 1
        if not self.closed:
            self.queued_nbytes -= header.nbytes
        other = self.other
        if self.closed or other is None or other.closed or other._ending:
            if buffer is not None:
                buffer.release()
        else:
            try:
                other.handler.on_frame(other, header, buffer)
            except Exception as error:
                other.close(error)
        if self._ending and not self._under_way:
            self.close(None)

    @property
    def reactor(self) -> Reactor:
        """For fault plans."""
        return self._reactor

    def close_when_sent(self) -> None:
        """Close once everything has been delivered."""
        if not self._ending and not self.closed:
            self._ending = True
            if not self._under_way and not self._waiting:
                self.close(None)

    def close(self, error: Exception | None = None) -> None:
        """Close both ends; the other one is told of an orderly end, or that it was cut off."""
        if self.closed:
            return
        self.closed = True
        self.queued_nbytes = 0
        for _, buffer in self._waiting:
            if buffer is not None:
                buffer.release()
        self._waiting = []
        if self._faults is not None:
            self._faults.drop()
        self._reactor.call(self.handler.on_close, self, error)
        if self.other is not None:
            self._reactor.call(self.other.close, None if error is None else _cut_off(self.other, error))


def _cut_off(channel: InprocChannel, error: Exception) -> PeerLostError:
    why = str(error).partition("\n")[0]
    return PeerLostError(f"the connection to {channel.peer} was cut by the other side: {why}")
