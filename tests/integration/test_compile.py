"""torch.compile of DDP, FSDP2 and of functions with collectives: the weights are those of gloo, and of eager runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.integration.checks import Check, Suite
from tests.integration.models import CLASSES, WIDTH, batches, fit, sgd

Weights = dict[str, torch.Tensor]


def wide() -> nn.Sequential:
    """Return a model of more than one bucket; the compiler wants none below 1 MiB."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, CLASSES))


def whole(model: nn.Module) -> Weights:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def check_near(actual: Weights, eager: Weights) -> Weights:
    """Check a compiled run against an eager one: kernels round in other ways, sums do not."""
    torch.testing.assert_close(actual, eager, rtol=1e-4, atol=1e-5)
    return actual


def ddp(rank: int, backend: str, mode: str | bool = True, compiled_backward: bool = False) -> Weights:
    eager = DistributedDataParallel(wide(), bucket_cap_mb=1)
    fit(eager, sgd(eager), rank)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=mode, compiled_autograd=compiled_backward):
        model = DistributedDataParallel(wide(), bucket_cap_mb=1)
        run = torch.compile(model, backend=backend)
        fit(run, sgd(model), rank)
    return check_near(whole(model.module), whole(eager.module))


def ddp_aot_eager(rank: int, size: int) -> Weights:
    return ddp(rank, "aot_eager")


def ddp_inductor(rank: int, size: int) -> Weights:
    return ddp(rank, "inductor")


def ddp_without_optimizer(rank: int, size: int) -> Weights:
    return ddp(rank, "aot_eager", mode="no_optimization")


def ddp_python_reducer_aot_eager(rank: int, size: int) -> Weights:
    """The buckets' sums are in the compiled backward pass."""
    return ddp(rank, "aot_eager", "python_reducer", compiled_backward=True)


def ddp_python_reducer_inductor(rank: int, size: int) -> Weights:
    return ddp(rank, "inductor", "python_reducer", compiled_backward=True)


def module_compiled_within_ddp(rank: int, size: int) -> Weights:
    model = wide()
    model.compile(backend="aot_eager")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    fit(wrapped, sgd(wrapped), rank)
    return whole(model)


def sharded() -> nn.Module:
    model = wide()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def fsdp2(rank: int, backend: str) -> Weights:
    eager = sharded()
    fit(eager, sgd(eager), rank)
    model = sharded()
    fit(torch.compile(model, backend=backend), sgd(model), rank)
    return check_near(whole(model), whole(eager))


def fsdp2_aot_eager(rank: int, size: int) -> Weights:
    return fsdp2(rank, "aot_eager")


def fsdp2_inductor(rank: int, size: int) -> Weights:
    return fsdp2(rank, "inductor")


def of_all_kinds(x: torch.Tensor) -> list[torch.Tensor]:
    """Collectives in a graph, both as functions and in place."""
    size, group = dist.get_world_size(), dist.group.WORLD
    reduced = functional.all_reduce(x * 2, "sum", group)
    gathered = functional.all_gather_single(x + 1, 0, group)
    block = functional.reduce_scatter_single(gathered * 2, "sum", 0, group)
    swapped = functional.all_to_all_single(x.contiguous(), None, None, group)
    told = functional.broadcast(x, 1, group)
    own = x * 3
    dist.all_reduce(own)
    room = x.new_empty(size * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(room, x)
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, room)
    return [reduced.relu(), gathered, block, swapped + 1, told, own, room - 1, out]


def collectives(rank: int, backend: str) -> list[torch.Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    actual = torch.compile(of_all_kinds, backend=backend, fullgraph=True)(x)
    for one, other in zip(actual, of_all_kinds(x), strict=True):
        torch.testing.assert_close(one + 0, other + 0)
    return [one.clone() for one in actual]


def collectives_aot_eager(rank: int, size: int) -> list[torch.Tensor]:
    return collectives(rank, "aot_eager")


def collectives_inductor(rank: int, size: int) -> list[torch.Tensor]:
    return collectives(rank, "inductor")


def compiled_optimizer(rank: int, size: int) -> Weights:
    model = DistributedDataParallel(wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step: Any = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        step()
    return whole(model.module)


AOT_EAGER = Suite(
    ddp_aot_eager,
    ddp_without_optimizer,
    ddp_python_reducer_aot_eager,
    module_compiled_within_ddp,
    fsdp2_aot_eager,
    collectives_aot_eager,
    compiled_optimizer,
    timeout_s=110,
)
INDUCTOR = Suite(
    ddp_inductor,
    ddp_python_reducer_inductor,
    fsdp2_inductor,
    collectives_inductor,
    timeout_s=170,
    env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # no pool of compiling processes
)


@pytest.mark.slow
@pytest.mark.timeout(250)
@AOT_EAGER.cases("shm", "server")
def test_aot_eager(check: Check, mode: str) -> None:
    AOT_EAGER.compare(check, mode)


@pytest.mark.slow
@pytest.mark.timeout(400)
@INDUCTOR.cases("shm")
def test_inductor(check: Check, mode: str) -> None:
    """Needs a C++ compiler."""
    INDUCTOR.compare(check, mode)
