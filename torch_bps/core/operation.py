"""One collective as core sees it: bytes in, bytes out. Made by a framework's shim, run by core.client.

A shim builds an Operation (one row of wire.ops), gives it to `Group.submit`, and is called back once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch_bps.errors import BytePSError
from torch_bps.wire.header import URGENT

MAX_PRIORITY: Final = 1_000_000
"""a shim's numbers are at most this, and at least its negative"""
_BLOCKING: Final = 2 * URGENT
"""what is added for a blocking caller: sooner than every number in the background, and still an int32"""

Piece = tuple[int, memoryview]
"""(block, contiguous bytes); the memory must stay valid and untouched until on_done"""


class Operation:
    """A collective, or half of a point-to-point message.

    Args:
        op: wire.ops code; a receive is ops.SEND with pulls instead of pushes.
        pushes: what this rank contributes: read-only use.
        pulls: where results go: written by the reactor's thread. A pull of a reduced block needs the push of that
            block beside it (of the same size; it may be the same memory); a pull of a relayed block stands alone.
        label: for messages to people: "all_reduce SUM float32[100]".
        on_done: called once, in the reactor's thread, with None or the error; must be quick and must not raise.
        owner: what keeps the memory alive; held until no channel reads or writes it, also after a failure.
        priority: smaller is sooner; within +-MAX_PRIORITY.
        blocking: its caller waits for it at once: it goes before all that nobody waits for, whatever their priorities.
        peer, tag: the other rank of a point-to-point message (ops.ANY_SOURCE to receive from any).
    """

    __slots__ = (
        "blocking",
        "dtype",
        "label",
        "on_done",
        "op",
        "owner",
        "peer",
        "priority",
        "pulls",
        "pushes",
        "redop",
        "root",
        "sequence",
        "source",
        "tag",
        "timeout_s",
    )

    def __init__(
        self,
        op: int,
        *,
        dtype: int,
        on_done: Callable[[BytePSError | None], None],
        label: str,
        timeout_s: float,
        redop: int = 0,
        root: int = 0,
        pushes: tuple[Piece, ...] = (),
        pulls: tuple[Piece, ...] = (),
        peer: int = -1,
        tag: int = 0,
        priority: int = 0,
        blocking: bool = False,
        owner: object = None,
    ) -> None:
        self.op = op
        self.dtype = dtype
        self.redop = redop
        self.root = root
        self.pushes = pushes
        self.pulls = pulls
        self.peer = peer
        self.tag = tag
        self.priority = priority + _BLOCKING if blocking else priority
        """the one that counts, and that frames carry"""
        self.blocking = blocking
        self.timeout_s = timeout_s
        self.label = label
        self.on_done = on_done
        self.owner = owner
        self.sequence = -1
        """set by Group.submit"""
        self.source = -1
        """set before on_done of a receive: the rank it came from"""

    def __repr__(self) -> str:
        return f"<{self.label} #{self.sequence}>"
