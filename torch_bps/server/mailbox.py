"""Part 0 of point-to-point messages: which message goes to which posted receive. Called by server.engine only.

    PUSH  stream_of(src, dst, tag)          sequence = the sender's message number in that stream: 0, 1, 2 ..
    PULL  stream_of(src or ANY, dst, tag)   sequence = the receiver's number of receives for (dst, tag): 0, 1, 2 ..

Both kinds are taken in the order of their numbers (lanes may swap them on the way: early ones wait). Each posted
receive, in order, takes the first message it matches, ANY_SOURCE the one that was here first; so at any time no
waiting receive matches a waiting message. A message that its sender gave up keeps its place, as an error for the
receive that it was meant for: the one after it would be the wrong data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.errors import ProtocolError
from torch_bps.server.instructions import Done, Drop, Fail, Instruction, Release, Send
from torch_bps.server.slots import Slot
from torch_bps.server.statements import MISMATCH_HINT, check_push, mismatch_text, view
from torch_bps.wire import ops
from torch_bps.wire.header import DONE, RESULT, Header

if TYPE_CHECKING:
    from torch_bps.server.groups import Group
    from torch_bps.transport.base import Buffer, Channel

Out = list[Instruction]


class _Message:
    """A message that no receive has taken; without a slot once its sender gave it up (then with the reason)."""

    __slots__ = ("error", "number", "origin", "slot", "src", "text")

    def __init__(
        self, src: int, number: int, slot: Slot | None, origin: Channel | None, error: str = "", text: str = ""
    ) -> None:
        self.src = src
        self.number = number
        self.slot = slot
        self.origin = origin
        self.error = error
        self.text = text


class _Post:
    """A posted receive that no message has come for."""

    __slots__ = ("header", "origin", "src")

    def __init__(self, src: int, header: Header, origin: Channel) -> None:
        self.src = src
        self.header = header
        self.origin = origin

    def takes(self, src: int) -> bool:
        return self.src in (src, ops.ANY_SOURCE)


class _Line[T]:
    """Puts numbered things in order."""


class _Box:
    """All messages and receives of one (dst, tag)."""
