"""Rates and the printed table."""

from __future__ import annotations

import pytest

from torch_bps.bench import table
from torch_bps.bench.table import Row


def row(backend: str = "byteps", seconds: float = 0.001, wrong: int = 0) -> Row:
    return Row(
        *("all_reduce", backend, 4, 1_000_000, 250_000, "float32", "sum", seconds, 0.0005, wrong),
        user_s=0.0005,
        system_s=0.001,
        retransmits=7,
    )


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0), ("all_to_all", 0.75)],
)
def test_bus_bandwidth(collective: str, factor: float) -> None:
    assert table.bus_factor(collective, 4) == factor


def test_rates() -> None:
    assert row().algbw == pytest.approx(1.0)
    assert row().busbw == pytest.approx(1.5)
    assert row().cpu_s_per_gb == pytest.approx(1.5)


def test_columns_stand_under_their_names() -> None:
    first, second = table.heading("gloo").splitlines()
    peer = row("gloo", 0.003)
    lines = [first, second, table.line(row(wrong=3), peer), table.line(peer, peer)]
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == [
        "1000000", "250000", "float32", "sum", "byteps", "1000.0", "1.00", "1.50", "3", "3.00x", "2.00x", "1.50", "7",
    ]  # fmt: skip
    assert lines[3].split()[-3] == "6.00x"


@pytest.mark.parametrize(("text", "nbytes"), [("0", 0), ("64", 64), ("1K", 1024), ("3m", 3 << 20), ("2G", 2 << 30)])
def test_sizes(text: str, nbytes: int) -> None:
    assert table.nbytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1T", "1.5M", "x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        table.nbytes_of(text)


def test_json_has_the_rates() -> None:
    (value,) = table.as_json([row()])
    assert value["busbw"] == pytest.approx(1.5)
    assert value["backend"] == "byteps"
