"""Shared memory for payloads: memfds without names, so neither /dev/shm's size nor a left-over file matters.

An arena belongs to one process, which writes into it; peers get the segments' descriptors over a unix socket
(transport.shm) and map them. Blocks are kept by size and reused last-in-first-out, so that they are still in cache.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final

from torch_bps.errors import BytePSError
from torch_bps.transport.base import Buffer

SEGMENT_NBYTES: Final = 64 << 20
_MIN_CLASS: Final = 12  # 4 KiB
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""a peer must not be able to shrink what others have mapped: touching it then would be a SIGBUS"""


class ArenaBuffer(Buffer):
    """A block of an arena: `segment` and `offset` say where, for peers that have mapped it."""

    __slots__ = ("arena", "offset", "segment")

    def __init__(
        self, view: memoryview, on_free: Callable[[Buffer], None], arena: Arena, segment: int, offset: int
    ) -> None:
        super().__init__(view, on_free)
        self.arena = arena
        self.segment = segment
        self.offset = offset


class Arena:
    """transport.base.Memory in shared memory.

    Thread safety: the reactor's thread; `close` after the reactor has stopped.

    Args:
        max_nbytes: upper bound of all segments (their memory is only taken when it is touched).
    """

    def __init__(self, max_nbytes: int = 8 << 30) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self.fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._current = -1
        self._used = 0
        self._free: dict[int, list[tuple[int, int]]] = {}

    def alloc(self, nbytes: int) -> ArenaBuffer:
        """Return a writable block of exactly `nbytes`, 64-byte aligned, not zeroed.

        Raises:
            BytePSError: the bound is reached, or the system has no memory.
        """
        size_class = max((nbytes - 1).bit_length(), _MIN_CLASS)
        blocks = self._free.get(size_class)
        segment, offset = blocks.pop() if blocks else self._carve(1 << size_class)
        return ArenaBuffer(self._views[segment][offset : offset + nbytes], self._give_back, self, segment, offset)

    def _carve(self, size: int) -> tuple[int, int]:
        if size > SEGMENT_NBYTES // 2:
            return self._add_segment(size), 0  # a large block has its own segment, reused like any block
        if self._current < 0 or self._used + size > SEGMENT_NBYTES:
            self._current = self._add_segment(SEGMENT_NBYTES)
            self._used = 0
        offset = self._used
        self._used += size
        return self._current, offset

    def _add_segment(self, nbytes: int) -> int:
        if self._nbytes + nbytes > self._max_nbytes:
            raise BytePSError(
                f"the shared memory of this process would grow beyond {self._max_nbytes} bytes",
                hint="raise BYTEPS_SHARED_MEMORY_BYTES, or lower BYTEPS_SCHEDULING_CREDIT",
            )
        try:
            fd = os.memfd_create("byteps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
                mapped = mmap.mmap(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise BytePSError(f"cannot make {nbytes} bytes of shared memory: {error}") from None
        self._nbytes += nbytes
        self.fds.append(fd)
        self._maps.append(mapped)
        self._views.append(memoryview(mapped))
        return len(self.fds) - 1

    def _give_back(self, buffer: Buffer) -> None:
        assert isinstance(buffer, ArenaBuffer)
        size_class = max((buffer.view.nbytes - 1).bit_length(), _MIN_CLASS)
        self._free.setdefault(size_class, []).append((buffer.segment, buffer.offset))
        forget_view(buffer)

    def close(self) -> None:
        """Unmap and close everything; memory that a buffer still refers to goes with the last of them."""
        for fd in self.fds:
            os.close(fd)
        for view, mapped in zip(self._views, self._maps, strict=True):
            try:
                view.release()
                mapped.close()
            except BufferError:
                pass  # somebody still holds a part of it: unmapped when that goes
        self.fds, self._maps, self._views = [], [], []
        self._free = {}
        self._current = -1
        self._nbytes = 0


def forget_view(buffer: Buffer) -> None:
    """Make a freed buffer's view unusable: a use after the release is an error, and nothing keeps the mapping alive."""
    try:
        buffer.view.release()
    except BufferError:
        pass  # an array over it is still alive somewhere, and will go by itself
