"""Cuts a block of bytes into partitions. Pure; every rank of a group cuts alike."""

from __future__ import annotations

from typing import Final

ALIGNMENT: Final = 64
MIN_NBYTES: Final = 64 << 10
"""below this a partition costs more in messages than it gains in parallelism"""


def partition_nbytes(nbytes: int, *, partition_bytes: int, num_engines: int, itemsize: int) -> int:
    """Return the size to cut a block of `nbytes` with: small blocks are cut over all engines, large ones by setting.

    Args:
        partition_bytes: BYTEPS_PARTITION_BYTES, the largest partition.
        num_engines: what a small block is spread over.
        itemsize: of the dtype; partitions hold whole elements (every itemsize divides the alignment).
    """
    if ALIGNMENT % itemsize:
        raise ValueError(f"itemsize {itemsize} does not divide {ALIGNMENT}")
    size = max(-(-nbytes // num_engines), MIN_NBYTES)
    return _round_up(min(size, max(partition_bytes, ALIGNMENT)))


def cut(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return (offset, nbytes) of each partition; one empty partition for no bytes."""
    if not nbytes:
        return [(0, 0)]
    return [(offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
