"""local.futex: looking before sleeping."""

from __future__ import annotations

import time

from torch_bps.local import futex

WORDS = memoryview((7).to_bytes(8, "little") * 2).cast("Q")


def test_what_is_there_is_seen_at_once() -> None:
    assert futex.look(WORDS, 1, 7)
    assert futex.look(WORDS, 1, 3)


def test_looking_ends_soon_without_what_it_is_for() -> None:
    took_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        assert not futex.look(WORDS, 1, 8)
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 1e-3  # others may have had the core in between
