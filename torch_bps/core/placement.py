"""Which engine each partition goes to. Pure and without memory: every rank of a group comes to the same answer.

Engines take turns. A round of turns has each engine in proportion to its weight, evenly spread, and blocks are cut into
whole rounds (core.partition), so that each block loads the engines evenly by itself. The original BytePS hashes names,
which loads the fullest of 16 servers 1.2 to 2.5 times the mean; this stays within 1.03.

Nothing may depend on earlier operations, such as loads that add up: where ranks disagreed about one (a MismatchError
that the user caught) they would place all later ones differently, and wait for each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

_SHORT_ROUND = 64
_GOOD_ENOUGH = 1.02
"""overload for which no longer round is looked for"""


class Placement:
    """Places on `len(weights)` engines, in proportion to their weights (0, or next to nothing: never).

    Thread safety: any.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if weights and max(weights) <= 0:
            raise ValueError("no engine has a weight above 0")
        self._turns = _turns(tuple(weights))
        self._stride = _stride(len(self._turns))

    @property
    def round_length(self) -> int:
        """Number of partitions that load the engines exactly in proportion; 0 without engines."""
        return len(self._turns)

    def home(self, sequence: int) -> int:
        """Return the engine of part 0 of block 0: it depends on the sequence only."""
        return self._turns[sequence * self._stride % len(self._turns)]

    def spread(self, sequence: int, block: int, num_parts: int) -> list[int]:
        """Place the parts of a block: in turn; part 0 of block 0 at home."""
        turns = self._turns
        first = sequence * self._stride + block
        return [turns[(first + part) % len(turns)] for part in range(num_parts)]


@functools.lru_cache(maxsize=64)
def _turns(weights: tuple[float, ...]) -> list[int]:
    """Return a round of turns in which each engine comes in proportion to its weight, evenly spread."""
    counts = _counts(weights)
    length = sum(counts)
    owed = [0] * len(counts)
    turns = []
    for _ in range(length):
        owed = [debt + count for debt, count in zip(owed, counts, strict=True)]
        engine = owed.index(max(owed))
        owed[engine] -= length
        turns.append(engine)
    return turns


def _counts(weights: tuple[float, ...]) -> list[int]:
    """Return how often each engine comes in a round: a short one that overloads none by much."""
    if not weights:
        return []
    total = sum(weights)
    num_weighted = sum(weight > 0 for weight in weights)
    best: list[int] = []
    least = math.inf
    for length in range(num_weighted, max(_SHORT_ROUND, 4 * num_weighted) + 1):
        counts = [round(weight / total * length) for weight in weights]
        turns = sum(counts)
        if not turns:
            continue
        overload = max(count * total / (turns * weight) for count, weight in zip(counts, weights, strict=True) if count)
        if overload < least:
            best, least = counts, overload
        if least <= _GOOD_ENOUGH:
            break
    common = math.gcd(*best)
    return [count // common for count in best]


def _stride(length: int) -> int:
    """Return how far the first turn moves from one operation to the next: operations of few parts overlap little."""
    stride = max(1, round(0.618 * length))
    while math.gcd(stride, length) > 1:
        stride += 1
    return stride
