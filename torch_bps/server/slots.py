"""The engine's records: a slot (one partition of one block of one operation) and an operation as its members stated it.

    REDUCE slot   pushes arrive ──> Fold, Fold.. (last) ──> [Uplink] ──> Send or Done for each push ──> Drop
    RELAY slot    a push and its pulls in any order ──> Send for each pull ──> Done to the pusher ──> Drop
    either        its operation fails ──> Release what no fold uses ──> [folded/uplinked comes back] ──> Drop

What a slot has for the service stands first in its constructor; all else belongs to the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.errors import ProtocolError
from torch_bps.server import statements
from torch_bps.wire.dtypes import HALF_CODES
from torch_bps.wire.header import ACC32, BY_NODE, DECLARE, HOME, RESULT, WANT, Header

if TYPE_CHECKING:
    from torch_bps.server.groups import Group
    from torch_bps.server.reducer import Accumulator
    from torch_bps.transport.base import Buffer, Channel


class Slot:
    """One slot. Made by the first frame about it."""

    __slots__ = (
        "acc32",
        "accumulator",
        "busy",
        "dead",
        "divisor",
        "dtype",
        "expected",
        "folded",
        "header",
        "keep32",
        "key",
        "nbytes",
        "puller",
        "pulls",
        "pushed",
        "pusher",
        "pusher_origin",
        "pushes",
        "ready",
        "record",
        "redop",
        "result",
        "waiting",
    )

    def __init__(self, header: Header, record: Record) -> None:
        group = record.group
        # for the service
        self.key = header[5:10]
        self.header = header
        """the first push's"""
        self.dtype = header.dtype
        self.redop = header.redop
        self.acc32 = bool(header.flags & ACC32)
        """the payloads are float32 partial sums of a half type"""
        self.nbytes = header.nbytes // 2 if self.acc32 else header.nbytes
        """of the result's partition"""
        self.keep32 = group.uplink and header.dtype in HALF_CODES
        """the sum stays float32: it goes up to the servers"""
        self.divisor = 1 if group.uplink else group.size
        """what AVG divides by; below an uplink that is left to the servers"""
        self.accumulator: Accumulator | None = None
        """the service's own"""
        self.result: Buffer | None = None
        """the service's own; the push's buffer in a relayed slot"""
        # for the engine
        self.record = record
        self.busy = False
        """a Fold or an Uplink is out: its buffers and the result must stay"""
        self.dead = False
        """its operation has failed: dropped as soon as it is not busy"""
        self.pushed = False
        if record.reduces:
            self.expected = record.expected
            """number of pushes"""
            self.folded = 0
            """contributors below this one are in the sum, or in a Fold"""
            self.pushes: dict[int, tuple[Channel, int]] = {}
            """contributor -> (origin, flags)"""
            self.ready: dict[int, Buffer] = {}
            """contributor -> buffer that waits for its Fold"""
        else:
            self.pusher, self.puller = statements.roles(header, group.size)
            self.expected = group.size - 1 if self.puller < 0 else 1
            """number of pulls"""
            self.pulls: dict[int, None] = {}
            """members whose pull came, or will not come any more"""
            self.waiting: list[Channel] = []
            """origins of the pulls that came before the push"""

    # ---- reduced slots

    def repeats(self, header: Header) -> bool:
        """Whether a push says exactly what the first one said, in a reduced slot."""
        first = self.header
        return (
            self.record.reduces
            and header[10:13] == first[10:13]
            and header[1:4] == first[1:4]
            and not (header.flags ^ first.flags) & (BY_NODE | ACC32)
        )

    def check_repetition(self, header: Header) -> None:
        """Raise ProtocolError if pushes that state the same operation cut it into other partitions."""
        first = self.header
        if self.record.reduces and (header.nbytes != first.nbytes or (header.flags ^ first.flags) & ACC32):
            raise ProtocolError(
                f"{statements.name_of(header)}: a partition of {header.nbytes} bytes here, of {first.nbytes} elsewhere",
                hint="BYTEPS_PARTITION_BYTES must be the same on every rank",
            )

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

    def held_nbytes(self) -> int:
        """Return how many payload bytes the engine holds here."""
        if self.record.reduces:
            return len(self.ready) * self.header.nbytes
        return self.nbytes if self.pushed else 0

    # ---- relayed slots

    def take(self, header: Header, buffer: Buffer | None, origin: Channel) -> None:
        """Take in the push."""
        self.header = header
        self.nbytes = header.nbytes
        self.result = buffer
        self.pushed = True
        self.pusher_origin = origin

    def expects_pull(self, index: int) -> bool:
        """Whether this member pulls the block."""
        return index == self.puller or (self.puller < 0 and index != self.pusher)

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
        self.header = header if header.stream else group.settled.get(header.sequence, header)
        self.key = (header.stream, header.sequence)
        self.by_node = bool(header.flags & BY_NODE)
        self.reduces = statements.is_reduce(header)
        self.expected = 2 if header.stream else group.num_nodes if self.by_node else group.size
        self.home = False
        """this engine is the operation's home: all contributors will state it here"""
        self.settled = not header.stream and header.sequence in group.settled
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
            header[1:4] != first[1:4] or header.root != first.root or (header.flags ^ first.flags) & BY_NODE
        ) and statements.statement_of(header) != statements.statement_of(first):
            return False
        seen = self.totals.get(header.block)
        return seen is None or seen[1].total == header.total or not statements.states_total(header)

    def state(self, index: int, contributor: int, header: Header) -> None:
        """Take note of a frame that agrees."""
        stated = self.stated.get(contributor)
        if stated is None or (stated.frame == DECLARE and header.frame != DECLARE):
            self.stated[contributor] = header
        self.members.add(index)
        if header.flags & HOME and not header.stream:
            self.home = True
        if header.block not in self.totals and statements.states_total(header):
            self.totals[header.block] = (contributor, header)

    def is_complete(self) -> bool:
        """Whether every contributor has stated it."""
        return self.settled or len(self.stated) >= self.expected

    def missing(self) -> list[int]:
        """Return the contributors that have not stated it."""
        if self.settled:
            return []
        if self.header.stream:
            return [index for index in statements.roles(self.header, self.group.size) if index not in self.stated]
        return [contributor for contributor in range(self.expected) if contributor not in self.stated]

    def needs_gone(self, contributor: int) -> bool:
        """Whether it cannot be completed without a contributor that has left.

        Pulls that it will not make any more, of an operation that it did state, count as answered.
        """
        stated = self.settled or contributor in self.stated
        if self.home and not stated:
            return True
        for slot in self.slots:
            if self.reduces:
                if contributor not in slot.pushes:
                    return True
            elif contributor == slot.pusher:
                if not slot.pushed:
                    return True
            elif slot.expects_pull(contributor) and contributor not in slot.pulls:
                if self.header.stream or not stated:
                    return True
                slot.pulls[contributor] = None
        return False

    def mismatch_with(self, index: int, header: Header) -> str:
        """Return the message about a frame that does not agree."""
        group = self.group
        kind = "node" if self.by_node else "rank"
        headers = dict(self.stated)
        if header.block in self.totals:
            first, its_header = self.totals[header.block]
            headers[first] = its_header
        views = {(kind, group.rank_of(who, self.by_node)): statements.view(said) for who, said in headers.items()}
        by_node = bool(header.flags & BY_NODE)
        contributor = group.nodes[index] if by_node else index
        views["node" if by_node else "rank", group.rank_of(contributor, by_node)] = statements.view(header)
        missing = {group.rank_of(who, self.by_node) for who in self.missing()} - {number for _, number in views}
        return statements.mismatch_text(f"operation #{header.sequence} of the group", views, missing, kind)

    def concerned(self) -> set[int]:
        """Return the members that wait for it: those that stated it, and whole nodes where nodes do."""
        group = self.group
        if self.by_node:
            return {index for index in group.present if group.nodes[index] in self.stated}
        return self.members & group.present
