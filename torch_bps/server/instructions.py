"""What the engine tells its caller to do. The caller carries them out in order; buffers and origins are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch_bps.server.slots import Slot
    from torch_bps.transport.base import Buffer, Channel
    from torch_bps.wire.header import Header


class Fold(NamedTuple):
    """Add `buffers`, in this order, to the slot's sum; finish it if `last`. Then release them and call `folded`."""

    slot: Slot
    buffers: tuple[Buffer, ...]
    last: bool


class Uplink(NamedTuple):
    """Push the node's sum on to the servers; `want`: its result is asked for. Then call `uplinked` (or `_failed`)."""

    slot: Slot
    want: bool


class Send(NamedTuple):
    """Send slot.result (nothing if header.nbytes is 0) with `header` on `origin`."""

    slot: Slot
    origin: Channel
    header: Header


class Done(NamedTuple):
    """Send `header` on `origin`."""

    origin: Channel
    header: Header


class Release(NamedTuple):
    """Release `buffers`: nobody needs them."""

    buffers: tuple[Buffer, ...]


class Drop(NamedTuple):
    """The slot is over: release its result. The last instruction about a slot."""

    slot: Slot


class Fail(NamedTuple):
    """Tell these members that an operation (sequence -1: the whole group) cannot complete."""

    indices: tuple[int, ...]
    group: int
    stream: int
    sequence: int
    error: str
    text: str
    hint: str


Instruction = Fold | Uplink | Send | Done | Release | Drop | Fail
