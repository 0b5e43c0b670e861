"""Where partitions go: all ranks agree whatever came before, loads are as the weights say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_bps.core.partition import MIN_NBYTES, cut, partition_nbytes
from torch_bps.core.placement import Placement
from torch_bps.core.split import split

PARTITION_NBYTES = 1 << 20
BUCKET_NBYTES = 25 << 20
DDP_FIRST_BUCKET_NBYTES = 1 << 20

MIXED = [(2, 1), (4, 2), (4, 3), (8, 3), (8, 5), (16, 8), (32, 5), (32, 31), (100, 20), (100, 99)]
"""(worker nodes, dedicated servers)"""

weights_lists = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=20).filter(any)


def mixed(n: int, k: int) -> list[float]:
    shares = split([1.0] * n, [1.0] * k)
    return shares.colocated + shares.dedicated


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


def loads_of(weights: list[float], blocks: list[int], first: int = 0) -> list[int]:
    """Return the bytes on each engine of all_reduces of `blocks` bytes."""
    placement = Placement(weights)
    loads = [0] * len(weights)
    for sequence, nbytes in enumerate(blocks, first):
        size = partition_nbytes(
            nbytes, partition_bytes=PARTITION_NBYTES, round_length=placement.round_length, itemsize=4
        )
        parts = cut(nbytes, size)
        for engine, (_, length) in zip(placement.spread(sequence, 0, len(parts)), parts, strict=True):
            loads[engine] += length
    assert sum(loads) == sum(blocks)
    return loads


def overload(loads: list[int], weights: list[float]) -> float:
    """Return how much more the engine that ends last has than its share."""
    pairs = zip(loads, weights, strict=True)
    return max(load / weight for load, weight in pairs if weight) * sum(weights) / sum(loads)


def test_the_models_are_what_they_are_called() -> None:
    assert sum(MODELS["vgg16"]) == 138_357_544
    assert sum(MODELS["resnet50"]) == 25_557_032
    assert 330e6 < sum(MODELS["bert"]) < 340e6


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_engines", [2, 3, 7, 16])
@pytest.mark.parametrize("bucketed", [True, False], ids=["buckets", "tensors"])
def test_the_fullest_engine_has_at_most_3_percent_more_than_the_mean(
    model: str, num_engines: int, bucketed: bool
) -> None:
    sizes = MODELS[model]
    blocks = buckets(sizes) if bucketed else [4 * numel for numel in reversed(sizes)]
    weights = [1.0] * num_engines
    for iteration in range(3):
        loads = loads_of(weights, blocks, iteration * len(blocks))
        assert overload(loads, weights) <= 1.03


@pytest.mark.parametrize("nbytes", [16 * MIN_NBYTES, 3_000_000, 25 << 20, 17_000_004])
def test_every_single_block_loads_the_engines_evenly(nbytes: int) -> None:
    for sequence in range(3):
        assert overload(loads_of([1.0] * 16, [nbytes], sequence), [1.0] * 16) <= 1.001


@pytest.mark.parametrize(("n", "k"), [(2, 1), (4, 2), (4, 3), (8, 3), (8, 5), (16, 8)])
@pytest.mark.parametrize("model", MODELS)
def test_co_located_and_dedicated_servers_end_together(n: int, k: int, model: str) -> None:
    weights = mixed(n, k)
    assert overload(loads_of(weights, buckets(MODELS[model])), weights) <= 1.07


@given(weights=weights_lists, sequence=st.integers(0, 1 << 40), block=st.integers(0, 1 << 20))
def test_ranks_agree_whatever_came_before(weights: list[float], sequence: int, block: int) -> None:
    fresh, used = Placement(weights), Placement(weights)
    for earlier in range(3):  # an operation that the ranks disagreed about
        used.spread(earlier, 1, 17)
    assert fresh.home(sequence) == used.home(sequence) == used.spread(sequence, 0, 3)[0]
    engines = fresh.spread(sequence, block, 40)
    assert engines == used.spread(sequence, block, 40)
    assert engines[:7] == fresh.spread(sequence, block, 7)
    assert all(weights[engine] > 0 for engine in engines)


@given(weights=weights_lists, sequence=st.integers(0, 1000), block=st.integers(0, 1000), rounds=st.integers(1, 3))
def test_whole_rounds_are_in_proportion_wherever_they_begin(
    weights: list[float], sequence: int, block: int, rounds: int
) -> None:
    placement = Placement(weights)
    engines = placement.spread(sequence, block, rounds * placement.round_length)
    assert overload([engines.count(engine) for engine in range(len(weights))], weights) <= 1.25


@pytest.mark.parametrize(("n", "k"), MIXED)
def test_mixed_rounds_cost_little_over_the_optimum_and_are_short(n: int, k: int) -> None:
    weights = mixed(n, k)
    placement = Placement(weights)
    assert placement.round_length <= max(66, 4 * (n + k))
    turns = placement.spread(0, 0, placement.round_length)
    shares = [turns.count(engine) / len(turns) for engine in (0, n)]
    optimum_s = split([1.0] * n, [1.0] * k).time
    assert max(1 + (n - 2) * shares[0], n * shares[1]) <= 1.025 * optimum_s


def test_turns_are_evenly_spread() -> None:
    assert Placement([1.0, 3.0]).spread(0, 0, 8) == [1, 0, 1, 1, 1, 0, 1, 1]
    assert Placement([5.0] * 4).round_length == 4
    assert sorted(Placement([0.2, 0.0, 0.2]).spread(0, 0, 4)) == [0, 0, 2, 2]


def test_next_to_no_weight_is_none() -> None:
    assert set(Placement([0.003, 1.0]).spread(0, 0, 100)) == {1}


@pytest.mark.parametrize("weights", [[1.0] * 4, [1.0, 0.0, 3.0], mixed(4, 3), [1.0]])
def test_small_operations_come_out_in_proportion_too(weights: list[float]) -> None:
    period = Placement(weights).round_length
    assert overload(loads_of(weights, [400] * period), weights) <= 1.03
    assert overload(loads_of(weights, [400] * 1000), weights) <= 1.1


def test_operations_of_few_parts_that_follow_each_other_overlap_little() -> None:
    loads = loads_of([1.0] * 16, [4 * MIN_NBYTES] * 4)
    assert max(loads) <= 2 * MIN_NBYTES
    assert sum(load > 0 for load in loads) >= 12


def test_without_engines_there_is_no_round() -> None:
    assert Placement([]).round_length == 0


def test_engines_without_any_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="no engine has a weight"):
        Placement([0.0, 0.0])
