"""The contract that every transport keeps; tests/conformance/transport_contract.py is its judge.

A *channel* is one connection (a lane) between two peers. Frames sent on it arrive whole, once, and in order, but for
PUSH, PULL, RESULT and DONE frames that wait in the channel: those of a smaller priority may overtake others, of equal
priority they do not, and no frame of another kind is overtaken, or overtakes. Everything happens in the thread of one
Reactor: `listen`, `connect`, `send`, `close` are called there, handlers are called there. Handlers may call any method
of any channel, also close it, also from inside a callback.

    transport.listen(reactor, where, accept) ──> Listener      transport.connect(reactor, address, handler) ──> Channel
              accept(channel) -> Handler                                       handler.on_open(channel)
                          handler.on_frame(channel, header, buffer) ... handler.on_close(channel, error)

Memory. A Buffer is counted memory. `send` takes over one reference to the buffer it is given and releases it when the
bytes no longer need it (written to the socket, or read by the peer where memory is shared), or when the channel dies.
A frame with a payload arrives with a Buffer that the handler owns (one reference): it must release it.
`Handler.on_header` may hand out the memory that a payload is to be received into; a transport that already has the
payload in memory of its own (shm, zmq) may ignore that: the handler compares the buffer it gets in `on_frame`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch_bps.wire.header import Header


class Buffer:
    """Counted memory: `view` (format "B") is valid until the last reference is released.

    Thread safety: `retain` and `release` are called in the reactor's thread only.
    """

    __slots__ = ("_on_free", "_references", "view")

    def __init__(self, view: memoryview, on_free: Callable[[Buffer], None] | None = None) -> None:
        self.view = view
        self._references = 1
        self._on_free = on_free

    def retain(self, count: int = 1) -> Buffer:
        """Add references and return self."""
        self._references += count
        return self

    def release(self) -> None:
        """Drop one reference; at zero the memory goes back to its owner."""
        self._references -= 1
        if self._references == 0 and self._on_free is not None:
            on_free, self._on_free = self._on_free, None
            on_free(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.view.nbytes} bytes, {self._references} references>"


class Memory(Protocol):
    """Where buffers come from: transport.memory.Pool (heap) or transport.arena.Arena (shared memory)."""

    def alloc(self, nbytes: int) -> Buffer:
        """Return a writable Buffer of exactly `nbytes`, not zeroed."""


class Channel(Protocol):
    """One lane to one peer. Thread safety: the reactor's thread only."""

    peer: str
    """for messages: the other end's address"""
    transport: str
    """name of the transport"""
    queued_nbytes: int
    """bytes that `send` accepted and the kernel (or the peer) has not taken yet"""

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        """Send one frame; `header.nbytes` equals the buffer's size (0 without one).

        Never blocks and never raises for a dead peer: on_close tells, and the buffer is released.
        """

    def close(self, error: Exception | None = None) -> None:
        """Close now, dropping what is queued; on_close(error) is called later, from the reactor's loop, once."""

    def close_when_sent(self) -> None:
        """Close once everything queued has been taken by the kernel and the peer can read it all."""


class Handler(Protocol):
    """Who a channel reports to. Exceptions that a method raises close the channel with that exception."""

    def on_open(self, channel: Channel) -> None:
        """The connection stands (both sides); frames sent before were queued."""

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        """A frame with a payload begins: return where to receive it, exactly header.nbytes, or None for pool memory."""

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        """A whole frame is here. `buffer` is None for frames without payload; the handler releases it.

        The buffer may be the one that on_header returned (then that reference is handed back).
        """

    def on_close(self, channel: Channel, error: Exception | None) -> None:
        """The channel is gone; called exactly once. `error` is None for an orderly end (close(), or the peer's)."""


class Listener(Protocol):
    """An address that accepts channels."""

    address: str
    """what peers connect to, e.g. "tcp://10.0.0.1:4711" (the real port, an address that others can reach)"""

    def close(self) -> None:
        """Accept no more; channels that stand stay open."""


class Transport(Protocol):
    """A way to move frames; stateless itself, made once for each process."""

    name: str

    def listen(self, reactor: Reactor, where: str, accept: Callable[[Channel], Handler]) -> Listener:
        """Listen at `where`: "host:port" (port 0: any free one) for network transports, a name for local ones.

        Raises:
            ConfigError: the port is taken, the host cannot be resolved, no permission; the message names them.
        """

    def connect(self, reactor: Reactor, address: str, handler: Handler, lane: int = 0) -> Channel:
        """Start to connect; returns at once. Failure is reported through handler.on_close with an error.

        Args:
            lane: number of this connection among those to the same peer: each interface takes its turn.
        """


class Timer(Protocol):
    """A callback that waits for its time."""

    def cancel(self) -> None:
        """Never call it; harmless when it has been called already."""


class Reactor(Protocol):
    """One epoll loop in one thread (transport.reactor.EpollReactor)."""

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function(*arguments)` soon in the reactor's thread. Any thread may call this."""

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Run it after `delay_s` seconds. Reactor's thread only."""

    def add(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Watch `fd` for epoll `events`; `callback(events)` is called in the loop. Reactor's thread only."""

    def modify(self, fd: int, events: int) -> None:
        """Change what `fd` is watched for."""

    def remove(self, fd: int) -> None:
        """Stop watching `fd`; no callback of it comes after this."""

    def in_thread(self) -> bool:
        """Whether the caller is the reactor's thread."""
