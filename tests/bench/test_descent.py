"""The search of `byteps tune`: what it tries, what it keeps, what it says."""

from __future__ import annotations

from torch_bps.bench.descent import Choice, descend
from torch_bps.bench.tune import advice, bucket_sizes
from torch_bps.theory.architectures import MODELS

BEGIN = {"partition_bytes": 4, "scheduling_credit": 0, "lanes": 2}
VALUES = {"partition_bytes": (1, 2, 4, 8), "scheduling_credit": (0, 6), "lanes": (1, 2, 4)}


def test_each_setting_is_tried_from_the_best_so_far_and_nothing_twice() -> None:
    tried: list[Choice] = []

    def seconds_of(choice: Choice) -> float:
        tried.append(choice)
        return abs(choice["partition_bytes"] - 2) + abs(choice["scheduling_credit"] - 6) + abs(choice["lanes"] - 4)

    best = {"partition_bytes": 2, "scheduling_credit": 6, "lanes": 4}
    assert descend(BEGIN, VALUES, seconds_of) == (best, 0)
    assert tried[0] == BEGIN
    assert len({tuple(choice.values()) for choice in tried}) == len(tried) == 1 + 3 + 1 + 2
    assert tried[-1] == best


def test_what_is_set_stays_where_nothing_is_faster() -> None:
    assert descend(BEGIN, VALUES, lambda choice: 1.0) == (BEGIN, 1.0)
    assert advice(BEGIN, BEGIN, 1.0)[0].startswith("keep what is set now")
    assert advice(BEGIN, {**BEGIN, "lanes": 4}, 1.01)[0].startswith("keep what is set now")


def test_the_advice_names_what_changes() -> None:
    lines = advice(BEGIN, {**BEGIN, "lanes": 4, "partition_bytes": 8}, 1.25)
    assert "1.25x" in lines[0]
    assert lines[1:] == ["export BYTEPS_PARTITION_BYTES=8", "export BYTEPS_LANES=4"]


def test_buckets_reach_as_far_as_the_megabytes() -> None:
    profile = MODELS["resnet50"]()
    assert sum(bucket_sizes(profile, 1000.0)) == profile.nbytes
    assert sum(bucket_sizes(profile, 30.0)) == 30_000_000
    assert all(nbytes % 4 == 0 and nbytes for nbytes in bucket_sizes(profile, 12.345678))
