"""The engine's records: a slot (one partition of one block of one operation) and an operation as its members stated it.

    REDUCE slot   pushes arrive ──> Fold, Fold.. (last) ──> [Uplink] ──> Send or Done for each push ──> Drop
    RELAY slot    a push and its pulls in any order ──> Send for each pull ──> Done to the pusher ──> Drop
    either        its operation fails ──> Release what no fold uses ──> [folded/uplinked comes back] ──> Drop

`service` below says what the caller may use; all else belongs to the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.server.statements import is_reduce, roles, statement_of, states_total
from torch_bps.wire.dtypes import HALF_CODES
from torch_bps.wire.header import ACC32, BY_NODE, DECLARE, RESULT, WANT, Header

if TYPE_CHECKING:
    from torch_bps.server.groups import Group
    from torch_bps.server.reducer import Accumulator
    from torch_bps.transport.base import Buffer, Channel


class Slot:
    """One slot. Made by the first frame about it; `record` is None for part 0 of a point-to-point message."""

    __slots__ = (
        # service
        "acc32",  # the payloads are float32 partial sums of a half type
        "accumulator",  # the service's own
        "divisor",  # what AVG divides by: 1 with an uplink, where the servers divide
        "dtype",
        "header",  # the first push's
        "keep32",  # the fold's result stays float32: it goes up to the servers
        "key",
        "nbytes",  # of the result partition
        "redop",
        "result",  # the service's own; set by the engine for relayed slots
        # engine
        "busy",  # a Fold or an Uplink is out: its buffers and the result must stay
        "dead",  # its operation has failed; dropped once not busy
        "expected",  # number of pushes (reduce) or pulls (relay)
        "folded",  # contributors below this one are folded or being folded
        "puller",
        "pulls",  # relay: member -> None, answered (or gone) ones and waiting ones
        "pushed",
        "pusher",
        "pushes",  # contributor -> (origin, flags)
        "ready",  # reduce: contributor -> buffer that waits to be folded
        "record",
        "waiting",  # relay: origins of pulls that came before the push
    )

    def __init__(self, header: Header, record: Record | None) -> None:
        self.key = header[5:10]
        self.header = header
        self.dtype = header.dtype
        self.redop = header.redop
        self.acc32 = bool(header.flags & ACC32)
        self.nbytes = header.nbytes // 2 if self.acc32 else header.nbytes
        self.keep32 = False
        self.divisor = 1
        self.accumulator: Accumulator | None = None
        self.result: Buffer | None = None
        self.record = record
        self.busy = False
        self.dead = False
        self.expected = 1
        self.folded = 0
        self.pusher = self.puller = -1
        self.pushed = False
        self.pushes: dict[int, tuple[Channel, int]] = {}
        self.ready: dict[int, Buffer] = {}
        self.pulls: dict[int, None] = {}
        self.waiting: list[Channel] = []
        if record is None:
            return
        group = record.group
        if record.reduces:
            self.expected = record.expected
            self.keep32 = group.uplink and header.dtype in HALF_CODES
            self.divisor = 1 if group.uplink else group.size
        else:
            self.pusher, self.puller = roles(header, group.size)
            self.expected = group.size - 1 if self.puller < 0 else 1

    def next_buffers(self) -> tuple[Buffer, ...]:
        """Return the buffers to fold now, in contributor order; empty if it is better or necessary to wait."""
        ready = self.ready
        first = end = self.folded
        while end in ready:
            end += 1
        if end == first or (end == 1 and self.expected > 1):
            return ()
        self.folded = end
        return tuple([ready.pop(contributor) for contributor in range(first, end)])

    def wants(self) -> bool:
        """Whether any push asked for the result."""
        return any(flags & WANT for _, flags in self.pushes.values())

    def result_header(self, frame: int = RESULT) -> Header:
        """Return the header of the answer to a frame of this slot."""
        header = self.header
        return Header(
            frame,
            header.op,
            header.dtype,
            header.redop,
            0,
            *self.key,
            header.total,
            self.nbytes if frame == RESULT else 0,
            header.root,
            header.priority,
        )

    def expects_pull(self, index: int) -> bool:
        """Whether this member pulls the block."""
        return index == self.puller or (self.puller < 0 and index != self.pusher)

    def held(self) -> int:
        """Return how many payload buffers the engine holds here."""
        return len(self.ready) + (self.result is not None and not self.pushes)

    def __repr__(self) -> str:
        return f"<Slot {self.key} of {self.nbytes} bytes>"


class Record:
    """An operation: who stated it, and its live slots. Parts 1.. of a point-to-point message are an operation too."""

    __slots__ = (
        "by_node",
        "expected",
        "group",
        "header",
        "home",
        "key",
        "members",
        "reduces",
        "settled",
        "slots",
        "stated",
        "totals",
    )

    def __init__(self, group: Group, header: Header) -> None:
        self.group = group
        self.header = header
        self.key = (header.stream, header.sequence)
        self.by_node = bool(header.flags & BY_NODE)
        self.reduces = is_reduce(header)
        self.expected = 2 if header.stream else group.num_nodes if self.by_node else group.size
        self.home = False
        self.settled = False
        """all contributors stated it in an earlier record, whose slots are done"""
        self.stated: dict[int, Header] = {}
        """contributor -> the first frame that told its view"""
        self.members: set[int] = set()
        """indices that sent frames"""
        self.totals: dict[int, tuple[int, Header]] = {}
        """block -> the contributor and frame that first stated its total"""
        self.slots: dict[Slot, None] = {}

    def contributor(self, index: int) -> int:
        """Return the id that a member's frames count for."""
        return self.group.nodes[index] if self.by_node else index

    def agrees(self, header: Header) -> bool:
        """Whether a frame states the same operation as those before it."""
        first = self.header
        if (
            header[1:4] != first[1:4]
            or header.root != first.root
            or (header.flags ^ first.flags) & BY_NODE
        ) and statement_of(header) != statement_of(first):
            return False
        seen = self.totals.get(header.block)
        return seen is None or seen[1].total == header.total or not states_total(header)

    def state(self, index: int, contributor: int, header: Header) -> None:
        """Take note of a frame that agrees."""
        stated = self.stated.get(contributor)
        if stated is None or (stated.frame == DECLARE and header.frame != DECLARE):
            self.stated[contributor] = header
        self.members.add(index)
        if header.block not in self.totals and states_total(header):
            self.totals[header.block] = (contributor, header)

    def is_complete(self) -> bool:
        """Whether every contributor has stated it."""
        return self.settled or len(self.stated) >= self.expected

    def missing(self) -> list[int]:
        """Return the contributors that have not stated it."""
        if self.settled:
            return []
        if self.header.stream:
            return [index for index in roles(self.header, self.group.size) if index not in self.stated]
        return [contributor for contributor in range(self.expected) if contributor not in self.stated]

    def concerned(self) -> set[int]:
        """Return the members that wait for it: those that stated it, and whole nodes where nodes do."""
        group = self.group
        if self.by_node:
            return {index for index in group.present if group.nodes[index] in self.stated}
        return self.members & group.present
