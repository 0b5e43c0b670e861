"""What `byteps plan` promises, against the formulas of the paper."""

from __future__ import annotations

import pytest

from torch_bps.cli.plan import main, plan, slowest_link
from torch_bps.core.placement import split


@pytest.mark.parametrize(
    ("nodes", "servers", "time"),
    [(4, 4, 1.0), (4, 0, 1.5), (4, 2, 1.2), (8, 8, 1.0), (8, 0, 1.75), (2, 0, 1.0), (2, 5, 1.0), (4, 9, 1.0)],
)
def test_time_in_units_of_the_gradients_through_a_link(nodes: int, servers: int, time: float) -> None:
    colocated, dedicated, _ = split(nodes, servers)
    assert slowest_link(nodes, servers, colocated, dedicated, 1.0, 1.0) == pytest.approx(time)


def test_a_faster_server_carries_more() -> None:
    colocated, dedicated, _ = split(4, 2, 10.0, 20.0)
    assert slowest_link(4, 2, colocated, dedicated, 10.0, 20.0) == pytest.approx(0.1)
    assert colocated == 0


def test_the_lines() -> None:
    first, second, last = plan(4, 2, 10.0, 0.0, 100.0)
    assert first.startswith("4 nodes at 10 Gb/s, 2 servers at 10 Gb/s: ")
    assert second == "all_reduce of 100 MB: 96.0 ms, ring all-reduce 120.0 ms: 1.25x"
    assert last == "4 servers would reach 1.50x, which is all that there is"
    assert "no gain from servers at 2 nodes" in plan(2, 2, 10.0, 0.0, 100.0)[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "1"],
        ["--nodes", "4", "--servers", "-1"],
        ["--nodes", "4", "--gbps", "0"],
        ["--nodes", "4", "--megabytes", "0"],
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[-1] in capsys.readouterr().err
