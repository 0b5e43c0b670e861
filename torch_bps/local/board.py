"""One rank's shared memory: the owner writes, the other ranks of the group read.

    words   BELL        futex; goes up whenever anything below has changed
            STAMPED     how many operations the owner has said its statement of; that of operation s is in cell s % 2
            FINISHED    how many operations it is through with: their cells may be overwritten
            PUBLISHED   how many bytes of its stream may be read
            WANTS_SPACE whether it waits for others to take from its stream
            LEFT        whether it has left the group; BROKEN: whether the group is broken, as `text` tells
            GAVE_UP     (two) whether it gave up the operation of a cell, as `text` tells
            CONSUMED    (one a rank) how much of that rank's stream it has taken
    text    why it gave up, or what broke the group
    cells   two statements (local.statement)
    ring    the stream

Word and bytes are plain stores: x86 shows them to others in their order (local.futex).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from torch_bps.local import futex

CHUNK_NBYTES: Final = 256 << 10
"""of two ranks: less and they wait for each other too often, more and what one wrote is out of cache"""
_LARGEST_CHUNK_NBYTES: Final = 4 << 20

BELL, STAMPED, FINISHED, PUBLISHED, WANTS_SPACE, LEFT, BROKEN, _TEXT_LENGTH = range(8)
GAVE_UP: Final = 8
_LENGTH: Final = 10
CONSUMED: Final = 16
_TEXT_NBYTES: Final = 2048
_PAGE: Final = 4096


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def chunk_nbytes(size: int) -> int:
    """Return the largest piece of a stream in a group of `size` ranks.

    More than two cut a chunk among them, and may have to take turns on fewer cores: the shares are larger.
    """
    return min(2 * CHUNK_NBYTES * size, _LARGEST_CHUNK_NBYTES) if size > 2 else CHUNK_NBYTES


def ring_nbytes(size: int) -> int:
    """Return the size of a ring.

    It holds a chunk being written, one being read, one in between, and what is left unused where the next one would not
    fit before the end.
    """
    return 4 * chunk_nbytes(size)


def cell_nbytes(size: int) -> int:
    """Return how long a statement may be in a group of `size` ranks."""
    return _up(64 + 16 * size, 64)


def board_nbytes(size: int) -> int:
    """Return how much memory a rank's board takes in a group of `size` ranks."""
    return _ring_offset(size) + ring_nbytes(size)


def _ring_offset(size: int) -> int:
    return _up(8 * (CONSUMED + size) + _TEXT_NBYTES + 2 * cell_nbytes(size) + 64, _PAGE)


class Board:
    """The view of one rank's board.

    Args:
        memory: board_nbytes(size) bytes, page-aligned, all zero at first.
    """

    def __init__(self, memory: memoryview, size: int) -> None:
        text = _up(8 * (CONSUMED + size), 64)
        cells = text + _TEXT_NBYTES
        cell = cell_nbytes(size)
        ring = _ring_offset(size)
        self.words = memory[:text].cast("Q")
        self.ring = memory[ring : ring + ring_nbytes(size)]
        self._text = memory[text:cells]
        self._cells = (memory[cells : cells + cell], memory[cells + cell : cells + 2 * cell])
        self.bell_address = int(np.frombuffer(memory, np.uint8).ctypes.data)

    def ring_bell(self) -> None:
        """Wake those who wait for this rank (its owner only)."""
        words = self.words
        words[BELL] = (words[BELL] + 1) & 0xFFFFFFFF
        futex.wake(self.bell_address)

    def stamp(self, sequence: int, statement: bytes) -> None:
        """Say what operation `sequence` is here (its owner only)."""
        cell = sequence & 1
        self._cells[cell][: len(statement)] = statement
        words = self.words
        words[_LENGTH + cell] = len(statement)
        words[GAVE_UP + cell] = 0
        words[STAMPED] = sequence + 1

    def statement(self, sequence: int) -> bytes:
        """Return what the owner says about operation `sequence`, which it has stamped."""
        cell = sequence & 1
        return bytes(self._cells[cell][: self.words[_LENGTH + cell]])

    def tell(self, index: int, text: str) -> None:
        """Set word `index` (BROKEN, or GAVE_UP + cell), with the reason (its owner only)."""
        data = text.encode()[:_TEXT_NBYTES]
        self._text[: len(data)] = data
        self.words[_TEXT_LENGTH] = len(data)
        self.words[index] = 1
        self.ring_bell()

    def told(self) -> str:
        """Return the reason that came with BROKEN or GAVE_UP."""
        return bytes(self._text[: min(self.words[_TEXT_LENGTH], _TEXT_NBYTES)]).decode(errors="replace")

    def release(self) -> None:
        """Let go of the memory."""
        for view in (self.words, self.ring, self._text, *self._cells):
            try:
                view.release()
            except BufferError:
                pass  # an array over it is still somewhere; it goes by itself
