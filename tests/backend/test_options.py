"""pg_options: torch_bps.Options, nothing, or another backend's."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import torch_bps
from torch_bps.backend.options import config_from


def test_settings_are_checked_where_they_are_written():
    with pytest.raises(torch_bps.ConfigError, match="partition"):
        torch_bps.Options(partition_bites=1 << 20)
    with pytest.raises(torch_bps.ConfigError, match="lanes"):
        torch_bps.Options(lanes="many")


def test_options_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("BYTEPS_LANES", "3")
    assert config_from(None).lanes == 3
    assert config_from(torch_bps.Options(lanes=5)).lanes == 5
    assert repr(torch_bps.Options(lanes=5)) == "Options(lanes=5)"


def test_options_reach_the_group(runtime):
    seen = {}
    open_group = runtime.open_group

    def record(*args, config, **rest):
        seen.update(rest, config=config)
        return open_group(*args, **rest)

    import torch_bps.core

    torch_bps.core.runtime.open_group = record
    options = torch_bps.Options(lanes=7)
    dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2, pg_options=options)
    dist.destroy_process_group()
    assert seen["config"].lanes == 7
    assert seen["name"] == "0"
    assert seen["timeout_s"] == 1800


def test_options_of_another_backend_are_ignored():
    with pytest.warns(UserWarning, match="ignores pg_options of type _Options"):
        config_from(dist.ProcessGroupGloo._Options())
