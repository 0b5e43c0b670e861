"""One service as this process sees it: a control channel, lanes for data, the groups joined there.

    connect ──> Hello ──> Welcome ──> lanes, each with an Attach ──> ready ──> Join/Joined a group ... ──> Bye

The first lane is the express lane: only frames of small blocking calls go there, and their answers come back there, so
they never wait in a socket behind megabytes of others (a kernel's buffer cannot be overtaken). With shm, where sockets
only carry signals, one lane is enough.

Called by core.client. Knows no operations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from torch_bps.errors import BY_NAME, BytePSError, PeerLostError, ProtocolError
from torch_bps.topology import join_address, split_address
from torch_bps.transport.base import Buffer, Channel, Reactor, Transport
from torch_bps.transport.registry import choose, scheme_of
from torch_bps.wire import control
from torch_bps.wire.header import CONTROL, DONE, RESULT, URGENT, Header, Key

if TYPE_CHECKING:
    from torch_bps.core.flight import Task

log = logging.getLogger("torch_bps.core")

_EXPRESS_NBYTES: Final = 64 << 10
"""blocks that are larger are not for the express lane"""
_WILDCARDS: Final = ("0.0.0.0:", "[::]:")


class LinkOwner(Protocol):
    """What a link reports to (core.client.Client)."""

    def on_result_header(self, link: Link, header: Header) -> Buffer | None:
        """Say where a result is to be received."""

    def on_result(self, link: Link, header: Header, buffer: Buffer | None) -> None:
        """A RESULT (or DONE, without buffer) is here; takes over the buffer."""

    def on_message(self, link: Link, message: control.AnyMessage) -> None:
        """A control message that concerns groups is here."""

    def on_link_lost(self, link: Link, error: BytePSError) -> None:
        """The link is gone; called once, also when it never came up."""


class Link:
    """A connection to one service.

    Thread safety: the reactor's thread. `describe` and plain attributes may be read from any.

    Args:
        transports: by scheme.
        address: of the control channel.
        name: for messages to people ("rank 3 on host a"); default "server ADDRESS".
        wanted: BYTEPS_TRANSPORT.
        lanes: data connections to open, besides the express lane, where the transport is tcp; one for each address of
            the service at least.
        single: the control channel carries the data too (ranks of one host).
        node: this host's identity.
    """

    def __init__(
        self,
        reactor: Reactor,
        transports: dict[str, Transport],
        owner: LinkOwner,
        hello: control.Hello,
        address: str,
        *,
        name: str = "",
        wanted: str = "auto",
        lanes: int = 1,
        single: bool = False,
        node: str = "",
    ) -> None:
        self.address = address
        self.name = name or f"server {address}"
        """for messages to people"""
        self.service = ""
        self.nic_gbps = 0.0
        """rate of its host's link, as it says; 0: unknown"""
        self.reason = ""
        self.transport = scheme_of(address)
        self.tasks: dict[Key, Task] = {}
        """under way here; kept by core.client"""
        self.closed: BytePSError | None = None
        self.ready = False
        self.heard_s = time.monotonic()
        self.leaving = False
        """the service said Bye by itself: it ends in an orderly way"""
        self._reactor = reactor
        self._transports = transports
        self._owner = owner
        self._hello = hello
        self._wanted = wanted
        self._num_lanes = lanes
        self._single = single
        self._node = node
        self._on_ready: list[Callable[[BytePSError | None], None]] = []
        self._joining: dict[int, Callable[[BytePSError | None], None]] = {}
        self._bye: Callable[[], None] | None = None
        self._ping = 0
        self._unopened = 0
        self._turn = 0
        self._lanes: list[Channel] = []
        self._background_lanes: list[Channel] = []
        """all but the express lane"""
        self._channels: list[Channel] = []
        self._control: Channel = self._connect(address)
        self.send_message(hello)

    def __repr__(self) -> str:
        return f"<Link {self.describe()}>"

    def describe(self) -> str:
        """Return the service's name for people: address and transport."""
        return f"{self.name} over {self.transport}"

    def when_ready(self, done: Callable[[BytePSError | None], None]) -> None:
        """Call `done(None)` once frames may be sent, or `done(error)` if the link does not come up."""
        if self.closed is not None or self.ready:
            done(self.closed)
        else:
            self._on_ready.append(done)

    # ---- sending

    def send(self, header: Header, buffer: Buffer | None) -> None:
        """Send a data frame: a small urgent one on the express lane, others on the next lane in turn.

        Where that lane has something queued, the one with the least takes it. Turns, since a kernel that takes
        everything at once would leave all to the first lane.
        """
        if not self._lanes:
            if buffer is not None:
                buffer.release()
            return
        if header.priority < URGENT and header.total <= _EXPRESS_NBYTES:
            lanes = self._lanes
            lane = lanes[0]
        else:
            lanes = self._background_lanes
            self._turn = (self._turn + 1) % len(lanes)
            lane = lanes[self._turn]
        if lane.queued_nbytes and len(lanes) > 1:
            lane = min(lanes, key=_queued)
        lane.send(header, buffer)

    def declare(self, header: Header) -> None:
        """Send a DECLARE: on the control channel, since nobody answers it and a Leave must not overtake it."""
        self._control.send(header, None)

    def send_message(self, message: control.Message) -> None:
        """Send a control message."""
        header, payload = control.encode(message)
        self._control.send(header, Buffer(memoryview(payload)))

    def ping(self) -> None:
        """Send a heartbeat; the answer sets heard_s."""
        self._ping += 1
        self.send_message(control.Ping(self._ping))

    def join(self, message: control.Join, done: Callable[[BytePSError | None], None]) -> None:
        """Join a group; `done(None or error)` once the service has answered."""
        if self.closed is not None:
            done(self.closed)
            return
        self._joining[message.group] = done
        self.send_message(message)

    def bye(self, reason: str, done: Callable[[], None]) -> None:
        """Take leave; `done()` once the service has answered (or is gone)."""
        if self.closed is not None or self.leaving:
            self.close()
            done()
            return
        self._bye = done
        self.send_message(control.Bye(reason))

    def close(self, error: BytePSError | None = None) -> None:
        """Close all channels; nothing is reported after this unless `error` is given."""
        if self.closed is not None:
            return
        self.closed = error or PeerLostError(f"the connection to {self.name} was closed here")
        for channel in self._channels:
            channel.close()
        bye, self._bye = self._bye, None
        waiting = [*self._joining.values(), *self._on_ready]
        self._joining = {}
        self._on_ready = []
        if bye is not None:
            bye()
        if error is not None:
            self._owner.on_link_lost(self, error)
        for answer in waiting:
            answer(self.closed)

    # ---- the handler of its channels

    def on_open(self, channel: Channel) -> None:
        """A lane stands: the link is ready when all do."""
        if channel is not self._control:
            self._unopened -= 1
            if self._unopened == 0:
                self._become_ready()

    def on_header(self, channel: Channel, header: Header) -> Buffer | None:
        """Receive results straight into the tensor they are for."""
        return self._owner.on_result_header(self, header) if header.frame == RESULT else None

    def on_frame(self, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        """Dispatch: results to the owner, control messages by kind."""
        frame = header.frame
        if frame in (RESULT, DONE):
            self._owner.on_result(self, header, buffer)
            return
        if frame != CONTROL or buffer is None:
            if buffer is not None:
                buffer.release()
            raise ProtocolError(f"{self.address} sent a frame {frame} that only ranks send")
        try:
            message = control.decode(buffer.view)
        finally:
            buffer.release()
        self._message(message)

    def _message(self, message: control.AnyMessage) -> None:
        self.heard_s = time.monotonic()
        match message:
            case control.Pong():
                pass
            case control.Welcome():
                self._welcome(message)
            case control.Joined(group):
                done = self._joining.pop(group, None)
                if done is not None:
                    done(None)
            case control.Refused(error, text, hint):
                cls = BY_NAME.get(error, BytePSError)
                self.close(cls(text, hint=hint, server=self.address))
            case control.Bye(reason):
                if self._bye is None:
                    self.leaving = True
                    self.close(PeerLostError(f"{self.name} has ended: {reason}", server=self.address))
                else:
                    self.close()
            case _:
                self._owner.on_message(self, message)

    def on_close(self, channel: Channel, error: Exception | None) -> None:
        """Any channel's end is the link's end."""
        if self.closed is not None:
            return
        if isinstance(error, BytePSError) and not isinstance(error, PeerLostError):
            self.close(error.with_facts(server=self.address))
            return
        what = "the connection to" if self.ready else "cannot connect to"
        if isinstance(error, PeerLostError):
            why, hint = error.what, error.hint
        else:
            why = str(error) if error is not None else "it was closed by the other side"
            hint = "look at its own output for the first error; torchrun --max-restarts starts the job over"
        self.close(PeerLostError(f"{what} {self.name}: {why}", hint=hint, server=self.address))

    # ---- coming up

    def _connect(self, address: str, lane: int = 0) -> Channel:
        channel = self._transports[scheme_of(address)].connect(self._reactor, address, self, lane)
        self._channels.append(channel)
        return channel

    def _welcome(self, message: control.Welcome) -> None:
        if self.service:
            raise ProtocolError(f"{self.address} said welcome twice")
        self.service = message.service
        self.nic_gbps = message.nic_gbps
        if self._single:
            self._lanes = self._background_lanes = [self._control]
            self._become_ready()
            return
        same_node = bool(message.node) and message.node == self._node
        offered = [self._reachable(address) for address in message.endpoints]
        try:
            addresses, self.reason = choose(self._wanted, offered, same_node)
        except BytePSError as error:
            self.close(error.with_facts(server=self.address))
            return
        self.transport = scheme_of(addresses[0])
        num_lanes = {"tcp": max(self._num_lanes, len(addresses)) + 1, "shm": 1}.get(self.transport, 2)
        if len(addresses) > 1 and num_lanes > 1:
            self.reason += f", {num_lanes - 1} lanes to {len(addresses)} addresses"
        self._unopened = num_lanes
        for number in range(num_lanes):
            channel = self._connect(addresses[number % len(addresses)], number)
            self._lanes.append(channel)
            header, payload = control.encode(control.Attach(self._hello.process, number, self._hello.token))
            channel.send(header, Buffer(memoryview(payload)))
        self._background_lanes = self._lanes[1:] or self._lanes

    def _become_ready(self) -> None:
        if not self.ready:
            self.ready = True
            waiting, self._on_ready = self._on_ready, []
            for done in waiting:
                done(None)

    def _reachable(self, address: str) -> str:
        """Return the address of an endpoint; a service that listens everywhere is where it was reached."""
        scheme, _, where = address.partition("://")
        for wildcard in _WILDCARDS:
            if where.startswith(wildcard):
                host, _ = split_address(self.address.partition("://")[2])
                return f"{scheme}://{join_address(host, int(where.removeprefix(wildcard)))}"
        return address


def _queued(channel: Channel) -> int:
    return channel.queued_nbytes
