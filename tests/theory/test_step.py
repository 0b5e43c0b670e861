"""The step model: against steps worked out by hand, against DDP's own buckets, against figures computed before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Layer, Profile
from torch_bps.theory.step import (
    BUCKET_NBYTES,
    FIRST_BUCKET_NBYTES,
    GOODPUT,
    RING_OVERHEAD,
    SERVERS_OVERHEAD,
    Bucket,
    Cluster,
    buckets_of,
    layers_of,
    step_s,
)


def profile(*layers: tuple[int, float, float]) -> Profile:
    """A model of (bytes of gradients, forward_s, backward_s), in forward order."""
    made = (Layer(f"layer{i}", ((nbytes,),), forward, backward) for i, (nbytes, forward, backward) in enumerate(layers))
    return Profile("model", 1, tuple(made), itemsize=1)


TWO = profile((1, 1.0, 2.0), (4, 1.0, 2.0))
# backward:  layer 1 ready at 2, layer 0 at 4; forward: 1 + 1


@pytest.mark.parametrize(
    ("s_per_byte", "cross_barrier", "priority", "expected"),
    [
        (0.0, False, False, 6.0),  # computing alone
        (0.0, True, True, 6.0),
        (1.0, False, False, 9.0),  # carried 2 to 7, then the forward pass
        (1.0, False, True, 9.0),  # the order changes nothing when the barrier waits for all
        (1.0, True, False, 9.0),  # layer 0 comes last, at 7: nothing is gained
        (1.0, True, True, 8.0),  # layer 0 overtakes: 4 to 5, forward to 6; layer 1 comes at 7, forward to 8
        (2.0, True, True, 13.0),  # layer 1 from 2 to 4, layer 0 to 6, forward to 7; layer 1 to 12, forward to 13
        (2.0, True, False, 14.0),
    ],
)
def test_a_step_worked_out_by_hand(s_per_byte: float, cross_barrier: bool, priority: bool, expected: float) -> None:
    seconds = step_s(TWO, layers_of(TWO), s_per_byte, cross_barrier=cross_barrier, priority=priority)
    assert seconds == pytest.approx(expected)


def test_a_layer_waits_for_all_buckets_it_is_in() -> None:
    model = profile((4, 1.0, 1.0), (0, 1.0, 1.0))
    shared = [Bucket(0, 1, 3), Bucket(0, 0, 1)]
    # ready at 2; bucket 0 carried until 5, bucket 1 until 6: then both layers' forward
    assert step_s(model, shared, 1.0, cross_barrier=True) == pytest.approx(8.0)


def test_buckets_fill_in_the_order_of_the_backward_pass() -> None:
    model = profile((5, 0.0, 1.0), (3, 0.0, 1.0), (2, 0.0, 1.0), (2, 0.0, 1.0))
    assert buckets_of(model, 1, 5) == [Bucket(3, 3, 2), Bucket(1, 2, 5), Bucket(0, 0, 5)]
    assert buckets_of(model, 1, 6) == [Bucket(3, 3, 2), Bucket(0, 2, 10)]
    assert buckets_of(model, 100, 100) == [Bucket(0, 3, 12)]


@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_those_of_ddp(name: str) -> None:
    model = MODELS[name]()
    shapes = [shape for layer in reversed(model.layers) for shape in reversed(layer.shapes)]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    numbers, _ = dist._compute_bucket_assignment_by_size(
        tensors, [FIRST_BUCKET_NBYTES, BUCKET_NBYTES], [False] * len(tensors), list(range(len(tensors)))
    )
    expected = [sum(tensors[i].nbytes for i in bucket) for bucket in numbers]
    assert [bucket.nbytes for bucket in buckets_of(model)] == expected


@pytest.mark.parametrize(
    ("cluster", "ring", "servers"),
    [
        (Cluster(4, 4, 8.0), 1.5, 1.0),
        (Cluster(4, 0, 8.0), 1.5, 1.5),
        (Cluster(8, 8, 8.0), 1.75, 1.0),
        (Cluster(4, 2, 8.0), 1.5, 1.2),
        (Cluster(4, 4, 8.0, flow_gbps=16.0), 1.5, 1.0),
        (Cluster(4, 4, 8.0, flow_gbps=2.0), 6.0 / RING_OVERHEAD, 1.0),
        (Cluster(4, 4, 8.0, flow_gbps=1.0, lanes=1), 12.0 / RING_OVERHEAD, 2.0),
        (Cluster(2, 1, 8.0, flow_gbps=2.0, lanes=1), 4.0 / RING_OVERHEAD, 2.0),
    ],
)
def test_a_byte_on_links_of_a_gigabyte_per_second(cluster: Cluster, ring: float, servers: float) -> None:
    assert cluster.ring_s_per_byte() * GOODPUT / RING_OVERHEAD == pytest.approx(ring * 1e-9)
    assert cluster.servers_s_per_byte() * GOODPUT / SERVERS_OVERHEAD == pytest.approx(servers * 1e-9)


@pytest.mark.parametrize(
    ("cluster", "lanes"),
    [(Cluster(4, 4, 8.0), 1), (Cluster(4, 4, 8.0, flow_gbps=2.0), 1), (Cluster(4, 4, 8.0, flow_gbps=0.5), 4)],
)
def test_lanes_that_fill_the_links(cluster: Cluster, lanes: int) -> None:
    assert cluster.lanes_to_fill_links() == lanes


THEIR_RING_OVERHEAD = 1.05
GAINS = {
    # (gbps, flow_gbps) -> gain over the ring at 4 + 4 and 8 + 8, with a bucket a layer; from an independent model
    "vgg16": {(1, 0): (1.56, 1.82), (5, 0): (1.64, 1.89), (10, 0): (1.73, 1.99), (20, 0): (1.72, 1.95),
              (40, 0): (1.03, 1.15), (20, 10): (3.0, None), (20, 5): (5.6, None)},
    "resnet50": {(1, 0): (1.61, 1.87), (5, 0): (1.85, 2.10), (10, 0): (1.11, 1.24), (20, 0): (1.04, 1.04),
                 (40, 0): (1.02, 1.02), (20, 10): (1.08, None), (20, 5): (1.82, None)},
    "bert-large": {(1, 0): (1.55, 1.81), (5, 0): (1.58, 1.84), (10, 0): (1.62, 1.88), (20, 0): (1.70, 1.96),
                   (40, 0): (1.64, 1.86), (20, 10): (3.1, None), (20, 5): (6.0, None)},
}  # fmt: skip


@pytest.mark.parametrize("name", GAINS)
def test_gains_over_the_ring_are_those_of_an_independent_model(name: str) -> None:
    model = MODELS[name]()
    for (gbps, flow_gbps), expected in GAINS[name].items():
        for nodes, gain in zip((4, 8), expected, strict=True):
            if gain is not None:
                cluster = Cluster(nodes, nodes, gbps, flow_gbps=flow_gbps)
                ours = step_s(model, layers_of(model), cluster.servers_s_per_byte(), cross_barrier=True, priority=True)
                slower = 1.0 if flow_gbps else THEIR_RING_OVERHEAD / RING_OVERHEAD
                ring = step_s(model, buckets_of(model), cluster.ring_s_per_byte() * slower)
                assert ring / ours == pytest.approx(gain, rel=0.02), (nodes, gbps, flow_gbps)


LAYER = st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(0, 5))


@given(st.lists(LAYER, min_size=1, max_size=8), st.integers(1, 40), st.sampled_from([0.0, 0.25, 1.0]))
def test_no_step_beats_its_bounds(layers: list[tuple[int, int, int]], limit: int, s_per_byte: float) -> None:
    model = profile(*((nbytes, float(forward), float(backward)) for nbytes, forward, backward in layers))
    buckets = buckets_of(model, 1, limit)
    assert sum(bucket.nbytes for bucket in buckets) == model.nbytes
    barrier = step_s(model, buckets, s_per_byte)
    free = step_s(model, buckets, s_per_byte, cross_barrier=True, priority=True)
    in_order = step_s(model, buckets, s_per_byte, cross_barrier=True)
    assert max(model.compute_s, model.nbytes * s_per_byte) <= free + 1e-9
    assert free <= barrier + 1e-9
    assert in_order <= barrier + 1e-9
