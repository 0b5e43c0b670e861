"""Memory that another process can map: memfds cut into blocks, and the mapping of a peer's memfds.

    arena ── segment 0 (memfd, 64 MiB, sparse) ── block | block | block | tail, not cut yet
          ├─ segment 1                         ── ...
          └─ segment 2 (one large block)

Blocks are powers of two from 4 KiB on; what is larger than a segment gets a segment of its own. A freed block goes to
its size's list and is the next to be used: its pages are there and still in cache. A segment without used blocks
is given up when the arena holds more than it should keep; its number is never used again.
A memfd has no name in /dev/shm, so the size of that file system does not matter, and it ends with its last user.

Used by transport.shm, and by whoever wants to send without a copy. Knows no sockets.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from torch_bps.errors import BytePSError, ClosedError, ProtocolError
from torch_bps.transport.base import Buffer

_MIN_BLOCK_NBYTES: Final = 4096
_SEGMENT_NBYTES: Final = 64 << 20
_KEEP_NBYTES: Final = 512 << 20
_MAX_NBYTES: Final = 4 << 30
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""without them a peer could shorten the file, and reading it here would be a SIGBUS"""


class Segment:
    """One memfd of ours and its mapping."""

    __slots__ = ("fd", "map", "nbytes", "number", "used_blocks")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.used_blocks = 0
        self.fd = os.memfd_create("byteps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self.map = _map(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the memfd; the mapping ends now, or with the last view that somebody still has."""
        os.close(self.fd)
        self.unmap()

    def unmap(self) -> None:
        """End the mapping unless somebody still looks at it."""
        try:
            self.map.close()
        except BufferError:
            pass


class Block(NamedTuple):
    """A piece of a segment."""

    segment: Segment
    offset: int
    view: memoryview


class ArenaBuffer(Buffer):
    """A buffer in shared memory: the first bytes of `block`."""

    __slots__ = ("arena", "block")

    def __init__(self, arena: Arena, block: Block, nbytes: int) -> None:
        super().__init__(block.view[:nbytes], arena._give_back)
        self.arena = arena
        self.block = block


class Arena:
    """transport.base.Memory in memfds.

    Thread safety: one thread (the reactor's).

    Args:
        max_nbytes: no more than this is ever taken from the system.
        segment_nbytes: size of a segment; a power of two. Smaller where `max_nbytes` is.
        keep_nbytes: segments without used blocks beyond this total go back to the system.

    Attributes:
        used_blocks: how many buffers live.
        nbytes: size of all segments.
        on_drop: called with each segment that goes back to the system.
        on_close: called when the arena is closed.
    """

    def __init__(
        self,
        max_nbytes: int = _MAX_NBYTES,
        *,
        segment_nbytes: int = _SEGMENT_NBYTES,
        keep_nbytes: int = _KEEP_NBYTES,
    ) -> None:
        self._max_nbytes = max(max_nbytes, _MIN_BLOCK_NBYTES)
        self._segment_nbytes = min(segment_nbytes, 1 << (self._max_nbytes.bit_length() - 1))
        self._keep_nbytes = keep_nbytes
        self._segments: dict[int, Segment] = {}
        self._next_number = 0
        self._free: dict[int, list[Block]] = {}
        self._tail: Segment | None = None
        self._tail_offset = 0
        self._closed = False
        self.used_blocks = 0
        self.nbytes = 0
        self.on_drop: list[Callable[[Segment], None]] = []
        self.on_close: list[Callable[[], None]] = []

    def alloc(self, nbytes: int) -> ArenaBuffer:
        """Return a writable buffer of exactly `nbytes`, page-aligned, not zeroed.

        Raises:
            BytePSError: `max_nbytes` are in use, or the system has no more memory or descriptors.
        """
        if nbytes <= self._segment_nbytes:
            size = 1 << max((nbytes - 1).bit_length(), 12)
        else:
            size = -(-nbytes // _MIN_BLOCK_NBYTES) * _MIN_BLOCK_NBYTES
        blocks = self._free.get(size)
        block = blocks.pop() if blocks else self._new_block(size)
        block.segment.used_blocks += 1
        self.used_blocks += 1
        return ArenaBuffer(self, block, nbytes)

    def close(self) -> None:
        """Give everything back; memory that somebody still looks at stays mapped until they stop."""
        if self._closed:
            return
        self._closed = True
        for on_close in self.on_close:
            on_close()
        for blocks in self._free.values():
            for block in blocks:
                forget_view(block)
        self._free.clear()
        self._tail = None
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self.nbytes = 0

    # ---- inside

    def _give_back(self, buffer: Buffer) -> None:
        assert isinstance(buffer, ArenaBuffer)
        forget_view(buffer)
        block = buffer.block
        segment = block.segment
        segment.used_blocks -= 1
        self.used_blocks -= 1
        if self._closed:
            forget_view(block)
            segment.unmap()
            return
        self._free.setdefault(block.view.nbytes, []).append(block)
        if segment.used_blocks == 0 and self.nbytes > self._keep_nbytes:
            self._drop(segment)

    def _new_block(self, size: int) -> Block:
        if self._closed:
            raise ClosedError("the shared memory of this process was closed")
        fits_tail = self._tail is not None and self._tail_offset + size <= self._tail.nbytes
        if size > self._segment_nbytes:
            if self._has_room(size):
                return self._cut(self._add_segment(size), 0, size)
        elif fits_tail or self._has_room(self._segment_nbytes):
            return self._cut_tail(size)
        else:
            for larger in sorted(self._free):
                if larger > size and self._free[larger]:
                    return self._halve(self._free[larger].pop(), size)
        raise BytePSError(
            f"no {size} bytes of shared memory are left: {self.used_blocks} buffers are in use, "
            f"{self.nbytes} of {self._max_nbytes} bytes are taken from the system",
            hint="raise BYTEPS_SHARED_MEMORY_BYTES, or lower the credit so that fewer bytes are in flight",
        )

    def _has_room(self, nbytes: int) -> bool:
        if self.nbytes + nbytes > self._max_nbytes:
            for segment in [segment for segment in self._segments.values() if segment.used_blocks == 0]:
                self._drop(segment)
        return self.nbytes + nbytes <= self._max_nbytes

    def _add_segment(self, nbytes: int) -> Segment:
        try:
            segment = Segment(self._next_number, nbytes)
        except (OSError, ValueError) as error:
            raise BytePSError(
                f"the system gives no {nbytes} bytes of shared memory: {error}",
                hint="see `ulimit -n` for descriptors, and the container's memory limit",
            ) from error
        self._segments[segment.number] = segment
        self._next_number += 1
        self.nbytes += nbytes
        return segment

    def _cut_tail(self, size: int) -> Block:
        """Return the next block of the tail, or of a new segment; what the old tail has left is cut up and kept."""
        tail = self._tail
        if tail is not None and self._tail_offset + size > tail.nbytes:
            while (left := tail.nbytes - self._tail_offset) > 0:
                piece = 1 << (left.bit_length() - 1)
                self._free.setdefault(piece, []).append(self._cut(tail, self._tail_offset, piece))
                self._tail_offset += piece
            tail = None
        if tail is None:
            tail = self._tail = self._add_segment(self._segment_nbytes)
            self._tail_offset = 0
        block = self._cut(tail, self._tail_offset, size)
        self._tail_offset += size
        return block

    def _halve(self, block: Block, size: int) -> Block:
        segment, offset, view = block
        nbytes = view.nbytes
        while nbytes > size:
            nbytes //= 2
            self._free.setdefault(nbytes, []).append(self._cut(segment, offset + nbytes, nbytes))
        return self._cut(segment, offset, size)

    def _cut(self, segment: Segment, offset: int, size: int) -> Block:
        return Block(segment, offset, memoryview(segment.map)[offset : offset + size])

    def _drop(self, segment: Segment) -> None:
        for size, blocks in list(self._free.items()):
            self._free[size] = [block for block in blocks if block.segment is not segment]
            for block in blocks:
                if block.segment is segment:
                    forget_view(block)
        if self._tail is segment:
            self._tail = None
        del self._segments[segment.number]
        self.nbytes -= segment.nbytes
        for on_drop in self.on_drop:
            on_drop(segment)
        segment.close()


def forget_view(owner: Buffer | Block) -> None:
    """Make the view of freed memory unusable: a use of it is an error then, and it keeps no mapping alive."""
    try:
        owner.view.release()
    except BufferError:
        pass  # an array over it is still somewhere; it goes by itself


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    return mmap.mmap(fd, nbytes)  # keeps a copy of the descriptor until it is unmapped


def map_received(fd: int, nbytes: int) -> mmap.mmap:
    """Return the memory of a memfd that a peer sent and said to be of `nbytes`; the caller closes `fd`.

    Raises:
        ProtocolError: not a memfd, not sealed against a change of its size, or of another size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        actual_nbytes = os.fstat(fd).st_size
        if seals & _SEALS != _SEALS:
            raise ProtocolError("the peer's memory is not sealed: it could shrink while it is read")
        if actual_nbytes != nbytes or nbytes == 0:
            raise ProtocolError(f"the peer's memory has {actual_nbytes} bytes, not {nbytes}")
        return _map(fd, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"the peer's descriptor is no memory that can be mapped: {error}") from error
