"""Process groups of several fake ranks in this one process, and torch.distributed itself on top of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType

import pytest
import torch.distributed as dist

from tests.backend.values import SIZES
from tests.fakes import FakeGroup, Hub
from torch_bps.backend.process_group import ProcessGroupBytePS

TIMEOUT = timedelta(seconds=20)


class World:
    """A hub and its ranks' process groups."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.hub = Hub(size)
        store = dist.HashStore()
        self.groups = [
            ProcessGroupBytePS(self.hub.groups[rank] if size > 1 else None, store, rank, size, TIMEOUT, "w")
            for rank in range(size)
        ]

    def run(self, call: Callable[[ProcessGroupBytePS, int], dist.Work]) -> list[dist.Work]:
        """Make `call(group, rank)` on all ranks, wait for all, and return the works."""
        works = [call(group, rank) for rank, group in enumerate(self.groups)]
        for work in works:
            assert work.wait() is True
        return works

    def stop(self) -> None:
        for group in self.groups:
            group.shutdown()
        self.groups.clear()  # the gloo inside goes with them
        self.hub.stop()


@pytest.fixture
def make_world() -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make(size: int) -> World:
        worlds.append(World(size))
        return worlds[-1]

    yield make
    for world in worlds:
        world.stop()


@pytest.fixture
def world(make_world: Callable[[int], World]) -> World:
    return make_world(2)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds of all sizes, shared by a module: thousands of cases run on them."""
    worlds = {size: World(size) for size in SIZES}
    yield worlds
    for world in worlds.values():
        world.stop()


class FakeRuntime:
    """torch_bps.core.runtime, whose groups are rank 0 of a hub; the other ranks do what rank 0 does."""

    def __init__(self) -> None:
        self.hubs: list[Hub] = []

    def open_group(self, store: object, rank: int, size: int, **rest: object) -> FakeGroup:
        self.hubs.append(Hub(size, ghosts=tuple(other for other in range(size) if other != rank)))
        return self.hubs[-1].groups[rank]

    def stop(self) -> None:
        for hub in self.hubs:
            hub.stop()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    fake = FakeRuntime()
    module = ModuleType("torch_bps.core.runtime")
    module.open_group = fake.open_group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_bps.core.runtime", module)
    monkeypatch.setattr("torch_bps.core.runtime", module, raising=False)
    monkeypatch.delitem(sys.modules, "torch_bps.backend.create", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group wraps it, once more each time
    yield fake
    fake.stop()


@pytest.fixture
def job(runtime: FakeRuntime) -> Iterator[Hub]:
    """torch.distributed initialised with byteps, as rank 0 of 2."""
    dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2, timeout=TIMEOUT)
    yield runtime.hubs[0]
    if dist.is_initialized():
        dist.destroy_process_group()
