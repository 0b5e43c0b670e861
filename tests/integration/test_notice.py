"""Whoever waits for a collective that fails notices it, in every way that PyTorch has to wait for one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integration.rig import run_ranks
from torch_bps.errors import MismatchError, PeerLostError

TIMES = 20


def call(ddp: DistributedDataParallel) -> None:
    dist.all_reduce(torch.ones(4))


def wait(ddp: DistributedDataParallel) -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait()


def wait_with_timeout(ddp: DistributedDataParallel) -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait(timedelta(seconds=20))


def future(ddp: DistributedDataParallel) -> None:
    dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()


def callback(ddp: DistributedDataParallel) -> None:
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda done: done.value()[0] * 2).wait()


def functional_wait(ddp: DistributedDataParallel) -> None:
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))


def functional_use(ddp: DistributedDataParallel) -> None:
    (functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1).sum().item()


def objects(ddp: DistributedDataParallel) -> None:
    dist.all_gather_object([None, None], "x")


def ddp_constructor(ddp: DistributedDataParallel) -> None:
    DistributedDataParallel(nn.Linear(3, 3))


def ddp_backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def ddp_backward_with_hook(ddp: DistributedDataParallel) -> None:
    hooked = ddp.__dict__.setdefault("hooked", [])
    if not hooked:  # both ranks construct it the first time
        hooked.append(True)
        ddp.register_comm_hook(None, chained_hook)
    ddp(torch.ones(2, 4)).sum().backward()


def chained_hook(state, bucket):  # torch looks at the annotations, and takes no strings
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


PLACES: dict[str, Callable[[DistributedDataParallel], None]] = {
    function.__name__: function
    for function in (
        call, wait, wait_with_timeout, future, callback, functional_wait, functional_use, objects, ddp_constructor,
        ddp_backward, ddp_backward_with_hook,
    )
}  # fmt: skip


def disagree(rank: int, size: int, place: str) -> int:
    """Fail many times at a place by calling something else on rank 1, the last time uncaught; print how often."""
    dist.init_process_group("byteps", timeout=timedelta(seconds=30))
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    noticed = 0
    for _ in range(TIMES - 1):
        try:
            once(rank, place, ddp)
        except MismatchError:
            noticed += 1
        except RuntimeError as error:  # C++ hands it on with its own type
            noticed += "MismatchError" in str(error)
        dist.barrier()
        if "ddp" in place:
            ddp = DistributedDataParallel(nn.Linear(4, 2))
    print(f"noticed {noticed}", flush=True)
    once(rank, place, ddp)
    return noticed


def once(rank: int, place: str, ddp: DistributedDataParallel) -> None:
    if rank == 1:
        dist.all_reduce(torch.ones(5, dtype=torch.float64))
    else:
        PLACES[place](ddp)


@pytest.mark.parametrize("mode", ["shm", "server"])
@pytest.mark.parametrize("place", PLACES)
def test_a_disagreement_is_noticed_everywhere(place: str, mode: str) -> None:
    env = {"BYTEPS_FORCE_DISTRIBUTED": "1"} if mode == "server" else {}
    for result in run_ranks(disagree, 2, place, env=env, check=False):
        assert f"noticed {TIMES - 1}" in result.output, result.output[-3000:]
        assert "MismatchError" in f"{type(result.error).__name__} {result.error}"
        assert result.exitcode == 1
        assert not result.orphans


def lose(rank: int, size: int, place: str) -> None:
    dist.init_process_group("byteps", timeout=timedelta(seconds=30))
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    PLACES[place](ddp)


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_rank_is_noticed_everywhere(place: str) -> None:
    result = run_ranks(lose, 2, place, check=False)[0]
    assert isinstance(result.error, PeerLostError) or "PeerLostError" in str(result.error), result.output[-3000:]
    assert "rank 1" in str(result.error)
    assert result.exitcode == 1
    assert not result.orphans
