"""Seeded trouble for the in-process transport: delays, frames held back, connections that are cut. For tests."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from torch_bps.errors import PeerLostError
from torch_bps.transport.base import Buffer
from torch_bps.wire.header import Header

if TYPE_CHECKING:
    from torch_bps.transport.inproc import InprocChannel


class FaultPlan:
    """What goes wrong; the same seed brings the same faults.

    Args:
        seed: of the delays.
        max_delay: a frame waits for up to so many further rounds of the reactor; the order within a channel is kept.
        cut_after: each channel breaks after so many frames.
    """

    def __init__(self, seed: int, *, max_delay: int = 0, cut_after: int | None = None) -> None:
        self._random = random.Random(seed)
        self.max_delay = max_delay
        self.cut_after = cut_after
        self.num_delayed = 0
        self.held = False
        self._held_back: list[tuple[ChannelFaults, InprocChannel]] = []

    def hold(self) -> None:
        """Deliver nothing, on any channel, until `let_go`."""
        self.held = True

    def let_go(self) -> None:
        """Deliver what was held back, and what comes."""
        self.held = False
        held_back, self._held_back = self._held_back, []
        for faults, channel in held_back:
            channel.reactor.call(faults.move, channel)

    def hold_back(self, faults: ChannelFaults, channel: InprocChannel) -> None:
        """Remember a channel that has something to deliver."""
        self._held_back.append((faults, channel))

    def of(self, channel: InprocChannel) -> ChannelFaults:
        """Return the faults of one channel."""
        return ChannelFaults(self)

    def delay(self) -> int:
        """Return how many rounds the next frame waits."""
        rounds = self._random.randint(0, self.max_delay)
        self.num_delayed += rounds > 0
        return rounds


class ChannelFaults:
    """The faults of one channel."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._sent = 0
        self._line: deque[tuple[Header, Buffer | None, int]] = deque()
        self._moving = False

    def send(self, channel: InprocChannel, header: Header, buffer: Buffer | None) -> None:
        """Deliver the frame after its delay, or cut the connection."""
        self._sent += 1
        if self._plan.cut_after is not None and self._sent > self._plan.cut_after:
            if buffer is not None:
                buffer.release()
            channel.close(PeerLostError(f"the fault plan cut the connection to {channel.peer}"))
            return
        self._line.append((header, buffer, self._plan.delay()))
        if not self._moving:
            self._moving = True
            channel.reactor.call(self.move, channel)

    def drop(self) -> None:
        """The channel is closed: what waits is lost."""
        for _, buffer, _ in self._line:
            if buffer is not None:
                buffer.release()
        self._line.clear()

    def move(self, channel: InprocChannel) -> None:
        """Take a round off the first frame's delay, or deliver it."""
        if not self._line:
            self._moving = False
            return
        if self._plan.held:
            self._plan.hold_back(self, channel)
            return
        header, buffer, rounds = self._line.popleft()
        if rounds and not channel.closed:
            self._line.appendleft((header, buffer, rounds - 1))
        else:
            channel.deliver(header, buffer)
        self._moving = bool(self._line)
        if self._moving:
            channel.reactor.call(self.move, channel)
