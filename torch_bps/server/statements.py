"""What a frame says about its operation: whether it is allowed, whether two ranks say the same, how to tell people.

Called by the engine and its mailbox. Pure: header in, verdict out. `size` is the number of members of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch_bps.errors import BY_NAME, ProtocolError
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPES, HALF_CODES, REDUCE_KINDS
from torch_bps.wire.header import ACC32, BY_NODE, DECLARE, Header
from torch_bps.wire.reductions import supported

MISMATCH_HINT = "every rank must call the same collectives in the same order, with equal sizes and dtypes"

_ROOTED = frozenset((ops.REDUCE_TO_ROOT, ops.BROADCAST, ops.GATHER, ops.SCATTER))
_ONE_BLOCK = frozenset((ops.ALL_REDUCE, ops.REDUCE_TO_ROOT, ops.BARRIER, ops.BROADCAST, ops.SEND))
_ONE_LINE_EACH = 32
"""More ranks than this, and ranks that say the same share a line."""


def is_reduce(header: Header) -> bool:
    """Return whether the operation combines by adding."""
    return ops.ROWS[header.op].combine == ops.REDUCE


def name_of(header: Header) -> str:
    """Return the operation's name for people: "all_reduce #7"."""
    return f"{ops.ROWS[header.op].name} #{header.sequence}"


# ---- is the frame allowed?


def check_codes(header: Header) -> None:
    """Raise ProtocolError unless op, dtype, reduce kind, stream and flags exist and go together."""
    op = header.op
    if not 0 < op < len(ops.ROWS) or header.dtype >= len(DTYPES) or header.redop >= len(REDUCE_KINDS):
        raise ProtocolError(f"no such op, dtype or reduce kind: {op}, {header.dtype}, {header.redop}")
    if (op == ops.SEND) != (header.stream != 0):
        raise ProtocolError(f"{name_of(header)} in stream {header.stream:x}")
    if not is_reduce(header):
        if header.flags & (BY_NODE | ACC32):
            raise ProtocolError(f"{name_of(header)} is relayed, but has flags {header.flags:x}")
    elif op != ops.BARRIER and not supported(header.dtype, header.redop):
        kind, dtype = REDUCE_KINDS[header.redop], DTYPES[header.dtype].name
        raise ProtocolError(f"{name_of(header)}: {kind} of {dtype} is not possible")


def check_push(header: Header, has_buffer: bool) -> None:
    """Raise ProtocolError unless the sizes of a push are possible (its codes were checked)."""
    nbytes, itemsize = header.nbytes, DTYPES[header.dtype].itemsize
    if has_buffer != (nbytes > 0):
        raise ProtocolError(f"{name_of(header)}: a header of {nbytes} bytes with{'' if has_buffer else 'out'} payload")
    if header.op in _ONE_BLOCK and header.block:
        raise ProtocolError(f"{name_of(header)} has no block {header.block}")
    if header.flags & ACC32:
        if header.dtype not in HALF_CODES or nbytes % 4:
            raise ProtocolError(f"{name_of(header)}: {nbytes} bytes are no float32 sums of a half type")
        nbytes //= 2
    if nbytes > header.total:
        raise ProtocolError(f"{name_of(header)}: a partition of {nbytes} bytes in a block of {header.total}")
    if header.op == ops.BARRIER:
        if header.total:
            raise ProtocolError(f"{name_of(header)} with {header.total} bytes")
    elif is_reduce(header):
        if nbytes % itemsize or header.total % itemsize:
            raise ProtocolError(f"{name_of(header)}: {nbytes} of {header.total} bytes are no whole elements")
        if header.block >= ops.MAX_RANKS:
            raise ProtocolError(f"{name_of(header)} has no block {header.block}")


def roles(header: Header, size: int) -> tuple[int, int]:
    """Return who pushes and who pulls a relayed block; the puller is -1 where it is everybody else.

    Raises:
        ProtocolError: there is no such block or root.
    """
    op, block = header.op, header.block
    puller = -1
    if op == ops.BROADCAST:
        pusher = header.root
    elif op == ops.ALL_GATHER:
        pusher = block
    elif op == ops.GATHER:
        pusher, puller = block, header.root
    elif op == ops.SCATTER:
        pusher, puller = header.root, block
    elif op == ops.ALL_TO_ALL:
        pusher, puller = divmod(block, size)
    else:
        pusher, puller, _tag = ops.split_stream(header.stream)
    if (op in _ONE_BLOCK and block) or not 0 <= pusher < size or puller >= size or pusher == puller:
        raise ProtocolError(f"{name_of(header)} has no block {block} with root {header.root} among {size} ranks")
    return pusher, puller


# ---- do two ranks say the same?


def statement_of(header: Header) -> tuple[int, ...]:
    """Return the fields that all ranks must agree on for this op."""
    op = header.op
    if op == ops.BARRIER:
        return (op, header.flags & BY_NODE)
    redop = header.redop if is_reduce(header) else 0
    root = header.root if op in _ROOTED else 0
    return (op, header.flags & BY_NODE, header.dtype, redop, root)


def states_total(header: Header) -> bool:
    """Return whether `total` is a statement: a DECLARE has one at most for operations of one block."""
    return header.frame != DECLARE or (header.total > 0 and header.op in _ONE_BLOCK)


# ---- texts


def view(header: Header) -> str:
    """Return a rank's view of an operation: "all_reduce SUM float32[100]", "broadcast float32[5] root 1"."""
    words = [ops.ROWS[header.op].name]
    if header.op != ops.BARRIER:
        if is_reduce(header):
            words.append(REDUCE_KINDS[header.redop])
        dtype = DTYPES[header.dtype]
        words.append(f"{dtype.name}[{header.total // dtype.itemsize}]" if states_total(header) else dtype.name)
        if header.op in _ROOTED:
            words.append(f"root {header.root}")
    return " ".join(words)


def listing(what: str, numbers: Iterable[int]) -> str:
    """Return "rank 3", "ranks 1, 4-6"."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)
    return f"{what if len(ordered) == 1 else what + 's'} {text}"


def mismatch_text(
    what: str, views: Mapping[tuple[str, int], str], missing: Iterable[int] = (), missing_what: str = "rank"
) -> str:
    """Return the message that lists each rank's view of an operation.

    Args:
        what: the operation, for the first line.
        views: ("rank" or "node", number) -> view.
        missing: the ranks (or nodes: `missing_what`) that have not stated it yet.
    """
    lines = [f"the ranks disagree about {what}:"]
    if len(views) <= _ONE_LINE_EACH:
        lines += [f"  {kind} {number}: {text}" for (kind, number), text in sorted(views.items())]
    else:
        same: dict[tuple[str, str], list[int]] = {}
        for (kind, number), text in sorted(views.items()):
            same.setdefault((kind, text), []).append(number)
        lines += [f"  {listing(kind, numbers)}: {text}" for (kind, text), numbers in same.items()]
    missing = list(missing)
    if missing:
        lines.append(f"  not heard from yet: {listing(missing_what, missing)}")
    return "\n".join(lines)


def error_name(name: str) -> str:
    """Return a class name of errors.BY_NAME: a peer may have sent any text."""
    return name if name in BY_NAME else "BytePSError"
