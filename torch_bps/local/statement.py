"""What a rank says about an operation before it moves any data, and whether all ranks say the same. Pure.

From all statements each rank knows what travels in every stream, and comes to the same verdict as the others.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from torch_bps.server import statements
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPES, REDUCE_KINDS
from torch_bps.wire.header import PUSH, Header

if TYPE_CHECKING:
    from torch_bps.core.operation import Operation

EVERYBODY: Final = -1
_FIXED: Final = struct.Struct("<QQIBBBB")
_UNEVEN: Final = 1


class Statement(NamedTuple):
    """One rank's statement.

    Args:
        total: bytes of the block that all ranks push or pull; where each pair of ranks has a block, of those.
        gives, takes: bytes for (from) each rank, where they are not all `total`; else empty.
    """

    sequence: int
    total: int
    root: int
    op: int
    dtype: int
    redop: int
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return the bytes of the statement: equal ones mean equal statements."""
        flags = _UNEVEN if self.gives else 0
        fixed = _FIXED.pack(self.sequence, self.total, self.root, self.op, self.dtype, self.redop, flags)
        return fixed + struct.pack(f"<{2 * len(self.gives)}Q", *self.gives, *self.takes) if flags else fixed

    def give(self, rank: int) -> int:
        """Return how many bytes it gives to `rank` (of an operation with a block for each pair)."""
        return self.gives[rank] if self.gives else self.total

    def take(self, rank: int) -> int:
        """Return how many bytes it takes from `rank`."""
        return self.takes[rank] if self.takes else self.total


def unpack(data: bytes) -> Statement:
    """Return the statement that `pack` made these bytes of."""
    sequence, total, root, op, dtype, redop, flags = _FIXED.unpack_from(data)
    if not flags:
        return Statement(sequence, total, root, op, dtype, redop)
    size = (len(data) - _FIXED.size) // 16
    sizes = struct.unpack_from(f"<{2 * size}Q", data, _FIXED.size)
    return Statement(sequence, total, root, op, dtype, redop, sizes[:size], sizes[size:])


_PAIRED: Final = frozenset((ops.ALL_GATHER, ops.GATHER, ops.SCATTER, ops.ALL_TO_ALL, ops.REDUCE_SCATTER))
"""operations whose blocks belong to pairs of ranks, and may differ in size"""
_ROOTED: Final = frozenset((ops.REDUCE_TO_ROOT, ops.BROADCAST, ops.GATHER, ops.SCATTER))


def statement_of(operation: Operation, rank: int, size: int) -> Statement:
    """Return this rank's statement of an operation."""
    op = operation.op
    redop = operation.redop if ops.ROWS[op].combine == ops.REDUCE else 0
    root = operation.root if op in _ROOTED else 0
    fixed = (root, op, operation.dtype, redop)
    if op not in _PAIRED:
        pieces = operation.pushes or operation.pulls
        return Statement(operation.sequence, pieces[0][1].nbytes, *fixed)
    gives, takes = [0] * size, [0] * size
    if op in (ops.ALL_GATHER, ops.GATHER):
        for _, memory in operation.pushes:
            gives = [memory.nbytes] * size
        for block, memory in operation.pulls:
            takes[block] = memory.nbytes
    else:
        for block, memory in operation.pushes:
            gives[block % size] = memory.nbytes
        for block, memory in operation.pulls:
            if op == ops.REDUCE_SCATTER:
                takes = [memory.nbytes] * size
            else:
                takes[operation.root if op == ops.SCATTER else block // size] = memory.nbytes
    others = [*gives[:rank], *gives[rank + 1 :], *takes[:rank], *takes[rank + 1 :]]
    if op not in (ops.GATHER, ops.SCATTER) and len(set(others)) == 1:
        return Statement(operation.sequence, others[0], *fixed)
    return Statement(operation.sequence, 0, *fixed, tuple(gives), tuple(takes))


def given(statement: Statement, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the blocks in the stream of `rank`: (to whom, or EVERYBODY; bytes)."""
    op, root = statement.op, statement.root
    if op == ops.ALL_REDUCE:
        return [(EVERYBODY, statement.total)]
    if op == ops.BROADCAST:
        return [(EVERYBODY, statement.total)] if rank == root else []
    if op == ops.REDUCE_TO_ROOT:
        return [(root, statement.total)] if rank != root else []
    if op == ops.ALL_GATHER:
        return [(EVERYBODY, statement.give(0 if rank else 1))]
    if op == ops.GATHER:
        return [(root, statement.give(root))] if rank != root else []
    if op == ops.BARRIER or (op == ops.SCATTER and rank != root):
        return []
    return [(peer, statement.give(peer)) for peer in range(size) if peer != rank]


def disagreement(said: Mapping[int, Statement], size: int) -> str:
    """Return the message about ranks that disagree, "" if they agree as far as they have said anything."""
    first = next(iter(said.values()))
    same = all(
        statement[2:6] == first[2:6] and (first.op in _PAIRED or statement.total == first.total)
        for statement in said.values()
    )
    if same and first.op in _PAIRED:
        same = all(
            one.give(other_rank) == other.take(rank)
            for rank, one in said.items()
            for other_rank, other in said.items()
            if rank != other_rank and _meet(first, rank, other_rank)
        )
    if same:
        return ""
    views = {("rank", rank): _view(statement) for rank, statement in said.items()}
    missing = [rank for rank in range(size) if rank not in said]
    return statements.mismatch_text(f"operation #{first.sequence} of the group", views, missing)


def _meet(first: Statement, giver: int, taker: int) -> bool:
    """Whether a block goes from one to the other."""
    if first.op == ops.GATHER:
        return taker == first.root
    return first.op != ops.SCATTER or giver == first.root


def _view(statement: Statement) -> str:
    if not statement.gives:
        return statements.view(
            Header(
                PUSH,
                statement.op,
                statement.dtype,
                statement.redop,
                total=statement.total,
                root=statement.root,
            )
        )
    dtype = DTYPES[statement.dtype]
    words = [ops.ROWS[statement.op].name]
    if statement.redop:
        words.append(REDUCE_KINDS[statement.redop])
    words.append(f"{dtype.name}, gives {_counts(statement.gives, dtype.itemsize)} elements to each rank")
    words.append(f"takes {_counts(statement.takes, dtype.itemsize)}")
    if statement.op in _ROOTED:
        words.append(f"root {statement.root}")
    return " ".join(words)


def _counts(sizes: Sequence[int], itemsize: int) -> str:
    shown = "+".join(str(nbytes // itemsize) for nbytes in sizes[:16])
    return shown + ("+.." if len(sizes) > 16 else "")
