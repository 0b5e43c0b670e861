"""Backend specs with a part for each device: CPU tensors go where the spec says."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integration.rig import run_ranks
from torch_bps.backend.work import WorkBytePS
from torch_bps.core import runtime


def use_all(rank: int, size: int, spec: str) -> tuple[bool, int]:
    """Call every collective; returns whether a work was ours, and how many operations core has seen."""
    dist.init_process_group(spec)
    for group in (dist.group.WORLD, dist.new_group([0, 1], backend=spec)):
        tensor = torch.full((4,), rank + 1.0)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.tolist() == [3.0] * 4
        dist.broadcast(tensor, 0, group=group)
        dist.reduce(tensor, 1, group=group)
        rooms = [torch.zeros(4) for _ in range(2)]
        dist.all_gather(rooms, torch.full((4,), float(rank)), group=group)
        assert [room[0].item() for room in rooms] == [0.0, 1.0]
        dist.gather(tensor, rooms if rank == 0 else None, 0, group=group)
        dist.scatter(tensor, rooms if rank == 0 else None, 0, group=group)
        whole = torch.zeros(8)
        dist.all_gather_into_tensor(whole, torch.ones(4), group=group)
        dist.reduce_scatter_tensor(tensor, whole, group=group)
        assert tensor.tolist() == [2.0] * 4
        dist.all_to_all_single(torch.zeros(8), whole, group=group)
        if rank == 0:
            dist.send(tensor, 1, group=group, tag=4)
        else:
            dist.recv(tensor, 0, group=group, tag=4)
        objects = [None, None]
        dist.all_gather_object(objects, rank, group=group)
        assert objects == [0, 1]
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    seen = runtime.current().client.traffic.operations
    dist.barrier()
    dist.destroy_process_group()
    return isinstance(work, WorkBytePS), seen


def test_cpu_tensors_go_to_gloo_where_the_spec_says_so() -> None:
    for result in run_ranks(use_all, 2, "cpu:gloo,cuda:byteps"):
        assert result.value == (False, 0)


def test_cpu_tensors_go_to_byteps_where_the_spec_says_so() -> None:
    for result in run_ranks(use_all, 2, "cpu:byteps,cuda:gloo"):
        ours, seen = result.value
        assert ours
        assert seen > 10
