"""How long without a result is a stall: from how long results take, and not from what a stall delayed."""

import pytest

from torch_bps.core.patience import LEAST_S, MOST_S, Patience


def steady(patience: Patience, latency_s: float, results: int, begin_s: float = 0.0) -> float:
    now_s = begin_s
    for number in range(results):
        now_s = begin_s + 0.01 * number + latency_s
        patience.result(now_s - latency_s, now_s)
    return now_s


@pytest.mark.parametrize(("latency_s", "seconds"), [(0.002, LEAST_S), (0.2, 0.4), (20.0, MOST_S)])
def test_it_is_twice_what_results_take_within_bounds(latency_s: float, seconds: float) -> None:
    patience = Patience()
    steady(patience, latency_s, 100)
    assert patience.seconds == pytest.approx(seconds, rel=0.01)


def test_what_was_under_way_during_a_stall_does_not_make_the_next_one_longer() -> None:
    patience = Patience()
    now_s = steady(patience, 0.01, 100)
    for _ in range(10):
        issued_s, now_s = now_s, now_s + patience.seconds
        assert patience.is_over(now_s, 2, 1)
        patience.result(issued_s, now_s + 0.001)
    assert patience.seconds == LEAST_S


def test_it_forgets_what_was_slow() -> None:
    patience = Patience()
    now_s = steady(patience, 0.5, 100)
    steady(patience, 0.002, 50, now_s)
    assert patience.seconds == LEAST_S
