"""Plays the service for an engine in tests: keeps books on buffers, frames and slots, and fails on any double entry.

Payloads are `Payload` objects, origins are the frames themselves, so that each answer can be told from all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_bps.errors import ProtocolError
from torch_bps.server.engine import Done, Drop, Engine, Fail, Fold, Instruction, Release, Send, Uplink
from torch_bps.server.slots import Slot
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPE_BY_NAME, SUM
from torch_bps.wire.header import BY_NODE, DECLARE, DONE, HOME, PULL, PUSH, RESULT, WANT, Header

FLOAT32 = DTYPE_BY_NAME["float32"].code


class Payload:
    """A buffer: where it came from and what became of it."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.state = "held"

    def move(self, old: str, new: str) -> None:
        assert self.state == old, f"{self.frame} is {self.state}, not {old}"
        self.state = new


@dataclass(eq=False)
class Frame:
    """A frame that a member sent, and its answer."""

    index: int
    header: Header
    contributor: int
    answer: Send | Done | None = None
    failed: bool = False
    refused: bool = False
    payload: Payload | None = None

    def is_over(self) -> bool:
        return self.answer is not None or self.failed or self.refused or self.header.frame == DECLARE


@dataclass(eq=False)
class Books:
    """What is known of one slot."""

    folded: list[int] = field(default_factory=list)
    folding: tuple[Payload, ...] = ()
    last: bool = False
    uplinking: bool = False
    uplinked: bool = False
    dropped: bool = False


class Ledger:
    """An engine, and everything that goes in and out of it."""

    def __init__(self, *, fold_at_once: bool = True) -> None:
        self.engine = Engine()
        self.fold_at_once = fold_at_once
        self.frames: list[Frame] = []
        self.fails: list[Fail] = []
        self.books: dict[Slot, Books] = {}
        self.present: dict[int, dict[int, int]] = {}
        """group -> index -> node"""
        self.over: set[tuple[int, int, int]] = set()
        """(group, stream, sequence) of failed operations: no more answers"""
        self.given_up: set[tuple[int, int, int, int]] = set()
        """(member, group, stream, sequence): no answers to this member"""

    # ---- events

    def join(self, group: int, size: int, *, nodes: list[int] | None = None, uplink: bool = False) -> None:
        for index in range(size):
            self.join_one(group, size, index, nodes=nodes, uplink=uplink)

    def join_one(
        self, group: int, size: int, index: int, *, nodes: list[int] | None = None, uplink: bool = False
    ) -> None:
        node = nodes[index] if nodes else 0
        num_nodes = max(nodes) + 1 if nodes else 1
        self.engine.join(group, size=size, index=index, rank=index, num_nodes=num_nodes, node=node, uplink=uplink)
        self.present.setdefault(group, {})[index] = node

    def send(self, index: int, header: Header) -> Frame:
        """Deliver a frame; its payload, if any, is made here."""
        contributor = self.present[header.group][index] if header.flags & BY_NODE else index
        frame = Frame(index, header, contributor)
        frame.failed = self._is_given_up(frame)
        self.frames.append(frame)
        try:
            if header.frame == PUSH:
                if header.nbytes:
                    frame.payload = Payload(frame)
                instructions = self.engine.push(index, header, frame.payload, frame)  # type: ignore[arg-type]
            elif header.frame == PULL:
                instructions = self.engine.pull(index, header, frame)  # type: ignore[arg-type]
            else:
                instructions = self.engine.declare(index, header, frame)  # type: ignore[arg-type]
        except ProtocolError:
            frame.refused = True
            if frame.payload is not None:
                frame.payload.move("held", "released")
            raise
        self.run(instructions)
        return frame

    def leave(self, group: int, index: int, error: str | None = None, text: str = "it was killed") -> None:
        instructions = self.engine.leave(group, index, error, text)
        del self.present[group][index]
        self.run(instructions)

    def cancel(self, index: int, group: int, sequence: int, *, stream: int = 0, text: str = "timeout") -> None:
        self.given_up.add((index, group, stream, sequence))
        for frame in self.frames:
            frame.failed = frame.failed or (frame.answer is None and self._is_given_up(frame))
        self.run(self.engine.cancel(index, group, stream, sequence, "OperationTimeout", text))

    # ---- the service's work

    def folding(self) -> list[Slot]:
        return [slot for slot, books in self.books.items() if books.folding]

    def uplinking(self) -> list[Slot]:
        return [slot for slot, books in self.books.items() if books.uplinking]

    def fold_done(self, slot: Slot) -> None:
        books = self.books[slot]
        for payload in books.folding:
            payload.move("folding", "released")
        books.folding = ()
        self.run(self.engine.folded(slot))

    def uplink_done(self, slot: Slot, error: str = "") -> None:
        self.books[slot].uplinking = False
        self.books[slot].uplinked = not error
        self.run(self.engine.uplink_failed(slot, error, "no server") if error else self.engine.uplinked(slot))

    def run(self, instructions: list[Instruction]) -> None:
        again: list[Slot] = []
        for instruction in instructions:
            match instruction:
                case Fold(slot, buffers, last):
                    self._fold(slot, buffers, last)  # type: ignore[arg-type]
                    again.append(slot)
                case Uplink(slot, _):
                    books = self._live(slot)
                    assert slot.nbytes == 0 or books.last
                    assert not books.folding
                    assert not books.uplinking
                    books.uplinking = True
                case Send(slot, origin, header):
                    self._live(slot)
                    self._answer(origin, instruction, header)  # type: ignore[arg-type]
                case Done(origin, header):
                    self._answer(origin, instruction, header)  # type: ignore[arg-type]
                case Release(buffers):
                    for payload in buffers:
                        payload.move("held", "released")  # type: ignore[attr-defined]
                case Drop(slot):
                    books = self._live(slot)
                    assert not books.folding
                    assert not books.uplinking
                    books.dropped = True
                    if slot.result is not None:
                        slot.result.move("held", "released")  # type: ignore[attr-defined]
                case Fail():
                    self._fail(instruction)
        if self.fold_at_once:
            for slot in again:
                self.fold_done(slot)

    def _live(self, slot: Slot) -> Books:
        books = self.books.setdefault(slot, Books())
        assert not books.dropped, f"an instruction for {slot} after its Drop"
        return books

    def _is_given_up(self, frame: Frame) -> bool:
        header = frame.header
        if header.op == ops.SEND and header.frame == PULL and header.part:
            return False  # it has the number of the message, not that of the receive
        return (frame.index, *header[5:8]) in self.given_up

    def _fold(self, slot: Slot, buffers: tuple[Payload, ...], last: bool) -> None:
        books = self._live(slot)
        assert not books.folding, f"two folds of {slot} at once"
        assert not books.last
        assert len(buffers) + len(books.folded) >= min(2, slot.expected)
        for payload in buffers:
            payload.move("held", "folding")
            assert payload.frame.header[5:10] == slot.key
            books.folded.append(payload.frame.contributor)
        assert books.folded == list(range(len(books.folded))), "not in contributor order"
        books.folding = buffers
        books.last = last
        assert last == (len(books.folded) == slot.expected)

    def _answer(self, frame: Frame, instruction: Send | Done, header: Header) -> None:
        assert not frame.is_over(), f"{frame} is answered again by {instruction}"
        sent = frame.header
        frame.answer = instruction
        assert sent[5:8] not in self.over, f"an answer after the failure of {sent}"
        if sent.op == ops.SEND and sent.part == 0 and sent.frame == PULL:
            src, dst, tag = ops.split_stream(sent.stream)
            actual_src, *rest = ops.split_stream(header.stream)
            assert rest == [dst, tag]
            assert src in (actual_src, ops.ANY_SOURCE)
            assert header.block == sent.sequence & 0xFFFFFFFF
            assert header.part == 0
        else:
            assert header[5:10] == sent[5:10]
        assert (header.op, header.total) == (sent.op, sent.total)
        if isinstance(instruction, Done):
            assert header.frame == DONE
            assert header.nbytes == 0
            assert sent.frame == PUSH
            assert not sent.flags & WANT
            return
        slot = instruction.slot
        books = self.books[slot]
        assert header.frame == RESULT
        assert header.nbytes == slot.nbytes
        if sent.frame == PUSH:
            assert sent.flags & WANT
            assert slot.nbytes == 0 or books.folded == list(range(slot.expected)), "a result that lacks somebody"
            assert books.uplinked or not slot.record.group.uplink
        elif slot.nbytes:
            payload = slot.result
            assert payload.state == "held"  # type: ignore[union-attr]
            pushed = payload.frame.header  # type: ignore[union-attr]
            assert pushed[6:8] == (header.stream, header.sequence)
            assert pushed.part == header.part

    def _fail(self, fail: Fail) -> None:
        self.fails.append(fail)
        assert fail.indices
        assert fail.error
        assert fail.text
        assert set(fail.indices) <= set(self.present[fail.group]), "a Fail to somebody who left"
        key = fail[1:4]
        p2p = fail.stream != 0
        if not p2p:
            self.over.add(key)
        for frame in self.frames:
            header = frame.header
            hit = header.group == fail.group if fail.sequence == -1 else header[5:8] == key
            if hit and frame.index in fail.indices and frame.answer is None:
                frame.failed = True

    # ---- questions

    def open_frames(self) -> list[Frame]:
        """Return the frames of present members that got no answer."""
        return [
            frame
            for frame in self.frames
            if not frame.is_over() and frame.index in self.present.get(frame.header.group, {})
        ]

    def check_empty(self) -> None:
        """Check that nothing is left of any operation."""
        assert self.engine.is_idle()
        counts = self.engine.describe()
        assert (counts["slots"], counts["operations"], counts["held_nbytes"]) == (0, 0, 0)
        assert not self.held()
        assert not self.open_frames()

    def held(self) -> list[Payload]:
        return [frame.payload for frame in self.frames if frame.payload and frame.payload.state != "released"]


def head(frame: int, op: int, sequence: int = 0, **fields: int) -> Header:
    """Return a header of group 1 (unless said otherwise); 100 float32 in one partition unless said otherwise."""
    values = {"dtype": FLOAT32, "group": 1, "sequence": sequence}
    if ops.ROWS[op].combine == ops.REDUCE:
        values["redop"] = SUM
    if op != ops.BARRIER:
        values["total"] = 400
    values |= fields
    if frame == PUSH:
        values.setdefault("nbytes", values.get("total", 0))
    return Header(frame, op, **values)


@dataclass
class Script:
    """An operation as honest members call it, and the part of it that one engine sees.

    Args:
        home: this engine is the home: members without other frames declare.
        seen: which (block, part) come to this engine; None for all.
    """

    op: int
    group: int
    sequence: int
    size: int
    root: int = 0
    elements: int = 4
    parts: int = 1
    home: bool = True
    seen: set[tuple[int, int]] | None = None
    nodes: list[int] | None = None

    def frames(self) -> list[tuple[int, Header]]:
        """Return (member, header) of all frames, in any order that pleases the caller."""
        out: list[tuple[int, Header]] = []
        size, root = self.size, self.root
        ranks = range(size)
        others = [rank for rank in ranks if rank != root]
        op = self.op
        if op in (ops.ALL_REDUCE, ops.BARRIER):
            out = [pair for rank in ranks for pair in self._block(rank, PUSH, 0, WANT)]
        elif op == ops.REDUCE_TO_ROOT:
            out = [pair for rank in ranks for pair in self._block(rank, PUSH, 0, WANT if rank == root else 0)]
        elif op == ops.REDUCE_SCATTER:
            for rank in ranks:
                out += [pair for block in ranks for pair in self._block(rank, PUSH, block, WANT * (rank == block))]
        elif op == ops.BROADCAST:
            out = self._block(root, PUSH, 0) + [pair for rank in others for pair in self._block(rank, PULL, 0)]
        elif op == ops.ALL_GATHER:
            out = [p for rank in ranks for src in ranks for p in self._block(rank, PUSH if rank == src else PULL, src)]
        elif op == ops.GATHER:
            out = [pair for rank in others for pair in self._block(rank, PUSH, rank) + self._block(root, PULL, rank)]
        elif op == ops.SCATTER:
            out = [pair for rank in others for pair in self._block(root, PUSH, rank) + self._block(rank, PULL, rank)]
        elif op == ops.ALL_TO_ALL:
            for src in ranks:
                for dst in ranks:
                    if src != dst:
                        out += self._block(src, PUSH, src * size + dst) + self._block(dst, PULL, src * size + dst)
        if self.home:
            quiet = set(ranks) - {rank for rank, _ in out}
            out += [(rank, self._header(DECLARE, 0, 0, 0, HOME)) for rank in sorted(quiet)]
        return out

    def _block(self, rank: int, frame: int, block: int, flags: int = 0) -> list[tuple[int, Header]]:
        parts = range(1 if self.op == ops.BARRIER else self.parts)
        return [
            (rank, self._header(frame, block, part, self._nbytes(block), flags | (HOME if self.home else 0)))
            for part in parts
            if self.seen is None or (block, part) in self.seen
        ]

    def _nbytes(self, block: int) -> int:
        varies = self.op in (ops.ALL_GATHER, ops.ALL_TO_ALL)
        return 0 if self.op == ops.BARRIER else 4 * (self.elements + (block if varies else 0))

    def _header(self, frame: int, block: int, part: int, nbytes: int, flags: int) -> Header:
        if self.nodes and ops.ROWS[self.op].combine == ops.REDUCE:
            flags |= BY_NODE
        return head(
            frame,
            self.op,
            self.sequence,
            group=self.group,
            root=self.root,
            block=block,
            part=part,
            total=0 if frame == DECLARE else nbytes * self.parts,
            nbytes=nbytes if frame == PUSH else 0,
            flags=flags,
        )


def by_nodes(frames: list[tuple[int, Header]], nodes: list[int]) -> list[tuple[int, Header]]:
    """Return one push a node and slot: the one of the node's last member."""
    chosen = {(nodes[rank], header[5:10]): (rank, header) for rank, header in frames}
    return list(chosen.values())
