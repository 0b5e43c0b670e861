"""A world of 2 ranks, of which one exists."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.backend.cross_barrier.held import HeldGroup


@pytest.fixture
def world_size() -> int:
    return 2


@pytest.fixture
def world(world_size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldGroup]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group wraps it, once more each time
    dist.init_process_group("held", store=dist.HashStore(), rank=0, world_size=world_size)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()
