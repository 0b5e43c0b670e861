"""Models in pieces: FSDP1, FSDP2, HSDP, tensor parallel and DTensor train as on gloo."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    ones,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.integration.checks import Check, Suite, closely
from tests.integration.models import CLASSES, WIDTH, batches, fit, mlp, sgd

Weights = dict[str, torch.Tensor]


def whole(model: nn.Module) -> Weights:
    """Return all parameters, gathered."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


# ---- FSDP1


def fsdp1(rank: int, **options: Any) -> Weights:
    model = FullyShardedDataParallel(
        mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), **options
    )
    fit(model, sgd(model), rank)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fsdp1_strategies(rank: int, size: int) -> list[Weights]:
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    return [fsdp1(rank, sharding_strategy=strategy) for strategy in strategies]


def fsdp1_original_parameters(rank: int, size: int) -> Weights:
    return fsdp1(rank, use_orig_params=True, forward_prefetch=True)


def fsdp1_mixed_precision(rank: int, size: int) -> list[Weights]:
    half = torch.bfloat16
    return [
        fsdp1(rank, mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)),
        fsdp1(rank, mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32)),
    ]


def fsdp1_clipping_and_no_sync(rank: int, size: int) -> tuple[Weights, torch.Tensor]:
    model = FullyShardedDataParallel(mlp(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = sgd(model)
    norms = []
    data = list(batches(rank, 6))
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with model.no_sync():
            nn.functional.cross_entropy(model(first[0]), first[1]).backward()
        nn.functional.cross_entropy(model(second[0]), second[1]).backward()
        norms.append(model.clip_grad_norm_(0.1))
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}, torch.stack(norms)


def fsdp1_optimizer_state(rank: int, size: int) -> Any:
    """Gathered on rank 0, then spread again."""
    model = FullyShardedDataParallel(mlp(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fit(model, optimizer, rank)
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    spread = FullyShardedDataParallel.scatter_full_optim_state_dict(full if rank == 0 else None, model)
    optimizer.load_state_dict(spread)
    fit(model, optimizer, rank)
    return full.get("state", {}), [parameter.detach().clone() for parameter in model.parameters()]


def fsdp1_hook(rank: int, size: int) -> Weights:
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    fit(model, sgd(model), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


# ---- FSDP2


def fsdp2(rank: int, mesh: Any = None, **options: Any) -> Weights:
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    fit(model, sgd(model), rank)
    return whole(model)


def fsdp2_plain(rank: int, size: int) -> list[Weights]:
    return [fsdp2(rank), fsdp2(rank, reshard_after_forward=False)]


def fsdp2_mixed_precision(rank: int, size: int) -> Weights:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return fsdp2(rank, mp_policy=policy)


def fsdp2_offload(rank: int, size: int) -> Weights:
    return fsdp2(rank, offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_accumulation_and_clipping(rank: int, size: int) -> tuple[Weights, list[torch.Tensor]]:
    model = mlp()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    data = list(batches(rank, 6))
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        nn.functional.cross_entropy(model(first[0]), first[1]).backward()
        model.set_requires_gradient_sync(True)
        nn.functional.cross_entropy(model(second[0]), second[1]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
        optimizer.step()
    return whole(model), norms


def fsdp2_uneven(rank: int, size: int) -> Weights:
    """5 and 7 rows do not divide by the ranks."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 7))
    fully_shard(model)
    optimizer = sgd(model)
    for inputs, labels in batches(rank):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return whole(model)


def fsdp2_is_single_process_training(rank: int, size: int) -> None:
    """The ranks' batches together, on one process, give the same weights."""
    sharded = fsdp2(rank)
    model = mlp()
    optimizer = sgd(model)
    for together in zip(*(batches(other) for other in range(size)), strict=True):
        optimizer.zero_grad()
        for inputs, labels in together:
            (nn.functional.cross_entropy(model(inputs), labels) / size).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-5, atol=1e-6)


# ---- tensor parallel and DTensor


def tensor_parallel(rank: int, size: int) -> Weights:
    mesh = dist.init_device_mesh("cpu", (size,))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fit(model, sgd(model), 0)  # all ranks see the same batches
    return whole(model)


def sequence_parallel_and_loss_parallel(rank: int, size: int) -> Weights:
    mesh = dist.init_device_mesh("cpu", (size,))
    torch.manual_seed(7)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "3": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(model, mesh, plan)
    model[1] = parallelize_module(model[1], mesh, ColwiseParallel(output_layouts=Replicate()))
    optimizer = sgd(model)
    for inputs, labels in batches(0):
        optimizer.zero_grad()
        with loss_parallel():
            nn.functional.cross_entropy(model(inputs.chunk(size)[rank]), labels).backward()
        optimizer.step()
    return whole(model)


PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())


def redistribution(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """Every placement to every other, with even and uneven pieces, and the gradient back."""
    mesh = dist.init_device_mesh("cpu", (size,))
    results = {}
    for shape, source, target in itertools.product(((4, 6), (5, 3)), PLACEMENTS, PLACEMENTS):
        if isinstance(target, Partial):
            continue  # torch refuses it
        full = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        if isinstance(source, Partial):
            local = full * (rank + 1)
            begin = DTensor.from_local(local, mesh, [source])
        else:
            begin = distribute_tensor(full, mesh, [source])
        begin = begin.detach().requires_grad_()
        end = begin.redistribute(mesh, [target])
        total = end.full_tensor()
        (total * torch.arange(total.numel()).view(shape)).sum().backward()
        assert begin.grad is not None
        results[f"{shape} {source} {target}"] = [
            end.to_local().detach().clone(),
            total.detach().clone(),
            begin.grad.full_tensor().clone(),
        ]
    return results


def redistribution_with_other_reductions(rank: int, size: int) -> list[torch.Tensor]:
    mesh = dist.init_device_mesh("cpu", (size,))
    local = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    return [
        DTensor.from_local(local, mesh, [Partial(kind)]).redistribute(mesh, [target]).full_tensor()
        for kind in ("sum", "max", "min", "product")
        for target in (Replicate(), Shard(0), Shard(1))
    ]


def dtensor_operations(rank: int, size: int) -> list[torch.Tensor]:
    mesh = dist.init_device_mesh("cpu", (size,))
    torch.manual_seed(5)
    a = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    b = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
    results = [a @ b, a.sum(), a.mean(0), a.softmax(0), a.t() @ a, torch.cat([a, a]), a.max(), b.norm()]
    results += [ones(6, 4, device_mesh=mesh, placements=[Shard(1)])]
    results += [distribute_module(nn.Linear(4, 3), mesh)(a)]
    return [result.full_tensor().detach().clone() for result in results]


PAIR = Suite(
    fsdp1_strategies,
    fsdp1_original_parameters,
    fsdp1_mixed_precision,
    fsdp1_clipping_and_no_sync,
    fsdp1_optimizer_state,
    fsdp1_hook,
    fsdp2_plain,
    fsdp2_mixed_precision,
    fsdp2_offload,
    fsdp2_accumulation_and_clipping,
    fsdp2_uneven,
    fsdp2_is_single_process_training,
    tensor_parallel,
    sequence_parallel_and_loss_parallel,
    redistribution,
    redistribution_with_other_reductions,
    dtensor_operations,
)


# ---- on a mesh of 2 x 2


def square() -> Any:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def mesh_of_two_dimensions(rank: int, size: int) -> list[Any]:
    mesh = square()
    values: list[Any] = [mesh.get_coordinate(), mesh.get_local_rank("inner"), mesh["outer"].mesh.tolist()]
    for name in ("outer", "inner"):
        tensor = torch.full((4,), rank + 1.0)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        values.append(tensor)
    flat = mesh._flatten("flat")
    tensor = torch.full((4,), rank + 1.0)
    dist.all_reduce(tensor, group=flat.get_group())
    return [*values, tensor, dist.get_backend(mesh.get_group("inner")) == dist.get_backend()]


@closely(1e-5, 1e-6)
def hsdp1(rank: int, size: int) -> list[Weights]:
    mesh = square()
    strategies = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return [fsdp1(rank, sharding_strategy=strategy, device_mesh=mesh) for strategy in strategies]


@closely(1e-5, 1e-6)
def hsdp2(rank: int, size: int) -> Weights:
    return fsdp2(rank, square())


@closely(1e-5, 1e-6)
def fsdp2_of_tensor_parallel(rank: int, size: int) -> Weights:
    mesh = square()
    model = parallelize_module(mlp(), mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"])
    fit(model, sgd(model), rank // 2)
    return whole(model)


@closely(1e-5, 1e-6)
def redistribution_on_two_dimensions(rank: int, size: int) -> list[torch.Tensor]:
    mesh = square()
    full = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    kinds = (Replicate(), Shard(0), Shard(1))
    results = []
    for source, target in itertools.product(itertools.product(kinds, kinds), repeat=2):
        results.append(distribute_tensor(full, mesh, source).redistribute(mesh, target).to_local().clone())
    partial = DTensor.from_local(copy.deepcopy(full) + rank, mesh, [Partial(), Partial()])
    return [*results, *(partial.redistribute(mesh, [a, b]).full_tensor() for a in kinds for b in kinds)]


FOUR = Suite(
    mesh_of_two_dimensions,
    hsdp1,
    hsdp2,
    fsdp2_of_tensor_parallel,
    redistribution_on_two_dimensions,
    world_size=4,
)


@PAIR.cases("shm", "server")
def test_two_ranks(check: Check, mode: str) -> None:
    PAIR.compare(check, mode)


@FOUR.cases("shm", "server")
def test_four_ranks(check: Check, mode: str) -> None:
    FOUR.compare(check, mode)
