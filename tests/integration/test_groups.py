"""Subgroups, groups used at once, barriers, timeouts and samplers, as on gloo."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.integration.checks import Check, Suite, not_on_gloo

Tensors = list[torch.Tensor]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# ---- subgroups (4 ranks)


@contextlib.contextmanager
def groups_of(*members: list[int]) -> Iterator[list[Any]]:
    """Make groups and destroy them: torch names some groups after how many a rank has, so that must not differ."""
    groups = [dist.new_group(ranks) for ranks in members]
    yield groups
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def summed(group: dist.ProcessGroup, rank: int, numel: int = 100) -> torch.Tensor:
    tensor = torch.arange(numel) * (rank + 1.0)
    dist.all_reduce(tensor, group=group)
    return tensor


def subgroups(rank: int, size: int) -> list[Any]:
    mine, every = dist.new_subgroups(2)
    ways = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    return [summed(mine, rank), summed(ways, rank), len(every), dist.get_process_group_ranks(ways)]


def local_synchronization(rank: int, size: int) -> list[Any]:
    """Only members call new_group: the halves make their groups, and then the overlapping ones, on their own."""
    half = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group(half, use_local_synchronization=True)]
    values = [summed(groups[0], rank)]
    if rank in (1, 2):
        groups.append(dist.new_group([1, 2], use_local_synchronization=True))
        values.append(summed(groups[1], rank))
    values.append(summed(groups[0], rank))
    for group in groups:
        dist.destroy_process_group(group)
    return values


def unsorted_ranks_and_roots(rank: int, size: int) -> list[Any]:
    values: list[Any] = []
    with groups_of([3, 1]) as (group,):
        if rank not in (1, 3):
            return values
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, src=3, group=group)
        gathered = [torch.zeros(1) for _ in range(2)] if rank == 1 else None
        dist.gather(torch.full((1,), float(rank)), gathered, dst=1, group=group)
        reduced = torch.full((2,), float(rank))
        dist.reduce(reduced, group_dst=0, group=group)
        values = [tensor, gathered, dist.get_group_rank(group, rank)]
        values += [reduced] if dist.get_group_rank(group, rank) == 0 else []
        room = torch.zeros(2)
        if rank == 3:
            dist.send(torch.full((2,), 5.0), 1, group=group)
        else:
            dist.recv(room, 3, group=group)
        return [*values, room]


OVERLAPPING = ([0, 1, 2, 3], [0, 1], [1, 2], [2, 3], [0, 3], [0, 1, 2], [1, 2, 3])


def groups_at_once(rank: int, size: int) -> list[Tensors]:
    """Threads of one rank use overlapping groups at the same time."""
    results: list[Tensors] = [[] for _ in OVERLAPPING]
    errors: list[BaseException] = []

    def use(index: int, group: dist.ProcessGroup) -> None:
        try:
            for n in range(15):
                results[index].append(summed(group, rank, 10 + 500 * n))
        except BaseException as error:
            errors.append(error)

    with groups_of(*OVERLAPPING) as groups:
        order = [index for index, ranks in enumerate(OVERLAPPING) if rank in ranks]
        if rank % 2:
            order.reverse()
        threads = [threading.Thread(target=use, args=(index, groups[index])) for index in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return results


def groups_in_opposite_order(rank: int, size: int) -> Tensors:
    """The works of two groups are started in another order on each rank."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    tensors = [torch.full((10,), rank + 1.0), torch.full((20,), rank + 10.0)]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in works:
        assert work is not None
        work.wait()
    return tensors


@not_on_gloo("it finds the addresses of the group before under the same name, and hangs")
def same_group_again_and_again(rank: int, size: int) -> None:
    """Torch gives each the same name and the same keys in the store."""
    ranks = [0, 2] if rank in (0, 2) else [1, 3]
    names = set()
    for _ in range(20):
        group = dist.new_group(ranks, use_local_synchronization=True)
        names.add(group.group_name)
        assert torch.equal(summed(group, rank), torch.arange(100) * (sum(ranks) + 2.0))
        dist.destroy_process_group(group)
    assert len(names) == 1


def objects_in_a_subgroup(rank: int, size: int) -> list[Any]:
    with groups_of([1, 3]) as (group,):
        if rank not in (1, 3):
            return []
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, {"rank": rank}, group=group)
        told = [{"rank": rank}]
        dist.broadcast_object_list(told, src=3, group=group)
        return [everyone, told]


# ---- barriers, timeouts, data


def monitored_barrier(rank: int, size: int) -> None:
    """On the group object: dist.monitored_barrier takes only backends named gloo."""
    for wait_all in (False, True):
        world().monitored_barrier(timedelta(seconds=10), wait_all_ranks=wait_all)


def missed_monitored_barrier(rank: int, size: int) -> None:
    """Rank 1 does not come: rank 0's error says so, and the others' say to ask rank 0."""
    with groups_of(list(range(size))) as (group,):
        if rank != 1:
            told = "Rank 1 failed to pass monitoredBarrier" if rank == 0 else "successfully reached monitoredBarrier"
            with pytest.raises(RuntimeError, match=told):
                group.monitored_barrier(timedelta(milliseconds=300))
        dist.barrier()


def timeout_of_a_group(rank: int, size: int) -> bool:
    """A new timeout holds for later calls of that group."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=15))
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=400), group)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), group=group)
        assert 0.3 < time.monotonic() - start < 8
    dist.barrier()
    return True


def timeout_of_a_wait(rank: int, size: int) -> bool:
    group = dist.new_group(list(range(size)))
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            work.wait(timedelta(milliseconds=200))
    dist.barrier()
    return True


@not_on_gloo("a wait under way does not notice its abort")
def abort_while_waiting(rank: int, size: int) -> bool:
    """abort() from another thread ends a wait on this one with an error."""
    group = dist.new_group(list(range(size)))
    if rank == 0:
        room, started = torch.zeros(3), threading.Event()
        work = group.recv([room], 1, 0)
        errors: list[Exception] = []

        def wait() -> None:
            started.set()
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        started.wait()
        group.abort()
        thread.join(10)
        assert not thread.is_alive()
        assert errors
    dist.barrier()
    return True


def distributed_sampler(rank: int, size: int) -> list[list[int]]:
    dataset = TensorDataset(torch.arange(11))
    values = []
    for drop_last in (False, True):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=3, drop_last=drop_last)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            values.append(list(sampler))
    return values


PAIR = Suite(
    groups_in_opposite_order,
    monitored_barrier,
    missed_monitored_barrier,
    timeout_of_a_wait,
    timeout_of_a_group,
    abort_while_waiting,
    distributed_sampler,
)

FOUR = Suite(
    subgroups,
    local_synchronization,
    unsorted_ranks_and_roots,
    groups_at_once,
    groups_in_opposite_order,
    same_group_again_and_again,
    objects_in_a_subgroup,
    monitored_barrier,
    missed_monitored_barrier,
    world_size=4,
)


@PAIR.cases("shm", "server")
def test_two_ranks(check: Check, mode: str) -> None:
    PAIR.compare(check, mode)


@FOUR.cases("shm", "server")
def test_four_ranks(check: Check, mode: str) -> None:
    FOUR.compare(check, mode)
