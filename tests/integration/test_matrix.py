"""Every dtype, reduce kind and collective through the whole stack, against a direct computation.

tests/backend/test_collectives.py tries shapes and strides on ranks within one process; here ranks are processes, and
sizes sit at the edges of partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.backend.test_collectives import ops_for
from tests.backend.values import MOVED, OPS, SUMMED, expected_sum, same
from tests.integration.rig import run_ranks

PARTITION_NBYTES = 4096
TEN_MB = 10_000_000
LARGE = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
TCP = {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": "tcp"}
MODES: dict[str, Callable[[int], dict[str, str]]] = {
    "shm": lambda rank: {},
    "tcp": lambda rank: TCP,
    "zmq": lambda rank: {**TCP, "BYTEPS_TRANSPORT": "zmq"},
    "nodes": lambda rank: {"BYTEPS_NODE_ID": str(rank // 2)},
}
JOBS = [("shm", 2), ("shm", 3), ("shm", 4), ("tcp", 2), ("tcp", 3), ("tcp", 4), ("zmq", 3), ("nodes", 3), ("nodes", 4)]
jobs = pytest.mark.parametrize(("mode", "size"), JOBS)


def env_of(mode: str) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"BYTEPS_PARTITION_BYTES": str(PARTITION_NBYTES), **MODES[mode](rank)}


def kinds(dtype: torch.dtype) -> list[object]:
    return [op for op in ops_for(dtype) if not (dtype.is_complex and op == OPS.PRODUCT)]  # torch itself refuses it


def numels(dtype: torch.dtype) -> tuple[int, ...]:
    whole = PARTITION_NBYTES // dtype.itemsize
    return (0, 1, 77, whole - 1, whole, 3 * whole + 1)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small numbers, so that every dtype holds all sums and products exactly, and that every rank can make."""
    generator = torch.Generator().manual_seed(31 * rank + numel)
    whole = torch.randint(1, 4, (numel,), generator=generator).to(dtype)
    if dtype.is_complex:
        whole = whole + 1j * torch.randint(1, 3, (numel,), generator=generator)
    return whole


def reductions(rank: int, size: int, large: bool) -> int:
    """Check all reductions; returns how many."""
    count = 0
    for dtype in LARGE if large else SUMMED:
        for numel in (TEN_MB // dtype.itemsize,) if large else numels(dtype):
            parts = [values(other, numel, dtype) for other in range(size)]
            wide = [values(other, numel * size, dtype) for other in range(size)]
            for op in [OPS.SUM] if large else kinds(dtype):
                count += 1
                total, wide_total = expected_sum(parts, op), expected_sum(wide, op).chunk(size) if numel else None
                own = parts[rank].clone()
                dist.all_reduce(own, op)
                check_equal(own, total)
                root = count % size
                own = parts[rank].clone()
                dist.reduce(own, root, op)
                check_equal(own, total if rank == root else parts[rank])
                room = torch.zeros(numel, dtype=dtype)
                dist.reduce_scatter_tensor(room, wide[rank], op)
                check_equal(room, wide_total[rank] if wide_total else room)
                blocks = [wide[rank][i * numel : (i + 1) * numel] for i in range(size)]
                room = torch.zeros(numel, dtype=dtype)
                dist.reduce_scatter(room, blocks, op)
                check_equal(room, wide_total[rank] if wide_total else room)
    return count


def copies(rank: int, size: int, large: bool) -> int:
    """Check all collectives that move; returns how often."""
    count = 0
    for dtype in LARGE if large else MOVED:
        for numel in (TEN_MB // dtype.itemsize,) if large else numels(dtype):
            count += 1
            root = count % size
            parts = [values(other, numel, dtype) for other in range(size)]
            for _ in copied(rank, size, root, parts, numel, dtype):
                pass
    return count


def copied(
    rank: int, size: int, root: int, parts: list[torch.Tensor], numel: int, dtype: torch.dtype
) -> Iterator[None]:
    def room(count: int = numel) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float32).to(dtype)

    own = parts[rank]
    tensor = own.clone()
    dist.broadcast(tensor, root)
    yield check_equal(tensor, parts[root])
    rooms = [room() for _ in range(size)]
    dist.all_gather(rooms, own)
    yield check_all(rooms, parts)
    whole = room(numel * size)
    dist.all_gather_into_tensor(whole, own)
    yield check_all(split(whole, [numel] * size), parts)
    rooms = [room() for _ in range(size)]
    dist.gather(own, rooms if rank == root else None, dst=root)
    yield check_all(rooms, parts) if rank == root else None
    tensor = room()
    dist.scatter(tensor, parts if rank == root else None, src=root)
    yield check_equal(tensor, parts[rank])
    rooms = [room() for _ in range(size)]
    dist.all_to_all(rooms, [parts[(rank + dst) % size] for dst in range(size)])
    yield check_all(rooms, [parts[(src + rank) % size] for src in range(size)])
    # rank r sends numel // (r + dst + 1) elements to dst
    counts = [[numel // (src + dst + 1) for dst in range(size)] for src in range(size)]
    sent = torch.cat([parts[rank][:count].view(torch.uint8) for count in counts[rank]]).view(dtype)
    here = [counts[src][rank] for src in range(size)]
    whole = room(sum(here))
    dist.all_to_all_single(whole, sent, here, counts[rank])
    yield check_all(split(whole, here), [parts[src][: counts[src][rank]] for src in range(size)])
    request = dist.isend(own, (rank + 1) % size)
    tensor = room()
    dist.recv(tensor, (rank - 1) % size)
    request.wait()
    yield check_equal(tensor, parts[(rank - 1) % size])


def split(whole: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    return [part.view(whole.dtype) for part in whole.view(torch.uint8).split([n * whole.itemsize for n in counts])]


def check_all(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        check_equal(one, other)


def check_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), f"{actual} is not {expected}"


def everything(rank: int, size: int, large: bool) -> tuple[int, int]:
    return reductions(rank, size, large), copies(rank, size, large)


@jobs
def test_all_dtypes_kinds_and_collectives_at_the_edges_of_partitions(mode: str, size: int) -> None:
    results = run_ranks(everything, size, False, backend="byteps", env=env_of(mode), timeout_s=55)
    assert all(result.value == (sum(len(kinds(dtype)) * 6 for dtype in SUMMED), 6 * len(MOVED)) for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ten_megabytes(mode: str) -> None:
    results = run_ranks(everything, 3, True, backend="byteps", env=MODES[mode], timeout_s=55)
    assert all(result.value == (len(LARGE), len(LARGE)) for result in results)


def random_sums(rank: int, size: int) -> float:
    """Return the largest relative error of float32 sums of random numbers; at 2 ranks their bits must be gloo's."""
    gloo = dist.new_group(backend="gloo")
    worst = 0.0
    for numel in (1, 1000, 100_003):
        parts = [torch.rand(numel, generator=torch.Generator().manual_seed(other)) for other in range(size)]
        own = parts[rank].clone()
        dist.all_reduce(own)
        exact = torch.stack(parts).double().sum(0)
        worst = max(worst, ((own.double() - exact).abs() / exact).max().item())
        if size == 2:
            its = parts[rank].clone()
            dist.all_reduce(its, group=gloo)
            same(own, its)
    return worst


@jobs
def test_sums_of_random_numbers(mode: str, size: int) -> None:
    for result in run_ranks(random_sums, size, backend="byteps", env=env_of(mode)):
        assert result.value < 1e-6
