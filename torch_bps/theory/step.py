"""How long a step takes at best: backward passes make gradients, a link carries them, the next forward waits for them.

    backward   |last layer ...        first layer|
    link              |  bucket | bucket |   ...    bucket |
    forward                                  ^ of the next step: after all buckets; with cross-barrier each layer
                                               after those it needs, which the link then carries first

The link is a fluid: it always carries the most urgent bucket that is ready (or the oldest), at one rate, whatever was
under way. A bucket leaves as DDP makes them: in the order of the backward pass, 1 MiB and then 25 MiB at least, when
the gradient that fills it is there.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch_bps.core.split import Split, split
from torch_bps.theory.profile import Profile

GOODPUT: Final = 0.956
"""of a link's rate: what TCP leaves for data, 1448 of 1514 bytes"""
RING_OVERHEAD: Final = 1.01
"""gloo's ring over the time that its bytes take: 1.003 at 500 Mbit/s, and so its steps of the headline table are what
the model says, to 0.5 %. It was 1.05 in a rig whose hosts dropped what they could not send at once."""
SERVERS_OVERHEAD: Final = 1.02
"""ours: the last partition of a bucket is carried twice"""
FIRST_BUCKET_NBYTES: Final = 1 << 20
BUCKET_NBYTES: Final = 25 << 20
"""DistributedDataParallel's defaults"""


@dataclass(frozen=True)
class Cluster:
    """Machines and links.

    Args:
        nodes: worker machines, 2 at least.
        servers: dedicated summation servers; fewer than nodes: the nodes' co-located servers share the load.
        gbps: rate of a node's link, each way; server_gbps: of a server's, 0: the same.
        flow_gbps: what one connection may carry; 0: no limit.
        lanes: connections between a node and each server.
    """

    nodes: int
    servers: int
    gbps: float
    server_gbps: float = 0.0
    flow_gbps: float = 0.0
    lanes: int = 2

    def ring_s_per_byte(self) -> float:
        """Return what a byte of gradients takes in a ring, which has one connection to the next node.

        A capped connection is filled: gloo in such a rig takes 6.31 M/R where 2(n-1)/n / goodput is 6.28 (n = 4, cap
        R/4), so that the overhead is that of full links only.
        """
        rounds = 2 * (self.nodes - 1) / self.nodes
        if self.flow_gbps and self.flow_gbps < self.gbps:
            return _s_per_byte(rounds / self.flow_gbps)
        return RING_OVERHEAD * _s_per_byte(rounds / self.gbps)

    def servers_s_per_byte(self) -> float:
        """Return what a byte of gradients takes through servers, at the split of the load that is best."""
        links, one_lane = self._servers_s_per_gbit()
        return SERVERS_OVERHEAD * _s_per_byte(max(links, one_lane / self.lanes))

    def lanes_to_fill_links(self) -> int:
        """Return how many lanes it takes so that connections limit nothing."""
        links, one_lane = self._servers_s_per_gbit()
        return max(1, math.ceil(one_lane / links - 1e-9))

    def _servers_s_per_gbit(self) -> tuple[float, float]:
        """Return the time of the fullest link, and of the fullest connection if there were one lane."""
        shares = self.split()
        fullest = max(*shares.colocated, *shares.dedicated)
        return shares.time, fullest / self.flow_gbps if self.flow_gbps else 0.0

    def split(self) -> Split:
        """Return how the servers share the load."""
        return split([self.gbps] * self.nodes, [self.server_gbps or self.gbps] * self.servers)


class Bucket(NamedTuple):
    """Gradients that travel together: of layers `first` to `last`; those of `first` come last."""

    first: int
    last: int
    nbytes: int


def buckets_of(
    profile: Profile, first_nbytes: float = FIRST_BUCKET_NBYTES, nbytes: float = BUCKET_NBYTES
) -> list[Bucket]:
    """Cut the gradients into DDP's buckets, in the order in which they become ready."""
    limit = first_nbytes
    buckets = []
    last: int | None = None
    filled = 0
    for index in reversed(range(len(profile.layers))):
        for shape in reversed(profile.layers[index].shapes):
            last = index if last is None else last
            filled += math.prod(shape) * profile.itemsize
            if filled >= limit:
                buckets.append(Bucket(index, last, filled))
                last, filled, limit = None, 0, nbytes
    if last is not None:
        first = next(index for index, layer in enumerate(profile.layers) if layer.shapes)
        buckets.append(Bucket(first, last, filled))
    return buckets


def layers_of(profile: Profile) -> list[Bucket]:
    """Return a bucket for each layer: as fine as the order of the gradients can be."""
    return [
        Bucket(index, index, layer.num_elements * profile.itemsize)
        for index, layer in reversed(list(enumerate(profile.layers)))
        if layer.shapes
    ]


def step_s(
    profile: Profile,
    buckets: Sequence[Bucket],
    s_per_byte: float,
    *,
    cross_barrier: bool = False,
    priority: bool = False,
) -> float:
    """Return how long a step takes.

    Args:
        buckets: as `buckets_of` or `layers_of` return them.
        s_per_byte: what a byte keeps the link busy.
        cross_barrier: a layer's forward waits for its own gradients only; else for all.
        priority: the link carries first what the next forward needs first; else what was ready first.
    """
    ready_s, computed_s = _backward(profile, buckets)
    done_s = _carry(buckets, ready_s, s_per_byte, priority)
    if not cross_barrier:
        return max(computed_s, *done_s) + profile.forward_s
    now_s = computed_s
    needed_s = [0.0] * len(profile.layers)
    for bucket, done in zip(buckets, done_s, strict=True):
        for index in range(bucket.first, bucket.last + 1):
            needed_s[index] = max(needed_s[index], done)
    for layer, needed in zip(profile.layers, needed_s, strict=True):
        now_s = max(now_s, needed) + layer.forward_s
    return now_s


def _s_per_byte(s_per_gbit: float) -> float:
    return s_per_gbit * 8e-9 / GOODPUT


def _backward(profile: Profile, buckets: Sequence[Bucket]) -> tuple[list[float], float]:
    """Return when each bucket is ready and when the backward pass ends, from its beginning."""
    ends_s = list(itertools.accumulate(layer.backward_s for layer in reversed(profile.layers)))
    ends_s.reverse()
    return [ends_s[bucket.first] for bucket in buckets], ends_s[0]


def _carry(buckets: Sequence[Bucket], ready_s: Sequence[float], s_per_byte: float, priority: bool) -> list[float]:
    """Return when the link has carried each bucket; `ready_s` never falls."""
    done_s = [0.0] * len(buckets)
    left_s = [bucket.nbytes * s_per_byte for bucket in buckets]
    waiting: list[tuple[int, int]] = []
    now_s = 0.0
    for number, until_s in enumerate([*ready_s, math.inf]):
        while waiting and now_s < until_s:
            served = waiting[0][1]
            spent_s = min(left_s[served], until_s - now_s)
            left_s[served] -= spent_s
            now_s += spent_s
            if left_s[served] <= 0.0:
                heapq.heappop(waiting)
                done_s[served] = now_s
        if number < len(buckets):
            now_s = max(now_s, until_s)
            heapq.heappush(waiting, (buckets[number].first if priority else number, number))
    return done_s
