"""The entries that torch 2.13 reaches only through a C++ backend: they go through the gloo inside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed._functional_collectives  # defines the operators
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from tests.backend.conftest import World

LIMIT_S = 20.0


@pytest.fixture
def names(world: World) -> Iterator[list[str]]:
    names = [f"gloo-inside-{rank}" for rank in range(world.size)]
    for name, group in zip(names, world.groups, strict=True):
        _register_process_group(name, group)
    yield names
    for name in names:
        _unregister_process_group(name)


def on_all_ranks(call: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            call(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors


def test_all_gather_into_tensor_out(names):
    outs = [torch.zeros(4), torch.zeros(4)]

    def gather(rank: int) -> None:
        done = torch.ops._c10d_functional.all_gather_into_tensor_out(
            torch.full((2,), rank + 1.0), 2, names[rank], out=outs[rank]
        )
        torch.ops._c10d_functional.wait_tensor(done)

    on_all_ranks(gather)
    assert [out.tolist() for out in outs] == [[1, 1, 2, 2]] * 2


def test_it_costs_little_until_it_is_used(make_world):
    """Four descriptors a group (facts measured on torch 2.13), no connection; they go with the group."""
    before = len(os.listdir("/proc/self/fd"))
    make_world(3)
    assert len(os.listdir("/proc/self/fd")) - before == 3 * 4
