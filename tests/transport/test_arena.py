"""Blocks: never two users of one byte, used again last-in-first-out, bounded, given back."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from torch_bps.errors import BytePSError, ClosedError, ProtocolError
from torch_bps.transport.arena import Arena, ArenaBuffer, map_received

MiB = 1 << 20


def check_no_overlap(buffers: list[ArenaBuffer]) -> None:
    spans = sorted((b.block.segment.number, b.block.offset, b.block.offset + b.block.view.nbytes) for b in buffers)
    for (segment, _, end), (next_segment, start, _) in itertools.pairwise(spans):
        assert segment != next_segment or end <= start


def test_random_use_never_overlaps_and_stays_within_the_bound() -> None:
    arena = Arena(24 * MiB, segment_nbytes=4 * MiB, keep_nbytes=8 * MiB)
    rng = random.Random(7)
    alive: list[ArenaBuffer] = []
    refused = 0
    for _ in range(3000):
        if alive and rng.random() < 0.5:
            alive.pop(rng.randrange(len(alive))).release()
            continue
        nbytes = rng.choice([0, 1, 4096, 4097, 100_000, MiB, 4 * MiB, 5 * MiB, 9 * MiB])
        try:
            buffer = arena.alloc(nbytes)
        except BytePSError:
            refused += 1
            continue
        assert buffer.view.nbytes == nbytes
        assert buffer.block.offset % 64 == 0
        alive.append(buffer)
        assert arena.nbytes <= 24 * MiB
        check_no_overlap(alive)
    assert 0 < refused < 1000
    assert arena.used_blocks == len(alive)
    for buffer in alive:
        buffer.release()
    assert arena.used_blocks == 0
    assert arena.nbytes <= 8 * MiB
    alive.clear()
    del buffer
    arena.close()


def test_the_last_block_freed_is_the_next_used() -> None:
    arena = Arena(64 * MiB)
    first, second = arena.alloc(MiB), arena.alloc(MiB)
    blocks = first.block, second.block
    first.release()
    second.release()
    assert arena.alloc(MiB).block is blocks[1]
    assert arena.alloc(MiB - 5).block is blocks[0]
    arena.close()


def test_a_block_is_freed_with_its_last_reference() -> None:
    arena = Arena(64 * MiB)
    buffer = arena.alloc(MiB).retain()
    buffer.release()
    assert arena.alloc(MiB).block is not buffer.block
    buffer.release()
    assert arena.alloc(MiB).block is buffer.block
    arena.close()


def test_the_bound_is_an_error_with_a_hint_and_memory_in_other_sizes_is_found() -> None:
    arena = Arena(4 * MiB, segment_nbytes=4 * MiB)
    big = arena.alloc(2 * MiB)
    rest = [arena.alloc(MiB), arena.alloc(MiB)]
    with pytest.raises(BytePSError, match="hint: raise BYTEPS_"):
        arena.alloc(1)
    big.release()
    small = [arena.alloc(5000) for _ in range(256)]  # cut out of the large one
    check_no_overlap([*rest, *small])
    for buffer in [*rest, *small]:
        buffer.release()
    whole = arena.alloc(4 * MiB)  # all small ones are given up for it
    whole.release()
    assert arena.nbytes == 4 * MiB
    arena.close()


def test_what_is_larger_than_a_segment_has_its_own_and_goes_back() -> None:
    dropped: list[int] = []
    arena = Arena(64 * MiB, segment_nbytes=MiB, keep_nbytes=2 * MiB)
    arena.on_drop.append(lambda segment: dropped.append(segment.number))
    arena.alloc(10 * MiB + 1).release()
    arena.alloc(10 * MiB + 1).release()
    assert dropped == [0, 1]  # a number never comes back
    assert arena.nbytes == 0
    arena.close()


def test_blocks_are_kept_up_to_keep_nbytes() -> None:
    arena = Arena(64 * MiB, segment_nbytes=MiB, keep_nbytes=4 * MiB)
    buffers = [arena.alloc(MiB) for _ in range(8)]
    for buffer in buffers:
        buffer.release()
    assert arena.nbytes == 4 * MiB
    arena.close()


def test_close_leaves_what_is_in_use_to_its_user() -> None:
    arena = Arena(64 * MiB)
    buffer = arena.alloc(5)
    buffer.view[:] = b"still"
    arena.close()
    arena.close()
    assert bytes(buffer.view) == b"still"
    buffer.release()
    with pytest.raises(ClosedError):
        arena.alloc(5)


def test_memory_can_be_mapped_by_others_and_cannot_be_resized() -> None:
    arena = Arena(MiB, segment_nbytes=MiB)
    buffer = arena.alloc(5)
    segment = buffer.block.segment
    buffer.view[:] = b"hello"
    assert map_received(segment.fd, MiB)[:5] == b"hello"
    for nbytes in (0, 2 * MiB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, nbytes)
    with pytest.raises(ProtocolError, match="has 1048576 bytes, not 4096"):
        map_received(segment.fd, 4096)
    assert not os.get_inheritable(segment.fd)
    buffer.release()
    arena.close()


def test_no_descriptors_left_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    arena = Arena(MiB)
    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(BytePSError, match="hint: see `ulimit -n`"):
        arena.alloc(1)
    arena.close()
