"""The split between co-located and dedicated servers: OSDI'20's where links are equal, else still the optimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_bps.core.split import Split, link_rates, split

rates = st.floats(0.5, 400)


def link_times(nodes: list[float], servers: list[float], shares: Split) -> list[float]:
    """Return how long each link is busy, counted byte by byte: pushes to others, results for others."""
    n = len(nodes)
    of_nodes = [(1 - own + (n - 1) * own) / rate for own, rate in zip(shares.colocated, nodes, strict=True)]
    return of_nodes + [n * share / rate for share, rate in zip(shares.dedicated, servers, strict=True)]


def room(nodes: list[float], servers: list[float], time: float) -> float:
    """Return the share of the load that fits into a time; below 0 where a node cannot even push in it."""
    n = len(nodes)
    if min(nodes) * time < 1:
        return -1.0
    on_nodes = sum((time * rate - 1) / (n - 2) for rate in nodes) if n > 2 else 1.0
    return on_nodes + time * sum(servers) / n


@given(nodes=st.lists(rates, min_size=2, max_size=12), servers=st.lists(rates, max_size=12))
def test_no_time_is_shorter_and_every_link_keeps_it(nodes: list[float], servers: list[float]) -> None:
    shares = split(nodes, servers)
    assert sum(shares.colocated) + sum(shares.dedicated) == pytest.approx(1.0)
    assert min(shares.colocated + shares.dedicated) >= 0
    assert max(link_times(nodes, servers, shares)) == pytest.approx(shares.time)
    assert room(nodes, servers, shares.time * (1 + 1e-9)) >= 1 - 1e-6
    assert room(nodes, servers, shares.time * (1 - 1e-6)) < 1


@given(nodes=st.lists(rates, min_size=2, max_size=12), servers=st.lists(rates, max_size=12), scale=st.floats(0.01, 100))
def test_only_the_ratio_of_the_rates_matters(nodes: list[float], servers: list[float], scale: float) -> None:
    one, other = split(nodes, servers), split([rate * scale for rate in nodes], [rate * scale for rate in servers])
    assert other.colocated == pytest.approx(one.colocated, abs=1e-9)
    assert other.dedicated == pytest.approx(one.dedicated, abs=1e-9)
    assert other.time * scale == pytest.approx(one.time)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 32, 100])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 40])
def test_equal_links_are_the_papers(n: int, k: int) -> None:
    shares = split([10.0] * n, [10.0] * k)
    if k < n:
        divisor = n * n + k * n - 2 * k
        assert shares.colocated == pytest.approx([(n - k) / divisor] * n)
        assert shares.dedicated == pytest.approx([2 * (n - 1) / divisor] * k)
        assert shares.time * 10 == pytest.approx(2 * n * (n - 1) / divisor)
    else:
        assert shares.colocated == [0.0] * n
        assert shares.dedicated == pytest.approx([1 / k] * k)
        assert shares.time * 10 == pytest.approx(1)
    assert f"{sum(shares.dedicated):.0%} of the load on the dedicated" in shares.sentence


@pytest.mark.parametrize("n", [1, 2, 7])
def test_without_dedicated_servers_each_node_has_its_share(n: int) -> None:
    shares = split([10.0] * n, [])
    assert shares.colocated == pytest.approx([1 / n] * n)
    assert shares.dedicated == []
    assert shares.time * 10 == pytest.approx(max(1, 2 * (n - 1) / n))  # a ring's
    assert f"1/{n} on each co-located one" in shares.sentence


def test_one_node_uses_the_dedicated_ones() -> None:
    shares = split([10.0], [1.0, 3.0])
    assert (shares.colocated, shares.dedicated) == ([0.0], [0.25, 0.75])
    assert shares.time == 0.25


def test_a_slow_node_sums_less_and_a_fast_server_more() -> None:
    slow, *fast = split([8.0, 10.0, 10.0, 10.0], []).colocated
    assert 0 < slow < min(fast)
    one, other = split([10.0] * 4, [5.0, 15.0]).dedicated
    assert other == pytest.approx(3 * one)
    assert split([10.0] * 4, [20.0] * 2).colocated == [0.0] * 4


@pytest.mark.parametrize(
    ("nodes", "servers", "counted", "sentence"),
    [
        ([0.0, 0.0], [0.0], [1.0, 1.0, 1.0], ""),
        ([10.0, 25.0], [40.0], [10.0, 25.0, 40.0], "links of 10 to 40 Gb/s"),
        ([10.0, 10.0], [], [10.0, 10.0], "links of 10 Gb/s"),
        ([10.0, 0.0], [40.0], [1.0, 1.0, 1.0], "set on 2 of 3 hosts: links count as equal"),
        ([10.0, 10.0], [-1.0], [1.0, 1.0, 1.0], "set on 2 of 3 hosts: links count as equal"),  # hostile
    ],
)
def test_rates_count_where_every_host_gives_one(
    nodes: list[float], servers: list[float], counted: list[float], sentence: str
) -> None:
    of_nodes, of_servers, said = link_rates(nodes, servers)
    assert of_nodes + of_servers == counted
    assert len(of_servers) == len(servers)
    assert said.endswith(sentence)
    assert bool(said) == bool(sentence)
