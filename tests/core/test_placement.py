"""Where partitions go: all ranks agree, loads are even or as the weights say, the split is OSDI'20's optimum."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_bps.core.partition import cut, partition_nbytes
from torch_bps.core.placement import Placement, split

NUM_ENGINES = 16
BUCKET_NBYTES = 25 << 20
DDP_FIRST_BUCKET_NBYTES = 1 << 20

weights_lists = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=20).filter(any)
blocks = st.lists(st.lists(st.integers(0, 1 << 22), min_size=1, max_size=30), max_size=30)


def conv(inputs: int, outputs: int, kernel: int = 3, bias: bool = True) -> list[int]:
    return [inputs * outputs * kernel * kernel] + [outputs] * bias


def linear(inputs: int, outputs: int) -> list[int]:
    return [inputs * outputs, outputs]


def vgg16() -> list[int]:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    sizes = [size for pair in itertools.pairwise(widths) for size in conv(*pair)]
    return sizes + linear(25088, 4096) + linear(4096, 4096) + linear(4096, 1000)


def resnet50() -> list[int]:
    def norm(width: int) -> list[int]:
        return [width, width]

    sizes = conv(3, 64, 7, bias=False) + norm(64)
    inputs = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for layer in range(depth):
            sizes += conv(inputs, width, 1, bias=False) + norm(width)
            sizes += conv(width, width, 3, bias=False) + norm(width)
            sizes += conv(width, 4 * width, 1, bias=False) + norm(4 * width)
            if layer == 0:
                sizes += conv(inputs, 4 * width, 1, bias=False) + norm(4 * width)
            inputs = 4 * width
    return sizes + linear(2048, 1000)


def bert() -> list[int]:
    width = 1024
    sizes = [30522 * width, 512 * width, 2 * width, width, width]
    for _ in range(24):
        sizes += 4 * linear(width, width) + [width, width]
        sizes += linear(width, 4 * width) + linear(4 * width, width) + [width, width]
    return sizes + linear(width, width)


def buckets(sizes: list[int]) -> list[int]:
    """Return the nbytes of DDP's buckets of float32 gradients, the last layers first."""
    result, current, limit = [], 0, DDP_FIRST_BUCKET_NBYTES
    for numel in reversed(sizes):
        current += 4 * numel
        if current >= limit:
            result.append(current)
            current, limit = 0, BUCKET_NBYTES
    return [*result, current] if current else result


MODELS = {"vgg16": vgg16(), "resnet50": resnet50(), "bert": bert()}


def partitions(nbytes: int) -> list[int]:
    size = partition_nbytes(nbytes, partition_bytes=1 << 20, num_engines=NUM_ENGINES, itemsize=4)
    return [length for _, length in cut(nbytes, size)]


def loads_of(placement: Placement, blocks: list[list[int]], num_engines: int, first: int = 0) -> list[int]:
    loads = [0] * num_engines
    for sequence, sizes in enumerate(blocks, first):
        for engine, nbytes in zip(placement.assign(sequence, sizes), sizes, strict=True):
            loads[engine] += nbytes
    return loads


def imbalance(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads)


def test_the_models_are_what_they_are_called() -> None:
    assert sum(MODELS["vgg16"]) == 138_357_544
    assert sum(MODELS["resnet50"]) == 25_557_032
    assert 330e6 < sum(MODELS["bert"]) < 340e6


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bucketed", [True, False], ids=["buckets", "tensors"])
def test_the_fullest_engine_has_at_most_7_percent_more_than_the_mean(model: str, bucketed: bool) -> None:
    sizes = MODELS[model]
    nbytes = buckets(sizes) if bucketed else [4 * numel for numel in reversed(sizes)]
    loads = loads_of(Placement([1.0] * NUM_ENGINES), [partitions(size) for size in nbytes], NUM_ENGINES)
    assert sum(loads) == 4 * sum(sizes)
    assert imbalance(loads) <= 1.07


@pytest.mark.parametrize("model", MODELS)
def test_later_iterations_stay_even(model: str) -> None:
    one = [partitions(size) for size in buckets(MODELS[model])]
    placement = Placement([1.0] * NUM_ENGINES)
    for iteration in range(3):
        loads = loads_of(placement, one, NUM_ENGINES, iteration * len(one))
        assert imbalance(loads) <= 1.07


@given(weights=weights_lists, blocks=blocks)
def test_two_placements_that_see_the_same_agree(weights: list[float], blocks: list[list[int]]) -> None:
    one, other = Placement(weights), Placement(weights)
    for sequence, sizes in enumerate(blocks):
        assert one.assign(sequence, sizes) == other.assign(sequence, sizes)
        assert one.spread(sequence, 3, 5) == other.spread(sequence, 3, 5)


@given(weights=weights_lists, blocks=blocks, sequence=st.integers(0, 1 << 40))
def test_home_depends_on_the_sequence_only(weights: list[float], blocks: list[list[int]], sequence: int) -> None:
    fresh, used = Placement(weights), Placement(weights)
    for earlier, sizes in enumerate(blocks):
        engines = used.assign(earlier, sizes)
        assert len(engines) == len(sizes)
        assert engines[0] == fresh.home(earlier)
        assert all(weights[engine] > 0 for engine in engines)
    assert used.home(sequence) == fresh.home(sequence)
    assert weights[fresh.home(sequence)] > 0


@given(weights=weights_lists, sequence=st.integers(0, 1 << 40), block=st.integers(0, 1 << 20))
def test_spread_depends_on_its_arguments_only_and_skips_engines_without_weight(
    weights: list[float], sequence: int, block: int
) -> None:
    fresh, used = Placement(weights), Placement(weights)
    used.assign(0, [100, 200, 300])
    engines = fresh.spread(sequence, block, 40)
    assert engines == used.spread(sequence, block, 40)
    assert engines[:7] == fresh.spread(sequence, block, 7)
    assert all(weights[engine] > 0 for engine in engines)


def test_homes_go_round() -> None:
    placement = Placement([1.0, 0.0, 2.0, 1.0])
    assert [placement.home(sequence) for sequence in range(6)] == [0, 2, 3, 0, 2, 3]


@pytest.mark.parametrize("weights", [[1.0, 3.0], [0.1, 0.1, 0.4, 0.4], [0.0, 1.0, 2.0, 5.0]])
def test_loads_are_in_proportion_to_the_weights(weights: list[float]) -> None:
    loads = loads_of(Placement(weights), [[1 << 20] * 64 for _ in range(20)], len(weights))
    for load, weight in zip(loads, weights, strict=True):
        assert load / sum(loads) == pytest.approx(weight / sum(weights), rel=0.03, abs=0)


@pytest.mark.parametrize("weights", [[1.0, 3.0], [0.1, 0.1, 0.4, 0.4], [0.0, 1.0, 2.0, 5.0], [1.0] * 5, [0.003, 1.0]])
@pytest.mark.parametrize("num_parts", [1, 7, 64])
def test_turns_are_in_proportion_to_the_weights(weights: list[float], num_parts: int) -> None:
    placement = Placement(weights)
    counts = [0] * len(weights)
    for sequence in range(960):
        for engine in placement.spread(sequence, 0, num_parts):
            counts[engine] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert count / sum(counts) == pytest.approx(weight / sum(weights), abs=0.01)


def test_small_operations_come_out_even_too() -> None:
    loads = loads_of(Placement([1.0] * 4), [[400]] * 400, 4)
    assert imbalance(loads) == 1.0


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.0, 3.0]])
def test_loads_do_not_grow_for_ever(weights: list[float]) -> None:
    one, huge = Placement(weights), 1 << 49
    for sequence in range(50):
        one.assign(sequence, [huge, huge, huge])
    assert max(one._loads) < 1 << 53  # whole numbers in a float: ranks agree to the byte
    loads = loads_of(one, [[1 << 20] * 60 for _ in range(40)], len(weights), first=50)
    assert all((load > 0) == (weight > 0) for load, weight in zip(loads, weights, strict=True))


def test_engines_without_any_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="no engine has a weight"):
        Placement([0.0, 0.0])


# ---- co-located and dedicated servers


@pytest.mark.parametrize("n", [2, 3, 4, 8, 32, 100])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 40])
def test_split_is_the_papers(n: int, k: int) -> None:
    colocated, dedicated, sentence = split(n, k)
    assert n * colocated + k * dedicated == pytest.approx(1.0)
    if k < n:
        divisor = n * n + k * n - 2 * k
        assert colocated == pytest.approx((n - k) / divisor)
        assert dedicated == pytest.approx(2 * (n - 1) / divisor)
    else:
        assert colocated == 0.0
        assert dedicated == pytest.approx(1 / k)
    assert f"{k * dedicated:.0%} of the load on the dedicated" in sentence


@pytest.mark.parametrize("n", [1, 2, 7])
def test_without_dedicated_servers_each_node_has_its_share(n: int) -> None:
    colocated, dedicated, sentence = split(n, 0)
    assert (colocated, dedicated) == (pytest.approx(1 / n), 0.0)
    assert "no dedicated servers" in sentence


def test_one_node_uses_the_dedicated_ones() -> None:
    assert split(1, 4)[:2] == (0.0, 0.25)


def link_times(n: int, shares: tuple[float, float], gbps_node: float, gbps_server: float) -> tuple[float, float]:
    colocated, dedicated = shares
    return (1 + (n - 2) * colocated) / gbps_node, n * dedicated / gbps_server


@given(
    n=st.integers(2, 200),
    k=st.integers(1, 200),
    gbps_node=st.floats(1, 400),
    gbps_server=st.floats(1, 400),
)
def test_unequal_links_end_together_or_nothing_is_co_located(
    n: int, k: int, gbps_node: float, gbps_server: float
) -> None:
    colocated, dedicated, _ = split(n, k, gbps_node, gbps_server)
    assert colocated >= 0
    assert dedicated > 0
    assert n * colocated + k * dedicated == pytest.approx(1.0)
    node_s, server_s = link_times(n, (colocated, dedicated), gbps_node, gbps_server)
    if colocated > 0:
        assert node_s == pytest.approx(server_s)
    else:
        assert server_s <= node_s * (1 + 1e-9)  # the dedicated links are idle sooner: nothing to take off them


@given(n=st.integers(2, 50), k=st.integers(1, 49), scale=st.floats(0.01, 100))
def test_only_the_ratio_of_the_rates_matters(n: int, k: int, scale: float) -> None:
    assert math.isclose(split(n, k, 10, 40)[0], split(n, k, 10 * scale, 40 * scale)[0], abs_tol=1e-12)
