"""The pool gives exact sizes, uses freed blocks again, and keeps no more than it may."""

from __future__ import annotations

import random

import pytest

from torch_bps.transport.base import Buffer
from torch_bps.transport.memory import Pool, copy_bytes

KiB, MiB = 1 << 10, 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MiB, MiB + 1])
def test_sizes_are_exact_and_writable(nbytes: int) -> None:
    buffer = Pool().alloc(nbytes)
    assert buffer.view.nbytes == nbytes
    assert buffer.view.format == "B"
    buffer.view[:] = bytes([7]) * nbytes
    buffer.release()


def _block(buffer: Buffer) -> object:
    return buffer.view.obj


def test_the_last_freed_block_is_used_first() -> None:
    pool = Pool()
    buffers = [pool.alloc(10 * KiB) for _ in range(3)]
    blocks = [_block(buffer) for buffer in buffers]
    for buffer in buffers:
        buffer.release()
    again = [pool.alloc(nbytes) for nbytes in (9 * KiB, 16 * KiB, 12 * KiB)]  # one class: up to 16 KiB
    assert [id(_block(buffer)) for buffer in again] == [id(block) for block in reversed(blocks)]
    assert [buffer.view.nbytes for buffer in again] == [9 * KiB, 16 * KiB, 12 * KiB]


def test_blocks_in_use_are_not_given_out_twice() -> None:
    pool, rng = Pool(), random.Random(4)
    live: list[tuple[Buffer, int]] = []
    for number in range(500):
        if live and rng.random() < 0.5:
            buffer, mark = live.pop(rng.randrange(len(live)))
            assert set(bytes(buffer.view)) <= {mark}
            buffer.release()
        buffer = pool.alloc(rng.randrange(20 * KiB))
        buffer.view[:] = bytes([number % 256]) * buffer.view.nbytes
        live.append((buffer, number % 256))


def test_a_block_comes_back_only_with_its_last_reference() -> None:
    pool = Pool()
    buffer = pool.alloc(5000).retain(2)
    block = _block(buffer)
    buffer.release()
    buffer.release()
    assert _block(pool.alloc(5000)) is not block
    buffer.release()
    assert _block(pool.alloc(5000)) is block


def test_freed_memory_is_kept_up_to_the_bound() -> None:
    pool = Pool(keep_nbytes=2 * MiB)
    buffers = [pool.alloc(MiB) for _ in range(4)]
    blocks = [_block(buffer) for buffer in buffers]
    for buffer in buffers:
        buffer.release()
    again = [pool.alloc(MiB) for _ in range(4)]
    assert sum(any(_block(one) is old for old in blocks) for one in again) == 2
    for buffer in again:
        buffer.release()
    blocks = [_block(buffer) for buffer in again]
    third = [pool.alloc(MiB) for _ in range(4)]
    assert sum(any(_block(one) is old for old in blocks) for one in third) == 2  # as many as before


def test_a_block_over_the_bound_is_exact_and_not_kept() -> None:
    pool = Pool(keep_nbytes=MiB)
    buffer = pool.alloc((64 << 20) + 1)
    block = _block(buffer)
    assert isinstance(block, bytearray)
    assert len(block) == (64 << 20) + 1
    buffer.release()
    assert _block(pool.alloc((64 << 20) + 1)) is not block


@pytest.mark.parametrize("nbytes", [0, 5, 65535, 65536, MiB + 3])
def test_copy_bytes(nbytes: int) -> None:
    source, into = random.Random(nbytes).randbytes(nbytes), bytearray(nbytes)
    copy_bytes(memoryview(into), memoryview(source))
    assert into == source
