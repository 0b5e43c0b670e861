"""Messages, objects, and many sums in one call, as on gloo."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.integration.checks import Check, Suite

Tensors = list[torch.Tensor]


def sample(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank))


# ---- messages


def tags_out_of_order(rank: int, size: int) -> Tensors:
    """Messages of several tags are received in another order than sent."""
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(sample(rank, 10 + tag), ahead, tag=tag) for tag in range(5)]
    rooms = [torch.zeros(10 + tag) for tag in range(5)]
    receives = [dist.irecv(rooms[tag], behind, tag=tag) for tag in reversed(range(5))]
    for work in (*receives, *sends):
        assert work is not None
        work.wait()
    return rooms


def one_tag_in_order(rank: int, size: int) -> Tensors:
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((3,), float(n)), ahead) for n in range(20)]
    rooms = [torch.zeros(3) for _ in range(20)]
    for room in rooms:
        assert dist.recv(room, behind) == behind
    for work in sends:
        assert work is not None
        work.wait()
    return rooms


def from_anyone(rank: int, size: int) -> list[Any]:
    if rank:
        dist.send(sample(rank, 4), 0, tag=7)
        return []
    got = []
    for _ in range(size - 1):
        room = torch.zeros(4)
        got.append((dist.recv(room, tag=7), room))
    return sorted(got, key=lambda pair: pair[0])


def sender_first_and_receiver_first(rank: int, size: int) -> Tensors:
    """A large message each way, first posted by the one and then by the other side."""
    peer, room = 1 - rank, torch.zeros(500_000)
    rooms = []
    for first in (0, 1):
        if rank == first:
            dist.send(sample(rank, 500_000), peer)
        else:
            dist.recv(room, peer)
            rooms.append(room.clone())
        dist.barrier()
    return rooms


def batches_of_messages(rank: int, size: int) -> Tensors:
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    rooms = [torch.zeros(8), torch.zeros(9)]
    operations = [
        dist.P2POp(dist.isend, sample(rank, 8), ahead),
        dist.P2POp(dist.irecv, rooms[0], behind),
        dist.P2POp(dist.irecv, rooms[1], behind, tag=4),
        dist.P2POp(dist.isend, sample(rank, 9), ahead, tag=4),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return rooms


def messages_beside_sums(rank: int, size: int) -> Tensors:
    """A thread exchanges messages while the main thread sums."""
    rooms = [torch.zeros(100) for _ in range(20)]
    ahead, behind = (rank + 1) % size, (rank - 1) % size

    def exchange() -> None:
        for room in rooms:
            work = dist.isend(sample(rank, 100), ahead, tag=1)
            dist.recv(room, behind, tag=1)
            assert work is not None
            work.wait()

    sums = []
    thread = threading.Thread(target=exchange)
    thread.start()
    for n in range(20):
        tensor = sample(rank, 1000) + n
        dist.all_reduce(tensor)
        sums.append(tensor)
    thread.join()
    return [*rooms, *sums]


# ---- objects

OBJECTS = ({"a": 1}, "text" * 1000, [1.5, None, ("x", 2)], 7)


def objects(rank: int, size: int) -> list[Any]:
    own = OBJECTS[rank]
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, own)
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(own, gathered, dst=1)
    spread: list[Any] = [None]
    dist.scatter_object_list(spread, list(OBJECTS[:size]) if rank == 1 else None, src=1)
    told: list[Any] = [own, own] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    return [everyone, gathered, spread, told]


def objects_as_messages(rank: int, size: int) -> list[Any]:
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    got: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([OBJECTS[0], "two"], ahead)
        dist.recv_object_list(got, behind)
    else:
        dist.recv_object_list(got, behind)
        dist.send_object_list([OBJECTS[rank], "two"], ahead)
    return got


# ---- many sums in one call


def coalescing_manager(rank: int, size: int) -> list[Tensors]:
    reduced = [sample(rank, n) for n in (3, 50, 1000)]
    with _coalescing_manager():
        for tensor in reduced:
            dist.all_reduce(tensor)
    gathered = [torch.zeros(size * n) for n in (3, 50)]
    with _coalescing_manager(async_ops=True) as manager:
        for n, room in zip((3, 50), gathered, strict=True):
            dist.all_gather_into_tensor(room, sample(rank, n))
    manager.wait()
    blocks = [torch.zeros(n) for n in (3, 50)]
    with _coalescing_manager(async_ops=True) as manager:
        for n, room in zip((3, 50), blocks, strict=True):
            dist.reduce_scatter_tensor(room, sample(rank, size * n))
    manager.wait()
    return [reduced, gathered, blocks]


def coalesced_calls(rank: int, size: int) -> list[Any]:
    reduced = [sample(rank, n) for n in (3, 50)]
    dist.all_reduce_coalesced(reduced)
    gathered = [[torch.zeros(n) for n in (3, 50)] for _ in range(size)]
    dist.all_gather_coalesced(gathered, [sample(rank, n) for n in (3, 50)])
    return [reduced, gathered]


PAIR = Suite(
    tags_out_of_order,
    one_tag_in_order,
    from_anyone,
    sender_first_and_receiver_first,
    batches_of_messages,
    messages_beside_sums,
    objects,
    objects_as_messages,
    coalescing_manager,
    coalesced_calls,
)

FOUR = Suite(tags_out_of_order, from_anyone, batches_of_messages, objects, objects_as_messages, world_size=4)


@PAIR.cases("shm", "server")
def test_two_ranks(check: Check, mode: str) -> None:
    PAIR.compare(check, mode)


@FOUR.cases("shm")
def test_four_ranks(check: Check, mode: str) -> None:
    FOUR.compare(check, mode)
