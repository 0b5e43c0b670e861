"""DistributedDataParallel with all its options: the weights end as on gloo, bit for bit at 2 ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.integration.checks import Check, Suite
from tests.integration.models import CLASSES, WIDTH, batches, fit, mlp, sgd, weights

Weights = dict[str, torch.Tensor]
SMALL_BUCKETS_MB = 0.001


def trained(rank: int, model: nn.Module, **options: Any) -> Weights:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    losses = fit(ddp, sgd(ddp), rank)
    return {**weights(ddp), "losses": torch.tensor(losses)}


def plain(rank: int, world_size: int) -> Weights:
    return trained(rank, mlp())


def static_graph(rank: int, world_size: int) -> Weights:
    return trained(rank, mlp(), static_graph=True)


def gradient_as_bucket_view(rank: int, world_size: int) -> Weights:
    return trained(rank, mlp(), gradient_as_bucket_view=True)


def views_that_are_kept_and_zeroed(rank: int, world_size: int) -> Weights:
    ddp = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    optimizer = sgd(ddp)
    for inputs, labels in batches(rank):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    return weights(ddp)


def different_weights_at_first(rank: int, world_size: int) -> Weights:
    """DDP's constructor takes rank 0's."""
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return trained(rank, model)


class Branches(nn.Module):
    """Uses one of two layers, another one on each rank and step, and a third never."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.ways = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))
        self.step = rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.step += 1
        way: torch.Tensor = self.ways[self.step % 2](inputs)
        return way


def find_unused_parameters(rank: int, world_size: int) -> Weights:
    return trained(rank, Branches(rank), find_unused_parameters=True)


def find_unused_parameters_as_bucket_views(rank: int, world_size: int) -> Weights:
    return trained(rank, Branches(rank), find_unused_parameters=True, gradient_as_bucket_view=True)


def no_sync(rank: int, world_size: int) -> Weights:
    """Gradients of three batches are accumulated before each sum."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    optimizer = sgd(ddp)
    data = list(batches(rank, 9))
    for start in range(0, 9, 3):
        optimizer.zero_grad()
        with ddp.no_sync():
            for inputs, labels in data[start : start + 2]:
                nn.functional.cross_entropy(ddp(inputs), labels).backward()
        inputs, labels = data[start + 2]
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    return weights(ddp)


def normed() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))


def buffers(rank: int, world_size: int) -> Weights:
    """Batch norm's statistics are rank 0's before each forward pass."""
    return trained(rank, normed())


def buffers_that_stay_apart(rank: int, world_size: int) -> Weights:
    return trained(rank, normed(), broadcast_buffers=False)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(WIDTH, 32)
        self.wide = nn.Linear(32, 32).double()
        self.last = nn.Linear(32, CLASSES).bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.first(inputs).relu().double()).relu()
        out: torch.Tensor = self.last(hidden.bfloat16())
        return out


def mixed_dtypes(rank: int, world_size: int) -> Weights:
    return trained(rank, Mixed())


def complex_parameters(rank: int, world_size: int) -> Weights:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(nn.Linear(WIDTH, CLASSES, dtype=torch.complex64))
    optimizer = sgd(ddp)
    for inputs, _ in batches(rank):
        optimizer.zero_grad()
        ddp(inputs + 1j * inputs.flip(0)).abs().square().mean().backward()
        optimizer.step()
    return weights(ddp)


def autocast(rank: int, world_size: int) -> Weights:
    with torch.autocast("cpu", torch.bfloat16):
        return trained(rank, mlp())


def sparse_gradients(rank: int, world_size: int) -> Weights:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    words = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(rank))
    for batch, (_, labels) in zip(words, batches(rank), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(batch), labels).backward()
        optimizer.step()
    return weights(ddp)


def two_forwards_then_backward(rank: int, world_size: int) -> Weights:
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    optimizer = sgd(ddp)
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        first, second = ddp(inputs), ddp(inputs * 2)
        nn.functional.cross_entropy(first + second, labels).backward()
        optimizer.step()
    return weights(ddp)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.model, inputs, use_reentrant=False)
        return out


def activation_checkpointing(rank: int, world_size: int) -> Weights:
    return trained(rank, Checkpointed(), static_graph=True)


def clipped_gradients(rank: int, world_size: int) -> Weights:
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
    return weights(ddp)


def in_a_subgroup(rank: int, world_size: int) -> Weights:
    """Each rank alone, then both in a second group of all."""
    alone = [dist.new_group([other]) for other in range(world_size)]
    everyone = dist.new_group(list(range(world_size)))
    return {
        f"{kind}.{name}": value
        for kind, group in (("alone", alone[rank]), ("everyone", everyone))
        for name, value in trained(rank, mlp(), process_group=group).items()
    }


def replicated(rank: int, world_size: int) -> Weights:
    """The composable form of DDP."""
    model = replicate(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB)
    fit(model, sgd(model), rank)
    return weights(model)


def on_a_device_mesh(rank: int, world_size: int) -> Weights:
    mesh = dist.init_device_mesh("cpu", (world_size,))
    return trained(rank, mlp(), device_mesh=mesh)


def two_models_in_turn(rank: int, world_size: int) -> list[Weights]:
    models = [DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_BUCKETS_MB) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for inputs, labels in batches(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(model(inputs), labels) for model in models]
        for loss in reversed(losses):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return [weights(model) for model in models]


def join_of_uneven_inputs(rank: int, world_size: int) -> Weights:
    ddp = DistributedDataParallel(normed(), bucket_cap_mb=SMALL_BUCKETS_MB)
    optimizer = sgd(ddp)
    with ddp.join():
        fit(ddp, optimizer, rank, 2 + 3 * rank)
    return weights(ddp)


def join_that_stops_early(rank: int, world_size: int) -> tuple[str, int]:
    ddp = DistributedDataParallel(mlp())
    optimizer = sgd(ddp)
    done = 0
    try:
        with ddp.join(throw_on_early_termination=True):
            for inputs, labels in batches(rank, 2 + 3 * rank):
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(inputs), labels).backward()
                optimizer.step()
                done += 1
    except RuntimeError as error:
        return str(error), done
    return "", done


def zero_redundancy(rank: int, world_size: int) -> list[Weights]:
    ends = []
    for options in ({}, {"parameters_as_bucket_view": True}):
        ddp = DistributedDataParallel(mlp())
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01, **options)
        fit(ddp, optimizer, rank)
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict()["state"] if rank == 0 else {}
        ends.append({**weights(ddp), **{f"{key}.{name}": v for key, s in state.items() for name, v in s.items()}})
    return ends


def join_of_zero_redundancy(rank: int, world_size: int) -> Weights:
    ddp = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    with Join([ddp, optimizer]):
        fit(ddp, optimizer, rank, 2 + 3 * rank)
    return weights(ddp)


SUITE = Suite(
    plain,
    static_graph,
    gradient_as_bucket_view,
    views_that_are_kept_and_zeroed,
    different_weights_at_first,
    find_unused_parameters,
    find_unused_parameters_as_bucket_views,
    no_sync,
    buffers,
    buffers_that_stay_apart,
    mixed_dtypes,
    complex_parameters,
    autocast,
    sparse_gradients,
    two_forwards_then_backward,
    activation_checkpointing,
    clipped_gradients,
    in_a_subgroup,
    replicated,
    on_a_device_mesh,
    two_models_in_turn,
    join_of_uneven_inputs,
    join_that_stops_early,
    zero_redundancy,
    join_of_zero_redundancy,
)


@SUITE.cases("shm", "server", "debug")
def test_ddp(check: Check, mode: str) -> None:
    SUITE.compare(check, mode)
