"""Pipeline parallel training, and distributed checkpoints of sharded models, as on gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.integration.checks import Check, Suite
from tests.integration.models import CLASSES, WIDTH, batches, fit, mlp, sgd

NUM_MICROBATCHES = 4
Weights = dict[str, torch.Tensor]


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count - 1)] + [nn.Linear(WIDTH, CLASSES)]


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def run_schedule(schedule: Any, stages: list[Any], rank: int, size: int) -> list[Any]:
    """Train three batches through a schedule; returns this rank's losses and weights."""
    optimizers = [sgd(stage.submod) for stage in stages]
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    values: list[Any] = []
    for inputs, labels in batches(0, 3, rows=8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if first else ()
        if last:
            output = schedule.step(*arguments, target=labels, losses=losses)
            values += [output.detach().clone(), torch.stack(losses).detach()]
        else:
            schedule.step(*arguments)
        for optimizer in optimizers:
            optimizer.step()
    for stage in stages:
        values.append({name: value.detach().clone() for name, value in stage.submod.state_dict().items()})
    return values


def single_stage(schedule: Callable[..., Any], rank: int, size: int) -> list[Any]:
    stage = PipelineStage(layers(size)[rank], rank, size, torch.device("cpu"))
    return run_schedule(schedule(stage, NUM_MICROBATCHES, loss_fn=mean_loss), [stage], rank, size)


def several_stages(schedule: Callable[..., Any], rank: int, size: int) -> list[Any]:
    parts = layers(2 * size)
    stages = [PipelineStage(parts[i], i, 2 * size, torch.device("cpu")) for i in (rank, rank + size)]
    return run_schedule(schedule(stages, NUM_MICROBATCHES, loss_fn=mean_loss), stages, rank, size)


def gpipe(rank: int, size: int) -> list[Any]:
    return single_stage(ScheduleGPipe, rank, size)


def one_forward_one_backward(rank: int, size: int) -> list[Any]:
    return single_stage(Schedule1F1B, rank, size)


def interleaved(rank: int, size: int) -> list[Any]:
    return several_stages(ScheduleInterleaved1F1B, rank, size)


def looped_breadth_first(rank: int, size: int) -> list[Any]:
    return several_stages(ScheduleLoopedBFS, rank, size)


def zero_bubble(rank: int, size: int) -> list[Any]:
    return several_stages(ScheduleInterleavedZeroBubble, rank, size)


def pipeline_is_single_process_training(rank: int, size: int) -> None:
    weights = single_stage(Schedule1F1B, rank, size)[-1]
    model = nn.Sequential(*layers(size))
    optimizer = sgd(model)
    for inputs, labels in batches(0, 3, rows=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for name, value in model[rank].state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def traced_pipeline(rank: int, size: int) -> list[Any]:
    """Split by torch.export."""
    model = nn.Sequential(*layers(2))
    pipe = pipeline(model, mb_args=(torch.zeros(2, WIDTH),), split_spec={"1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    return run_schedule(ScheduleGPipe(stage, NUM_MICROBATCHES, loss_fn=mean_loss), [stage], rank, size)


# ---- checkpoints


def shared_folder() -> str:
    """Return a folder that rank 0 makes; `remove` deletes it."""
    told = [tempfile.mkdtemp(prefix="bps-checkpoint-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    return str(told[0])


def remove(folder: str) -> list[str]:
    """Return the names of a checkpoint's files, and delete them."""
    dist.barrier()
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder).iterdir():
            path.unlink()
        Path(folder).rmdir()
    return names


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def whole(model: nn.Module) -> Weights:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def save_with(save: Callable[[dict[str, Any], str], None], rank: int) -> list[Any]:
    """Train, save, train on; then a new model that loads what was saved must train on to the same weights."""
    model, optimizer = sharded()
    fit(model, optimizer, rank)
    folder = shared_folder()
    save(state_of(model, optimizer), folder)
    fit(model, optimizer, rank)
    other, other_optimizer = sharded()
    state = state_of(other, other_optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    fit(other, other_optimizer, rank)
    wanted, actual = whole(model), whole(other)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    return [wanted, remove(folder)]


def checkpoint_of_fsdp2(rank: int, size: int) -> list[Any]:
    return save_with(lambda state, folder: checkpoint.save(state, checkpoint_id=folder), rank)


def asynchronous_checkpoint(rank: int, size: int) -> list[Any]:
    return save_with(lambda state, folder: checkpoint.async_save(state, checkpoint_id=folder).result(), rank)


def checkpoint_in_another_sharding(rank: int, size: int) -> list[Any]:
    """Saved in rows, loaded in columns, and whole."""
    mesh = dist.init_device_mesh("cpu", (size,))
    full = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    folder = shared_folder()
    checkpoint.save({"t": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=folder)
    columns = {"t": distribute_tensor(torch.zeros(6, 5), mesh, [Shard(1)])}
    plain = {"t": torch.zeros(6, 5)}
    checkpoint.load(columns, checkpoint_id=folder)
    checkpoint.load(plain, checkpoint_id=folder)
    assert torch.equal(columns["t"].full_tensor(), full)
    assert torch.equal(plain["t"], full)
    return remove(folder)


def checkpoint_of_ddp(rank: int, size: int) -> list[Any]:
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    fit(model, optimizer, rank)
    folder = shared_folder()
    checkpoint.save({"model": model.state_dict(), "step": 4}, checkpoint_id=folder)
    state = {"model": DistributedDataParallel(mlp()).state_dict(), "step": 0}
    checkpoint.load(state, checkpoint_id=folder)
    assert state["step"] == 4
    return [{name: value.clone() for name, value in state["model"].items()}, remove(folder)]


SUITE = Suite(
    gpipe,
    one_forward_one_backward,
    interleaved,
    looped_breadth_first,
    zero_bubble,
    pipeline_is_single_process_training,
    traced_pipeline,
    checkpoint_of_fsdp2,
    asynchronous_checkpoint,
    checkpoint_in_another_sharding,
    checkpoint_of_ddp,
)


@SUITE.cases("shm", "server")
def test_two_ranks(check: Check, mode: str) -> None:
    SUITE.compare(check, mode)
