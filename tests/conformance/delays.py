"""Random delays of frames in real processes, for torch_suite --delays: the order within a channel is kept.

Wraps the transports that this process's runtime makes (`install`), so every channel of a rank - to the other ranks of
its node, to servers, to its own service - is slow both ways; servers, processes of their own, need no change. What goes
from memory to memory without a channel (torch_bps/local) is not delayed: use it for the way through servers.

    send ──> line, each frame due at random ──> the real channel ··· the real channel ──> line ──> handler

Keeps the contract of transport.base, which test_delays.py proves with the contract's own suite.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from torch_bps.core import runtime
from torch_bps.transport.base import Buffer, Channel, Handler, Listener, Reactor, Timer
from torch_bps.transport.registry import make
from torch_bps.wire.header import Header

SHARE = 0.3
"""of the frames that are delayed"""
LONGEST_S = 0.05


def draw(source: random.Random) -> float:
    """Return a delay in seconds: most are none or below a millisecond, few are near LONGEST_S."""
    return LONGEST_S * source.random() ** 8 if source.random() < SHARE else 0.0


def install(seed: str) -> None:
    """Delay the frames of all groups that this process opens from now on."""
    source = random.Random(seed)
    real_inproc = runtime.InprocTransport
    runtime.make = lambda *arguments, **options: DelayedTransport(make(*arguments, **options), source)
    runtime.InprocTransport = lambda: DelayedTransport(real_inproc(), source)


class DelayedTransport:
    """transport.base.Transport around another one.

    Args:
        source: of the delays.
    """

    def __init__(self, inner: Any, source: random.Random) -> None:
        self.name: str = inner.name
        self._inner = inner
        self._source = source

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> Listener:
        """Listen; what is accepted is delayed."""

        def accept_delayed(inner: Channel) -> Handler:
            channel = _DelayedChannel(reactor, self._source)
            channel.inner = inner
            channel.handler = accept(channel)
            return channel

        return self._inner.listen(reactor, where, accept_delayed)

    def connect(self, reactor: Reactor, address: str, handler: Handler, lane: int = 0) -> Channel:
        """Start to connect."""
        channel = _DelayedChannel(reactor, self._source)
        channel.handler = handler
        channel.inner = self._inner.connect(reactor, address, channel, lane)
        return channel

    def close(self) -> None:
        """Close the inner one, if it can be."""
        if hasattr(self._inner, "close"):
            self._inner.close()


class _Line:
    """Calls that wait, each for a time of its own; they are made in the order in which they came."""

    def __init__(self, reactor: Reactor, source: random.Random) -> None:
        self._reactor = reactor
        self._source = source
        self._waiting: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._timer: Timer | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, function: Callable[..., None], *arguments: Any) -> None:
        """Make this call after those that wait: at once if there are none and it draws no delay."""
        self._waiting.append((draw(self._source), function, arguments))
        if self._timer is None:
            self._go_on()

    def clear(self) -> None:
        """Make none of the calls that wait; frees the buffers among their arguments."""
        waiting, self._waiting = self._waiting, deque()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _, _, arguments in waiting:
            for argument in arguments:
                if isinstance(argument, Buffer):
                    argument.release()

    def nbytes(self) -> int:
        """Return the size of what waits."""
        return sum(a.view.nbytes for _, _, arguments in self._waiting for a in arguments if isinstance(a, Buffer))

    def _go_on(self) -> None:
        while self._waiting:
            delay_s, function, arguments = self._waiting[0]
            if delay_s:
                self._timer = self._reactor.call_later(delay_s, self._due)
                return
            self._waiting.popleft()
            function(*arguments)

    def _due(self) -> None:
        self._timer = None
        _, function, arguments = self._waiting.popleft()
        self._waiting.appendleft((0.0, function, arguments))
        self._go_on()


class _DelayedChannel:
    """A Channel to whoever has it, and the Handler of the real one. Thread safety: the reactor's thread."""

    inner: Channel
    handler: Handler

    def __init__(self, reactor: Reactor, source: random.Random) -> None:
        self._reactor = reactor
        self._outgoing = _Line(reactor, source)
        self._incoming = _Line(reactor, source)
        self._closed = False  # here
        self._ending = False  # close_when_sent was called
        self._ask_later = False  # the frame that arrives is in no memory of the handler's
        self._over: list[Exception | None] = []  # what the real channel was closed with, once it is

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def transport(self) -> str:
        return self.inner.transport

    @property
    def queued_nbytes(self) -> int:
        return self.inner.queued_nbytes + self._outgoing.nbytes()

    # ---- its owner calls

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        if not self._closed and not self._ending:
            self._outgoing.put(self.inner.send, header, buffer)
        elif buffer is not None:
            buffer.release()

    def close(self, error: Exception | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.clear()
        self._incoming.clear()
        if self._over:  # the report of it was waiting
            self._reactor.call(self._report)
        else:
            self.inner.close(error)

    def close_when_sent(self) -> None:
        if self._over:
            self.close()
        elif not self._closed and not self._ending:
            self._ending = True
            self._incoming.clear()
            self._outgoing.put(self.inner.close_when_sent)

    # ---- the real channel calls

    def on_open(self, channel: Channel) -> None:
        self.handler.on_open(self)

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        """Ask the handler where to receive: now, or if it has not had the frame before yet, when it gets this one."""
        if self._closed or self._ending:
            return None
        self._ask_later = bool(self._incoming)
        return None if self._ask_later else self.handler.on_header(self, header)

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        self._incoming.put(self._deliver, header, buffer, self._ask_later)
        self._ask_later = False

    def on_close(self, channel: Channel, error: Exception | None) -> None:
        self._over.append(error)
        self._outgoing.clear()
        if self._closed or self._ending:
            self._report()
        else:
            self._incoming.put(self._report)

    def _deliver(self, header: Header, buffer: Buffer | None, ask: bool) -> None:
        if self._closed or self._ending:
            if buffer is not None:
                buffer.release()
            return
        try:
            if ask and buffer is not None:
                buffer = self._move(header, buffer)
            self.handler.on_frame(self, header, buffer)
        except Exception as error:
            self.close(error)

    def _move(self, header: Header, buffer: Buffer) -> Buffer:
        """Return the memory that the handler wants the payload in, or what it is in if it does not mind."""
        wanted = self.handler.on_header(self, header)
        if wanted is None:
            return buffer
        wanted.view[:] = buffer.view
        buffer.release()
        return wanted

    def _report(self) -> None:
        self._closed = True
        self.handler.on_close(self, self._over[0])
