"""What `byteps plan` prints; the model behind it is tested in tests/theory."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_bps.cli.plan import main, plan
from torch_bps.core.placement import split
from torch_bps.theory.step import slowest_link


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


# the first model's figures that this table is held to: 0.452 s, 0.323 s, 0.262 s
def test_the_table_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "vgg16", "--nodes", "4", "--servers", "4", "--gbps", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vgg16: 553 MB of gradients in 16 layers and 6 buckets; 512 samples a node and step"
    assert [line.split()[-3:] for line in lines[3:]] == [
        ["451.8", "4533", "1.00x"],
        ["323.2", "6336", "1.40x"],
        ["261.9", "7818", "1.72x"],
        ["261.0", "7847", "1.73x"],
        ["261.0", "7847", "1.73x"],
    ]


def test_lanes_are_advised_where_connections_are_capped(capsys: pytest.CaptureFixture[str]) -> None:
    capped = ["--model", "resnet50", "--nodes", "4", "--servers", "4", "--gbps", "20", "--flow-gbps", "2"]
    assert main([*capped, "--lanes", "1"]) == 0
    assert "BYTEPS_LANES=3 would fill the links" in capsys.readouterr().out
    assert main([*capped, "--lanes", "3"]) == 0
    assert "BYTEPS_LANES" not in capsys.readouterr().out


def test_a_profile_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none.json"), "--nodes", "4"]) == 2
    assert "cannot read the profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "1"],
        ["--nodes", "4", "--servers", "-1"],
        ["--nodes", "4", "--gbps", "0"],
        ["--nodes", "4", "--megabytes", "0"],
        ["--nodes", "4", "--model", "vgg16", "--flow-gbps", "-1"],
        ["--nodes", "4", "--model", "vgg16", "--lanes", "0"],
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[-1] in capsys.readouterr().err
