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


def split(nodes: int, servers: int, gbps_node: float = 1.0, gbps_server: float = 1.0) -> tuple[float, float, str]:
    """Share the load between co-located and dedicated servers so that all links end at the same time.

    With M bytes, a node's link carries M + (n - 2) m_g each way and a server's n m_c, where k m_c + n m_g = M.

    Args:
        nodes: n worker nodes, each with a co-located server.
        servers: k dedicated servers.
        gbps_node, gbps_server: rates of their links, in any unit.

    Returns:
        (m_g, m_c): the share of M that each co-located and each dedicated server gets, and a sentence.

    Source: OSDI'20 "A Unified Architecture for Accelerating Distributed DNN Training", section 4.2; the form for
    unequal links is ours.
    """
    n, k = nodes, servers
    if k == 0:
        return 1.0 / n, 0.0, f"no dedicated servers: 1/{n} on each co-located one"
    if n == 1:
        return 0.0, 1.0 / k, "one node: all on the dedicated servers"
    # (M + (n - 2) m_g) / b_g = n m_c / b_c  with  m_c = (M - n m_g) / k  and M = 1
    ratio = gbps_node / gbps_server
    m_g = (n * ratio / k - 1) / (n - 2 + n * n * ratio / k)
    m_g = max(0.0, m_g)
    m_c = (1.0 - n * m_g) / k
    what = f"{k * m_c:.0%} of the load on the dedicated servers, {n * m_g:.0%} on the co-located ones"
    return m_g, m_c, what
