"""Spreads, tables and result files of the benchmarks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks import harness, headline, memory, network, report
from benchmarks.cells import Cell
from benchmarks.harness import Column, Lines, Result

COLUMNS = (Column("way", "way"), Column("time (us)", "seconds", ".1f", 1e6), Column("GB/s", "rate", ".2f"))
ROWS = [{"way": "ours", "seconds": 0.00015, "rate": 2.0, "nbytes": 64}, {"way": "theirs", "seconds": 1.0, "nbytes": 64}]


def result() -> Result:
    return Result("ways", "Two ways", COLUMNS, ROWS, {"rounds": 3}, Lines("nbytes", "rate", "way"), ["all is well"])


def test_spread() -> None:
    assert harness.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "p99": 3.0, "samples": 3}
    assert harness.spread(list(range(1000)))["p99"] == 990


def test_tables_show_the_same_cells() -> None:
    assert [line.split() for line in harness.text_table(COLUMNS, ROWS).splitlines()] == [
        ["way", "time", "(us)", "GB/s"],
        ["ours", "150.0", "2.00"],
        ["theirs", "1000000.0"],
    ]
    assert len({len(line) for line in harness.text_table(COLUMNS, ROWS).splitlines()}) == 1
    assert harness.markdown_table(COLUMNS, ROWS).splitlines() == [
        "| way | time (us) | GB/s |",
        "| ---: | ---: | ---: |",
        "| ours | 150.0 | 2.00 |",
        "| theirs | 1000000.0 |  |",
    ]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "ways.json"
    result().write(file)
    found = harness.read(file)
    assert found is not None
    again, how = found
    assert again == Result(**{**vars(result()), "columns": list(COLUMNS)})
    assert {"command", "commit", "cpu", "torch", "environment"} <= how.keys()
    file.write_text("[]")
    assert harness.read(file) is None


def test_the_command_leaves_out_where_its_result_goes() -> None:
    argv = [str(harness.ROOT / "benchmarks/x.py"), "--json", "/here", "--sizes", "1K", "--json=/there"]
    assert harness.command(argv) == "python benchmarks/x.py --sizes 1K"


def test_the_report_has_every_result_and_leaves_out_other_files(tmp_path: Path) -> None:
    result().write(tmp_path / "ways.json")
    (tmp_path / "other.json").write_text(json.dumps([1]))
    report.render(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "## Two ways" in text
    assert "| ours | 150.0 | 2.00 |" in text
    assert "- all is well" in text
    assert "other" not in text


def test_the_report_has_what_the_headline_benchmark_wrote(tmp_path: Path) -> None:
    row = {"variant": "byteps", "step_s": 0.2, "min_s": 0.19, "max_s": 0.21, "images_per_s": 99.0, "wrong": 0}
    row |= {"gain": 1.5, "gain_limit": 1.6, "limit_s": 0.19}
    cell = {"cell": {**asdict(Cell("vgg16", 4, 4, 20.0)), "link_mbit": 125}, "rows": [row], "dropped": 3}
    found = {"about": headline.about(["--table"]), "cells": [{**cell, "scale": {"divide": 10.0, "stretch": 16.0}}]}
    (tmp_path / "headline_x.json").write_text(json.dumps(found))
    (tmp_path / "headline_x_bars.png").touch()
    report.render(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "`python benchmarks/headline.py --table`" in text
    assert "# vgg16, 4+4, 20 Gb/s (sizes / 10, times x 16, links of 125 Mbit/s)" in text
    assert "1.50x" in text
    assert "(headline_x_bars.png)" in text


def test_lines_of_a_plot() -> None:
    lines = Lines("nbytes", "rate", "way")
    rows = [{"way": "a", "nbytes": n, "rate": n / 2, "ranks": 2} for n in (4, 2)]
    assert report.series(rows, lines) == {"a": [(2, 1.0), (4, 2.0)]}
    rows.append({"way": "a", "nbytes": 2, "rate": 9.0, "ranks": 4})
    assert set(report.series(rows, lines)) == {"a, 2 ranks", "a, 4 ranks"}


def test_memory_of_a_process() -> None:
    assert memory.memory_of("VmHWM:\t  2000 kB\nVmRSS:\t  1000 kB\nRssAnon:\t 5 kB\n") == (1024000, 2048000)


def test_ratios_of_a_network_run() -> None:
    common = {"nbytes": 10**9, "limit_s": 1.0, "user_s": 0.5, "system_s": 0.25, "retransmits": 30, "calls": 10}
    ours, gloo = network.with_ratios([{**common, "seconds": 1.1}, {**common, "seconds": 2.2}])
    assert (ours["faster"], gloo["faster"]) == (2.0, 1.0)
    assert ours["of_limit"] == 1.1
    assert (ours["user_s_per_gb"], ours["system_s_per_gb"], ours["retransmits_per_gb"]) == (0.5, 0.25, 3.0)
