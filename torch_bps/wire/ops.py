"""The table that every collective is a row of: who pushes, how it is combined, how many pull.

A *slot* is ``(group, stream, sequence, block, part)``. A block is the piece of an operation that one or all ranks
push and one or all ranks pull; a part is a partition of a block.

| operation      | blocks            | pushes a block | combine | result goes to                          |
|----------------|-------------------|----------------|---------|-----------------------------------------|
| all_reduce     | 0                 | all            | reduce  | each push that has WANT (all)           |
| reduce         | 0                 | all            | reduce  | the push that has WANT (root)           |
| reduce_scatter | rank i's block i  | all            | reduce  | the push that has WANT (rank i)         |
| barrier        | 0, of 0 bytes     | all            | reduce  | each push that has WANT (all)           |
| broadcast      | 0                 | root           | relay   | size - 1 pulls                          |
| all_gather     | source rank       | its source     | relay   | size - 1 pulls                          |
| gather         | source rank       | its source     | relay   | 1 pull (root); root's own stays with it |
| scatter        | destination rank  | root           | relay   | 1 pull                                  |
| all_to_all     | src * size + dst  | src            | relay   | 1 pull (dst)                            |
| send / recv    | 0, in a stream    | the sender     | relay   | 1 pull                                  |

What a rank would send to itself it copies itself: no frame is sent for it. Called by server.engine and core.
"""

from __future__ import annotations

from typing import Final, NamedTuple

REDUCE: Final = 1
RELAY: Final = 2


class Row(NamedTuple):
    """One row: `code` is the header's `op`; `pulls_all` is whether size - 1 ranks pull a block, or just one."""

    code: int
    name: str
    combine: int
    pulls_all: bool


ROWS: Final[tuple[Row, ...]] = (
    Row(0, "invalid", 0, False),
    Row(1, "all_reduce", REDUCE, False),
    Row(2, "reduce", REDUCE, False),
    Row(3, "reduce_scatter", REDUCE, False),
    Row(4, "barrier", REDUCE, False),
    Row(5, "broadcast", RELAY, True),
    Row(6, "all_gather", RELAY, True),
    Row(7, "gather", RELAY, False),
    Row(8, "scatter", RELAY, False),
    Row(9, "all_to_all", RELAY, False),
    Row(10, "send", RELAY, False),
)
(_, ALL_REDUCE, REDUCE_TO_ROOT, REDUCE_SCATTER, BARRIER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, SEND) = (
    row.code for row in ROWS
)

# A stream keeps point-to-point messages apart from collectives (stream 0) and from each other.
ANY_SOURCE: Final = 0xFFFE
MAX_RANKS: Final = 0xFFF0


def stream_of(src: int, dst: int, tag: int) -> int:
    """Return the stream of the messages from rank `src` to rank `dst` with `tag` (any int32); never 0."""
    return (src + 1) << 48 | (dst & 0xFFFF) << 32 | (tag & 0xFFFFFFFF)


def split_stream(stream: int) -> tuple[int, int, int]:
    """Return ``(src, dst, tag as uint32)`` of a point-to-point stream; src is ANY_SOURCE for a pull from any rank."""
    return (stream >> 48) - 1, (stream >> 32) & 0xFFFF, stream & 0xFFFFFFFF
