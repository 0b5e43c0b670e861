"""Heap memory for payloads: freed blocks are kept by size and used again, since fresh pages cost more than the add."""

from __future__ import annotations

import numpy as np

from torch_bps.transport.base import Buffer

_MIN_CLASS = 12  # 4 KiB
_KEEP_NBYTES = 64 << 20


class Pool:
    """transport.base.Memory on the heap. Last freed, first used, so that blocks are still in cache.

    Thread safety: one thread (the reactor's).

    Args:
        keep_nbytes: freed blocks beyond this total go back to the system.
    """

    def __init__(self, keep_nbytes: int = _KEEP_NBYTES) -> None:
        self._keep_nbytes = keep_nbytes
        self._kept_nbytes = 0
        self._free: dict[int, list[bytearray]] = {}

    def alloc(self, nbytes: int) -> Buffer:
        """Return a writable Buffer of exactly `nbytes`, not zeroed."""
        size_class = max((nbytes - 1).bit_length(), _MIN_CLASS)
        blocks = self._free.get(size_class)
        if blocks:
            block = blocks.pop()
            self._kept_nbytes -= len(block)
        else:
            block = bytearray(nbytes if nbytes > _KEEP_NBYTES else 1 << size_class)
        return Buffer(memoryview(block)[:nbytes], self._give_back)

    def _give_back(self, buffer: Buffer) -> None:
        block = buffer.view.obj
        assert isinstance(block, bytearray)
        nbytes = len(block)
        if nbytes & (nbytes - 1) == 0 and self._kept_nbytes + nbytes <= self._keep_nbytes:
            self._free.setdefault(nbytes.bit_length() - 1, []).append(block)
            self._kept_nbytes += nbytes


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy `source` to `into` (same size, contiguous); large copies release the GIL."""
    if source.nbytes < 65536:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
