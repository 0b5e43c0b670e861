"""What the transport contract is tested with: a kit (the transport's plug), a rig (two sides), a recorder, a ledger.

See transport_contract for how a transport plugs in.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch_bps.transport.base import Buffer, Channel, Handler, Memory, Transport
from torch_bps.transport.memory import Pool
from torch_bps.transport.reactor import EpollReactor
from torch_bps.wire.header import PUSH, Header

DEADLINE_S = 20.0


class TrackedBuffer(Buffer):
    """A buffer that tells its ledger when it is freed, or released once too often."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger, view: memoryview, on_free: Callable[[Buffer], None] | None = None) -> None:
        super().__init__(view, self._freed if on_free is None else lambda _: (on_free(self), self._freed(self)))
        self._ledger = ledger
        ledger.alive += 1

    def release(self) -> None:
        if self._references < 1:
            self._ledger.wrong.append(f"{self!r} was released once too often")
        super().release()

    def _freed(self, _: Buffer) -> None:
        self._ledger.alive -= 1


class Ledger:
    """Counts the buffers that live; also a Memory that counts what is taken from it."""

    def __init__(self, pool: Memory | None = None) -> None:
        self.alive = 0
        self.largest_nbytes = 0
        self.wrong: list[str] = []
        self._pool = pool or Pool()

    def buffer(self, data: bytes | bytearray | memoryview) -> Buffer:
        """Return a buffer over `data`, one reference."""
        return TrackedBuffer(self, memoryview(data).cast("B"))

    def alloc(self, nbytes: int) -> Buffer:
        """Return pool memory, counted."""
        self.largest_nbytes = max(self.largest_nbytes, nbytes)
        inner = self._pool.alloc(nbytes)
        return TrackedBuffer(self, inner.view, lambda _: inner.release())


class RawPeer(Protocol):
    """Somebody who connects and speaks no torch_bps."""

    def send(self, data: bytes) -> object:
        """Send `data` where the other side expects a frame's 64-byte header."""

    def close(self) -> None: ...


class Kit:
    """How one transport plugs into the contract; subclass it and override what differs."""

    name = ""
    """the transport's name and its addresses' scheme"""
    one_reactor = False
    """both sides share one transport object and one reactor (inproc)"""
    cut_is_noticed = False
    """close(error) looks different from close() on the other side"""
    child_closes_all = False
    """transport.close_in_child() leaves no descriptor of ours open in a forked child"""
    clog_nbytes: int | None = 64 << 20
    """more than the kernel takes for a peer that does not read; None: the transport cannot see how much is queued"""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def make(self) -> Transport:
        """Return a transport; called for each side. Its memory should be self.ledger where it takes any Memory."""
        raise NotImplementedError

    def where(self) -> str:
        """Return where to listen; a fresh place in each call."""
        return "127.0.0.1:0"

    def taken(self, address: str) -> str:
        """Return the `where` that the listener with this address occupies."""
        return address.partition("://")[2]

    def nowhere(self) -> str:
        """Return a well-formed address at which nobody listens."""
        raise NotImplementedError

    def raw(self, address: str) -> RawPeer | None:
        """Connect to a listener without the transport; None where raw bytes cannot get in."""
        return None

    def received_alive(self) -> int:
        """Return how many received buffers were not given back."""
        return self.ledger.alive

    def close(self) -> None:
        """Give back what the kit itself holds; after the transports."""


class Recorder:
    """A handler that writes down what it is told, and what it should not have been told.

    Args:
        on_open, on_header, on_frame: called in addition, after the note was made; may raise, close, send.
    """

    def __init__(
        self,
        on_open: Callable[[Channel], None] | None = None,
        on_header: Callable[[Channel, Header], Buffer | None] | None = None,
        on_frame: Callable[[Channel, Header, Buffer | None], None] | None = None,
    ) -> None:
        self.opened = 0
        self.headers: list[Header] = []
        self.frames: list[tuple[Header, bytes | None]] = []
        self.received_into: list[Buffer | None] = []
        self.closed: list[Exception | None] = []
        self.wrong: list[str] = []
        self._on_open = on_open
        self._on_header = on_header
        self._on_frame = on_frame

    def on_open(self, channel: Channel) -> None:
        self.opened += 1
        self._expect(self.opened == 1 and not self.closed, "on_open twice or after on_close")
        if self._on_open:
            self._on_open(channel)

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        self.headers.append(header)
        self._expect(header.nbytes > 0, f"on_header for a frame without payload: {header}")
        self._expect(len(self.headers) <= len(self.frames) + 1, "on_header before the frame before was delivered")
        return self._on_header(channel, header) if self._on_header else None

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        self._expect(self.opened == 1 and not self.closed, "on_frame before on_open or after on_close")
        self._expect((0 if buffer is None else buffer.view.nbytes) == header.nbytes, f"size of payload: {header}")
        self._expect(buffer is None or header.nbytes > 0, "an empty payload must be None")
        self.frames.append((header, None if buffer is None else bytes(buffer.view)))
        self.received_into.append(buffer)
        if buffer is not None:
            buffer.release()
        if self._on_frame:
            self._on_frame(channel, header, buffer)

    def on_close(self, channel: Channel, error: Exception | None) -> None:
        self.closed.append(error)
        self._expect(len(self.closed) == 1, "on_close twice")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


class End(NamedTuple):
    """One end of a connection."""

    channel: Channel
    log: Recorder


class Rig:
    """A listening and a connecting side in the test's own thread: nothing moves but by `until` and `step`."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.descriptors_before = descriptors()
        self.sent = Ledger()
        self.accepted: list[End] = []
        self.connected: list[End] = []
        self.accept_with: Callable[[], Recorder] = Recorder
        self.server = kit.make()
        self.client = self.server if kit.one_reactor else kit.make()
        self.server_reactor = EpollReactor("byteps-test-server")
        self.client_reactor = self.server_reactor if kit.one_reactor else EpollReactor("byteps-test-client")
        self.reactors = list({self.server_reactor, self.client_reactor})
        self.transports = list({id(t): t for t in (self.server, self.client)}.values())
        self.listener = self.server.listen(self.server_reactor, kit.where(), self._accept)

    def _accept(self, channel: Channel) -> Handler:
        log = self.accept_with()
        self.accepted.append(End(channel, log))
        return log

    def connect(self, log: Recorder | None = None, address: str = "") -> End:
        """Start to connect."""
        log = log or Recorder()
        end = End(self.client.connect(self.client_reactor, address or self.listener.address, log), log)
        self.connected.append(end)
        return end

    def pair(self, log: Recorder | None = None) -> tuple[End, End]:
        """Return a connection that stands: (connecting end, accepting end)."""
        number = len(self.accepted)
        near = self.connect(log)
        self.until(lambda: len(self.accepted) > number and self.accepted[number].log.opened and near.log.opened, "open")
        return near, self.accepted[number]

    def step(self, *reactors: EpollReactor) -> None:
        """Let the reactors (all of them) do what is due; wait a few milliseconds at most for it."""
        poll = select.poll()
        for reactor in reactors or self.reactors:
            poll.register(reactor.fds()[-1], select.POLLIN)
        poll.poll(2)
        for reactor in reactors or self.reactors:
            reactor.run_once()

    def until(self, done: Callable[[], object], what: str, *reactors: EpollReactor) -> None:
        """Drive the reactors until `done()`; fails after DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for: {what}"
            self.step(*reactors)

    def until_closed(self, *ends: End) -> None:
        """Drive until each end was told that it is closed."""
        self.until(lambda: all(end.log.closed for end in ends), "on_close")

    def close(self) -> None:
        """Close everything and check that nothing is owed to anybody."""
        self.listener.close()
        self.step()
        ends = self.accepted + self.connected
        for channel, _ in ends:
            channel.close()
        self.until_closed(*ends)
        for transport in self.transports:
            if hasattr(transport, "close"):
                transport.close()
        for reactor in self.reactors:
            reactor.stop()
        for channel, log in ends:
            assert not log.wrong
            assert channel.queued_nbytes == 0
        assert self.sent.wrong + self.kit.ledger.wrong == []
        assert self.sent.alive == 0, f"{self.sent.alive} buffers that were sent were not released"
        assert self.kit.received_alive() == 0, f"{self.kit.received_alive()} received buffers were not released"
        self.kit.close()


def send(rig: Rig, end: End, data: bytes | None, sequence: int = 0) -> tuple[Header, bytes | None]:
    """Send one frame; return what must arrive."""
    header = Header(PUSH, 1, 2, 3, 4, 5, 6, sequence, 8, 9, 10, len(data or b""), 12, -13)
    end.channel.send(header, None if data is None else rig.sent.buffer(data))
    return header, data or None


def descriptors() -> dict[int, str]:
    """Return the descriptors that this process has open, and what they are."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            pass  # the listing's own
    return found
