"""What `byteps plan` prints; the model behind it is tested in tests/theory."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_bps.cli.plan import main, plan


def test_the_lines() -> None:
    first, second, last = plan([10.0] * 4, [10.0] * 2, 100.0)
    assert first.startswith("4 nodes at 10 Gb/s, 2 servers at 10 Gb/s: 60% of the load on the dedicated servers")
    assert second == "all_reduce of 100 MB: 96.0 ms, ring all-reduce 120.0 ms: 1.25x"
    assert last == "4 servers would reach 1.50x, which is all that there is"
    assert "no gain from servers at 2 nodes" in plan([10.0] * 2, [10.0] * 2, 100.0)[-1]
    assert plan([10.0] * 3, [], 100.0)[-1] == "no gain: add dedicated servers"
    assert len(plan([10.0] * 3, [10.0] * 3, 100.0)) == 2  # all that there is


def test_the_lines_of_unequal_links() -> None:
    first, second, colocated, dedicated = plan([10.0, 20.0, 20.0, 10.0], [10.0, 5.0], 100.0)
    assert first.startswith("4 nodes at 10 to 20 Gb/s, 2 servers at 5 to 10 Gb/s: ")
    # T = (1 + 4/2) / (60/2 + 15/4) = 4/45 s for a Gbit, less than the 1/10 s that a slow node needs to push all
    assert second == "all_reduce of 100 MB: 80.0 ms, ring all-reduce 120.0 ms: 1.50x"
    assert colocated == "of the load, in %: 0.0, 31.2, 31.2, 0.0 on the co-located servers"
    assert dedicated == "                  25.0, 12.5 on the dedicated ones"


def test_a_rate_for_all_or_one_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for rates in (["--gbps", "25"], ["--gbps", "25,25,25", "--server-gbps", "25"]):
        assert main(["--nodes", "3", "--servers", "1", *rates]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "at 25 Gb/s" in texts[0]


# the first model's figures that this table is held to: 0.452 s, 0.323 s, 0.262 s
def test_the_table_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "vgg16", "--nodes", "4", "--servers", "4", "--gbps", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vgg16: 553 MB of gradients in 16 layers and 6 buckets; 512 samples a node and step"
    assert [line.split()[-3:] for line in lines[3:]] == [
        ["437.9", "4677", "1.00x"],
        ["323.2", "6336", "1.35x"],
        ["261.9", "7818", "1.67x"],
        ["261.0", "7847", "1.68x"],
        ["261.0", "7847", "1.68x"],
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
        ["--nodes", "4", "--gbps", "nan"],
        ["--nodes", "4", "--gbps", "10,x"],
        ["--nodes", "4", "--gbps", "10,20"],
        ["--nodes", "4", "--servers", "2", "--server-gbps", "1,2,3"],
        ["--nodes", "4", "--megabytes", "0"],
        ["--nodes", "4", "--model", "vgg16", "--flow-gbps", "-1"],
        ["--nodes", "4", "--model", "vgg16", "--lanes", "0"],
        ["--nodes", "2", "--model", "vgg16", "--gbps", "10,20"],
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    error = capsys.readouterr().err
    assert arguments[-2] in error
    assert arguments[-1] in error
