"""How blocks are cut: every byte once, whole elements, whole rounds of partitions that are alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_bps.core.partition import ALIGNMENT, MIN_NBYTES, cut, partition_nbytes
from torch_bps.wire.dtypes import DTYPES

PARTITION_NBYTES = 1 << 20


def size_of(nbytes: int, round_length: int = 1, itemsize: int = 1, partition_bytes: int = PARTITION_NBYTES) -> int:
    return partition_nbytes(nbytes, partition_bytes=partition_bytes, round_length=round_length, itemsize=itemsize)


@given(
    numel=st.integers(0, 1 << 26) | st.integers(0, 1 << 12),
    itemsize=st.sampled_from(sorted({dtype.itemsize for dtype in DTYPES})),
    round_length=st.integers(1, 600),
    # what core.config lets through, beside a group that was given less
    partition_bytes=st.integers(4096 // 64, 1 << 14).map(lambda lines: 64 * lines),
)
def test_partitions_cover_a_block_exactly(numel: int, itemsize: int, round_length: int, partition_bytes: int) -> None:
    nbytes = numel * itemsize
    size = size_of(nbytes, round_length, itemsize, partition_bytes)
    parts = cut(nbytes, size)
    position = 0
    for offset, length in parts:
        assert offset == position
        assert offset % ALIGNMENT == 0
        assert length % itemsize == 0
        assert length <= size <= partition_bytes
        position += length
    assert position == nbytes
    assert all(length == size for _, length in parts[:-1])
    assert parts[-1][1] or not nbytes
    if MIN_NBYTES < size < partition_bytes:
        rounds = -(-len(parts) // round_length)
        # whole rounds, but for what rounding up to cache lines takes off the end
        assert nbytes > (rounds * round_length - 1) * (size - ALIGNMENT)
    if size > MIN_NBYTES:
        assert 2 * size + 2 * ALIGNMENT > min(partition_bytes, nbytes // round_length)


@given(
    nbytes=st.integers(0, 1 << 26),
    size=st.integers(1, 1 << 12).map(lambda lines: 64 * lines),
)
def test_cut_takes_any_size(nbytes: int, size: int) -> None:
    parts = cut(nbytes, size)
    assert sum(length for _, length in parts) == nbytes
    assert [offset for offset, _ in parts] == list(range(0, max(nbytes, 1), size))


def test_no_bytes_are_one_empty_partition() -> None:
    assert cut(0, size_of(0)) == [(0, 0)]


@pytest.mark.parametrize(
    ("nbytes", "round_length", "lengths"),
    [
        (1, 16, [1]),
        (MIN_NBYTES, 16, [MIN_NBYTES]),
        (MIN_NBYTES + 1, 16, [MIN_NBYTES, 1]),
        (5 * MIN_NBYTES, 16, [MIN_NBYTES] * 5),
        (4 << 20, 16, [256 << 10] * 16),
        (4 << 20, 4, [1 << 20] * 4),
        (5 << 20, 4, [640 << 10] * 8),  # two rounds rather than one and a quarter
        (4 << 20, 1, [1 << 20] * 4),
        (3_000_000, 3, [1_000_000] * 3),  # a multiple of 64
        (3_000_003, 3, [1_000_064, 1_000_064, 999_875]),
        (128 << 20, 16, [1 << 20] * 128),
    ],
)
def test_blocks_are_cut_into_whole_rounds(nbytes: int, round_length: int, lengths: list[int]) -> None:
    assert [length for _, length in cut(nbytes, size_of(nbytes, round_length))] == lengths


@pytest.mark.parametrize("itemsize", [3, 5, 128])
def test_an_itemsize_that_partitions_would_tear_is_refused(itemsize: int) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        size_of(1000, itemsize=itemsize)


def test_every_dtype_can_be_cut() -> None:
    assert all(size_of(1 << 22, itemsize=dtype.itemsize) % dtype.itemsize == 0 for dtype in DTYPES)


@pytest.mark.parametrize(("nbytes", "parts"), [(1 << 20, 32), (4 << 20, 128), (25 << 20, 128), (1 << 30, 1024)])
def test_partitions_that_cross_a_network_fill_the_pipe(nbytes: int, parts: int) -> None:
    size = partition_nbytes(nbytes, partition_bytes=1 << 20, round_length=4, itemsize=4, pipeline=True)
    assert len(cut(nbytes, size)) == parts
