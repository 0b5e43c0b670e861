"""The rings of all boards as streams: each rank writes its own, and takes from the others' what is for it.

A piece lies in one run of the ring. Writer and readers know its size beforehand (from the statements), so they place it
alike: behind the last one, or at the ring's start where it would not fit before the end. Positions count bytes since
the group began and never wrap; pieces start at multiples of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_bps.local import futex
from torch_bps.local.board import CONSUMED, PUBLISHED, WANTS_SPACE, Board, chunk_nbytes, ring_nbytes

Sleep = Callable[[int, int, int], None]
"""(rank, word, value): return when that word of that rank's board is at least `value`, or raise"""


def _end(start: int, nbytes: int) -> int:
    return (start + nbytes + 63) & ~63


class Streams:
    """This rank's side of all streams. Thread safety: one thread at a time.

    Args:
        sleep: how to wait.
    """

    def __init__(self, boards: Sequence[Board], rank: int, sleep: Sleep) -> None:
        self.rank = rank
        self.chunk_nbytes = chunk_nbytes(len(boards))
        """no piece is larger, but for the gaps that align its blocks"""
        self._ring_nbytes = ring_nbytes(len(boards))
        self._boards = boards
        self._own = boards[rank]
        self._others = [peer for peer in range(len(boards)) if peer != rank]
        self._sleep = sleep
        self._written = 0
        self._free_until = self._ring_nbytes
        """position up to which the others leave room, as far as was looked"""
        self._taken = [0] * len(boards)

    def _place(self, position: int, nbytes: int) -> int:
        """Return where the next piece starts."""
        left = self._ring_nbytes - position % self._ring_nbytes
        return position + left if nbytes > left else position

    # ---- writing

    def reserve(self, nbytes: int) -> memoryview:
        """Return room for the next piece; it is sent by `publish`. Waits until the others have made room."""
        start = self._place(self._written, nbytes)
        end = _end(start, nbytes)
        if end > self._free_until:
            self._wait_for_space(end)
        self._written = end
        offset = start % self._ring_nbytes
        return self._own.ring[offset : offset + nbytes]

    def show(self) -> None:
        """Let the others see all that was written, when they look the next time."""
        self._own.words[PUBLISHED] = self._written

    def publish(self) -> None:
        """Let the others see all that was written, now."""
        self._own.words[PUBLISHED] = self._written
        self._own.ring_bell()

    def _wait_for_space(self, end: int) -> None:
        words = self._own.words
        word, needed = CONSUMED + self.rank, end - self._ring_nbytes
        if any(self._boards[peer].words[word] < needed for peer in self._others):
            words[PUBLISHED] = self._written  # else they could not take what they are waited for
            words[WANTS_SPACE] = 1
            self._own.ring_bell()  # a fence too: they see that it is wanted, or it is seen that they took
            for peer in self._others:
                self._sleep(peer, word, needed)
            words[WANTS_SPACE] = 0
        self._free_until = min(self._boards[peer].words[word] for peer in self._others) + self._ring_nbytes

    # ---- reading

    def next(self, peer: int, nbytes: int) -> int:
        """Return where the next piece of `peer`'s stream starts, and go on to the one behind it."""
        start = self._place(self._taken[peer], nbytes)
        self._taken[peer] = _end(start, nbytes)
        return start

    def position(self, peer: int) -> int:
        """Return where the next piece of `peer` may start: what lies before can be given up by `give_up`."""
        return self._taken[peer]

    def read(self, peer: int, start: int, nbytes: int) -> memoryview:
        """Return the piece at `start`, once `peer` has published it."""
        board = self._boards[peer]
        end = start + nbytes
        if board.words[PUBLISHED] < end:
            self._sleep(peer, PUBLISHED, end)
        offset = start % self._ring_nbytes
        return board.ring[offset : offset + nbytes]

    def give_up(self, positions: Sequence[int]) -> None:
        """Tell each peer that its stream before positions[peer] is not needed any more."""
        words = self._own.words
        for peer in self._others:
            words[CONSUMED + peer] = positions[peer]
        futex.fence()
        for peer in self._others:
            if self._boards[peer].words[WANTS_SPACE]:
                self._own.ring_bell()
                return

    def give_up_all(self) -> None:
        """Tell each peer that all its pieces so far are not needed any more."""
        self.give_up(self._taken)
