"""How collectives move through the streams. Each function runs once the ranks' statements are known to agree.

    reduce-scatter and copies    chunk by chunk of every block: publish own, take what is for this rank (add or copy)
    large all_reduce             each chunk is cut among the ranks: every rank adds its part of it and publishes the sum

The first piece of a stream is published with the statement (`eager`), so a small operation takes one hop. Sums are in
the order of the ranks, as everywhere in torch_bps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from torch_bps.local.statement import EVERYBODY, Statement, given
from torch_bps.local.streams import Streams
from torch_bps.server.reducer import combine
from torch_bps.transport.memory import copy_bytes
from torch_bps.wire import ops

if TYPE_CHECKING:
    from torch_bps.core.operation import Operation

DIRECT_NBYTES: Final = 64 << 10
"""all_reduce of no more than this: every rank adds all the inputs by itself"""

Blocks = Sequence[tuple[int, int]]
"""(to whom, bytes), as statement.given returns them"""


def is_shared_out(statement: Statement, size: int) -> bool:
    """Return whether the ranks share the adding of a large all_reduce: two would only wait more often."""
    return statement.op == ops.ALL_REDUCE and statement.total > DIRECT_NBYTES and size > 2


def is_small(statement: Statement) -> bool:
    """Return whether it is an all_reduce of one piece, which every rank adds by itself."""
    return statement.op == ops.ALL_REDUCE and 0 < statement.total <= DIRECT_NBYTES


# ---- the pieces of a stream of blocks


def _step(blocks: Blocks, chunk_nbytes: int) -> int:
    return max(chunk_nbytes // len(blocks) & ~63, 64)


def _num_pieces(blocks: Blocks, chunk_nbytes: int) -> int:
    if not blocks:
        return 0
    return -(-max(nbytes for _, nbytes in blocks) // _step(blocks, chunk_nbytes))


def _slices(blocks: Blocks, number: int, chunk_nbytes: int) -> tuple[list[tuple[int, int, int]], int]:
    """Return what piece `number` has of each block, (start in the block, bytes, offset in the piece), and its size."""
    step = _step(blocks, chunk_nbytes)
    start = number * step
    slices, offset = [], 0
    for _, nbytes in blocks:
        count = min(max(nbytes - start, 0), step)
        slices.append((start, count, offset))
        offset += (count + 63) & ~63
    return slices, offset


def _put(streams: Streams, blocks: Blocks, memories: Sequence[memoryview], number: int) -> None:
    slices, nbytes = _slices(blocks, number, streams.chunk_nbytes)
    room = streams.reserve(nbytes)
    for (start, count, offset), memory in zip(slices, memories, strict=True):
        if count:
            copy_bytes(room[offset : offset + count], memory[start : start + count])


def eager(streams: Streams, statement: Statement, operation: Operation, size: int) -> None:
    """Write the first piece of this rank's stream."""
    if is_small(statement):
        streams.reserve(statement.total)[:] = operation.pushes[0][1]
        return
    if is_shared_out(statement, size):
        _put_chunk(streams, operation.pushes[0][1], 0, size)
        return
    blocks = given(statement, streams.rank, size)
    if _num_pieces(blocks, streams.chunk_nbytes):
        _put(streams, blocks, _memories(operation, blocks, size), 0)


def skip_eager(streams: Streams, statement: Statement, peer: int, size: int) -> None:
    """Pass over the first piece of a peer's stream: its operation has failed."""
    if is_shared_out(statement, size):
        streams.next(peer, _pushed_nbytes(streams, statement.total, 0, peer, size))
        return
    blocks = given(statement, peer, size)
    if _num_pieces(blocks, streams.chunk_nbytes):
        streams.next(peer, _slices(blocks, 0, streams.chunk_nbytes)[1])


def _memories(operation: Operation, blocks: Blocks, size: int) -> list[memoryview]:
    """Return the memory of each block of this rank's stream."""
    if operation.op in (ops.ALL_TO_ALL, ops.SCATTER, ops.REDUCE_SCATTER):
        by_rank = {block % size: memory for block, memory in operation.pushes}
        return [by_rank[to] for to, _ in blocks]
    return [operation.pushes[0][1]] if blocks else []


# ---- copies, and sums that one rank makes alone


def exchange(streams: Streams, said: Sequence[Statement], operation: Operation) -> None:
    """Run any operation but a large all_reduce. `said` are all ranks' statements."""
    rank, size = streams.rank, len(said)
    blocks = [given(statement, peer, size) for peer, statement in enumerate(said)]
    pieces = [_num_pieces(theirs, streams.chunk_nbytes) for theirs in blocks]
    wanted = [_wanted(theirs, peer, rank) for peer, theirs in enumerate(blocks)]
    memories = _memories(operation, blocks[rank], size)
    adds = ops.ROWS[operation.op].combine == ops.REDUCE and operation.pulls
    summed = _Sum(operation, rank, size, streams.chunk_nbytes) if adds else None
    targets = {} if summed is not None else _targets(operation, size)
    for number in range(max(pieces)):
        if number + 1 < pieces[rank]:
            _put(streams, blocks[rank], memories, number + 1)
            streams.publish()
        views: dict[int, memoryview] = {}
        start = 0
        for peer in range(size):
            if peer == rank or number >= pieces[peer]:
                continue
            slices, nbytes = _slices(blocks[peer], number, streams.chunk_nbytes)
            at = streams.next(peer, nbytes)
            index = wanted[peer]
            if index < 0:
                continue
            start, count, offset = slices[index]
            if not count:
                continue
            view = streams.read(peer, at + offset, count)
            if summed is not None:
                views[peer] = view
            elif peer in targets:
                copy_bytes(targets[peer][start : start + count], view)
        if summed is not None and views:
            summed.add(views, start)
        streams.give_up_all()


def _wanted(blocks: Blocks, peer: int, rank: int) -> int:
    """Return which block of a peer's stream is for this rank, -1 for none."""
    if peer != rank:
        for index, (to, _) in enumerate(blocks):
            if to in (EVERYBODY, rank):
                return index
    return -1


def _targets(operation: Operation, size: int) -> dict[int, memoryview]:
    """Return where to copy what comes from each rank."""
    op, root = operation.op, operation.root
    if op in (ops.BROADCAST, ops.SCATTER):
        return {root: operation.pulls[0][1]} if operation.pulls else {}
    if op == ops.ALL_TO_ALL:
        return {block // size: memory for block, memory in operation.pulls}
    return dict(operation.pulls)


class _Sum:
    """Adds pieces of all ranks into this rank's pull."""

    def __init__(self, operation: Operation, rank: int, size: int, chunk_nbytes: int) -> None:
        self._dtype = operation.dtype
        self._redop = operation.redop
        block, self._out = operation.pulls[0]
        self._own = dict(operation.pushes)[block]
        self._rank = rank
        self._size = size
        # The result may lie in this rank's input. The first two inputs are read before the first result is written.
        self._scratch = memoryview(bytearray(min(chunk_nbytes, self._out.nbytes))) if rank > 1 else None

    def add(self, views: dict[int, memoryview], start: int) -> None:
        nbytes = next(iter(views.values())).nbytes
        views[self._rank] = self._own[start : start + nbytes]
        target = self._out[start : start + nbytes]
        scratch = self._scratch
        total = target if scratch is None else scratch[:nbytes]
        combine(self._dtype, self._redop, [views[peer] for peer in range(self._size)], total)
        if scratch is not None:
            copy_bytes(target, total)


# ---- all_reduce


def all_reduce_small(streams: Streams, operation: Operation, size: int) -> None:
    """Run a small all_reduce (is_small)."""
    own, out = operation.pushes[0][1], operation.pulls[0][1]
    nbytes = own.nbytes
    rank = streams.rank
    if rank > 1:
        own = memoryview(bytes(own))  # it may be where the result goes: see _Sum
    views = [own if peer == rank else streams.read(peer, streams.next(peer, nbytes), nbytes) for peer in range(size)]
    combine(operation.dtype, operation.redop, views, out)
    streams.give_up_all()


def _parts(nbytes: int, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Cut a chunk among the ranks; return (start, end) of each rank's part."""
    step = (-(-nbytes // size) + 63) & ~63
    return step, [(min(rank * step, nbytes), min((rank + 1) * step, nbytes)) for rank in range(size)]


def _chunk(total: int, number: int, chunk_nbytes: int) -> tuple[int, int]:
    """Return where a chunk of the tensor starts, and its size."""
    start = number * chunk_nbytes
    return start, min(total - start, chunk_nbytes)


def _pushed_nbytes(streams: Streams, total: int, number: int, rank: int, size: int) -> int:
    _, nbytes = _chunk(total, number, streams.chunk_nbytes)
    start, end = _parts(nbytes, size)[1][rank]
    return nbytes - (end - start)


def _put_chunk(streams: Streams, memory: memoryview, number: int, size: int) -> None:
    """Write a chunk without this rank's own part."""
    base, nbytes = _chunk(memory.nbytes, number, streams.chunk_nbytes)
    start, end = _parts(nbytes, size)[1][streams.rank]
    room = streams.reserve(nbytes - (end - start))
    if start:
        copy_bytes(room[:start], memory[base : base + start])
    if end < nbytes:
        copy_bytes(room[start:], memory[base + end : base + nbytes])


def all_reduce(streams: Streams, operation: Operation, size: int) -> None:
    """Run a large all_reduce: each rank's stream is chunk 0, then for each chunk: the next chunk, this one's sum."""
    rank = streams.rank
    peers = [peer for peer in range(size) if peer != rank]
    memory, result = operation.pushes[0][1], operation.pulls[0][1]
    total = memory.nbytes
    num_chunks = -(-total // streams.chunk_nbytes)
    arrives = [0] * size
    done = [0] * size
    """how much of each stream is not needed any more"""
    for peer in peers:
        arrives[peer] = streams.next(peer, _pushed_nbytes(streams, total, 0, peer, size))
        done[peer] = streams.position(peer)
    for number in range(num_chunks):
        last = number + 1 == num_chunks
        if not last:
            _put_chunk(streams, memory, number + 1, size)
            streams.publish()
        base, nbytes = _chunk(total, number, streams.chunk_nbytes)
        _, parts = _parts(nbytes, size)
        start, end = parts[rank]
        if end > start:
            views = []
            for peer in range(size):
                if peer == rank:
                    views.append(memory[base + start : base + end])
                else:  # its stream lacks its own part
                    before = parts[peer][1] - parts[peer][0] if peer < rank else 0
                    views.append(streams.read(peer, arrives[peer] + start - before, end - start))
            room = streams.reserve(end - start)
            combine(operation.dtype, operation.redop, views, room)
            streams.publish()
            streams.give_up(done)
            copy_bytes(result[base + start : base + end], room)
        else:
            streams.give_up(done)
        for peer in peers:
            if not last:
                arrives[peer] = streams.next(peer, _pushed_nbytes(streams, total, number + 1, peer, size))
            first, behind = parts[peer]
            at = streams.next(peer, behind - first)
            if behind > first:
                copy_bytes(result[base + first : base + behind], streams.read(peer, at, behind - first))
            done[peer] = streams.position(peer)
    streams.give_up_all()
