"""Cuts a block of bytes into partitions. Pure; every rank of a group cuts alike."""

from __future__ import annotations

from typing import Final

ALIGNMENT: Final = 64
MIN_NBYTES: Final = 32 << 10
"""below this a partition costs more in messages than it gains in parallelism"""


_PIPELINE: Final = 32
"""A server can answer a partition only when all of it is here: the last one costs its time twice, 1/32 of the whole."""


def partition_nbytes(
    nbytes: int, *, partition_bytes: int, round_length: int, itemsize: int, pipeline: bool = False
) -> int:
    """Return the size to cut a block of `nbytes` with, so that the partitions fill whole rounds of the engines' turns.

    Args:
        partition_bytes: BYTEPS_PARTITION_BYTES, the largest partition.
        round_length: partitions in a round (core.placement).
        itemsize: of the dtype; partitions hold whole elements (every itemsize divides the alignment).
        pipeline: cut so small that sending, adding and receiving overlap: partitions cross a network.
    """
    if ALIGNMENT % itemsize:
        raise ValueError(f"itemsize {itemsize} does not divide {ALIGNMENT}")
    num_rounds = max(1, -(-nbytes // (round_length * partition_bytes)))
    if pipeline:
        num_rounds = max(num_rounds, min(_PIPELINE, nbytes // (round_length * MIN_NBYTES)))
    size = max(-(-nbytes // (num_rounds * round_length)), MIN_NBYTES)
    return _round_up(min(size, max(partition_bytes, ALIGNMENT)))


def cut(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of each partition; one empty partition for no bytes."""
    if not nbytes:
        return [(0, 0)]
    return [(offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
