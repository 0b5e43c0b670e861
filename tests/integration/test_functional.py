"""The collectives that return their result: torch.distributed._functional_collectives, the operators beneath them in
all forms, and the differentiable torch.distributed.nn.functional."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn_functional

from tests.integration.checks import Check, Suite, not_on_gloo

Tensors = list[torch.Tensor]
native = torch.ops._c10d_functional


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def named() -> str:
    return str(world().group_name)


def sample(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))
    return tensor.to(dtype) if dtype.is_floating_point else (tensor * 10).to(dtype)


def waited(results: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    """Wait for what an operator returned, and make plain tensors of it."""
    if isinstance(results, torch.Tensor):
        return native.wait_tensor(results).clone()
    return [waited(result) for result in results]


def plain(results: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    """Make plain tensors of AsyncCollectiveTensors: what the first use of each waits for."""
    if isinstance(results, torch.Tensor):
        return results + 0
    return [plain(result) for result in results]


# ---- torch.distributed._functional_collectives


def all_reduce(rank: int, size: int) -> Tensors:
    kinds = ("sum", "min", "max", "product")
    bits = sample(rank, 9, dtype=torch.int64)
    return [
        *(plain(functional.all_reduce(sample(rank, 5, 3), kind, world())) for kind in kinds),
        *(plain(functional.all_reduce(bits, kind, world())) for kind in ("band", "bor", "bxor")),
    ]


@not_on_gloo("its reduce_scatter has no average")
def average(rank: int, size: int) -> Tensors:
    mean = torch.stack([sample(other, 4) for other in range(size)]).sum(0) / size
    blocks = torch.stack([sample(other, size * 4) for other in range(size)]).sum(0) / size
    average = plain(functional.all_reduce(sample(rank, 4), "avg", world()))
    block = plain(functional.reduce_scatter_single(sample(rank, size * 4), "avg", 0, world()))
    torch.testing.assert_close(average, mean, rtol=0, atol=0)
    torch.testing.assert_close(block, blocks.chunk(size)[rank], rtol=0, atol=0)
    return [average, block]


def ways_to_name_a_group(rank: int, size: int) -> Tensors:
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    ways: list[Any] = [world(), named(), list(range(size)), mesh, (mesh, 0), dist.new_group(list(range(size)))]
    return [plain(functional.all_reduce(sample(rank, 3), "sum", way)) for way in ways]


def input_is_left_alone(rank: int, size: int) -> Tensors:
    own = sample(rank, 6)
    summed = functional.all_reduce(own, "sum", world())
    own_before = own.clone()
    return [plain(summed), own_before - sample(rank, 6)]


def broadcast(rank: int, size: int) -> Tensors:
    return [plain(functional.broadcast(sample(rank, 4, 2), src, world())) for src in range(size)]


def gather_and_reduce_scatter(rank: int, size: int) -> Tensors:
    tensor = sample(rank, 2 * size, 3 * size)
    return [
        *(plain(functional.all_gather_single(tensor, dim, world())) for dim in (0, 1)),
        *(plain(functional.all_gather_tensor(tensor, dim, world())) for dim in (0, 1)),
        *(plain(functional.reduce_scatter_single(tensor, "sum", dim, world())) for dim in (0, 1)),
        *(plain(functional.reduce_scatter_tensor(tensor, "max", dim, world())) for dim in (0, 1)),
    ]


def coalesced(rank: int, size: int) -> list[Tensors]:
    several = [sample(rank, size * n, 2) for n in (1, 2, 3)]
    return [
        plain(functional.all_reduce_coalesced(several, "sum", world())),
        plain(functional.all_gather_single_coalesced(several, world())),
        plain(functional.all_gather_into_tensor_coalesced(several, world())),
        plain(functional.reduce_scatter_single_coalesced(several, "sum", [0, 0, 0], world())),
        plain(functional.reduce_scatter_tensor_coalesced(several, "sum", [0, 0, 0], world())),
    ]


def all_to_all(rank: int, size: int) -> Tensors:
    equal = functional.all_to_all_single(sample(rank, 2 * size, 3), None, None, world())
    to = [rank + dst + 1 for dst in range(size)]
    uneven = functional.all_to_all_single(sample(rank, sum(to)), to, to, world())  # symmetric: src + dst + 1
    return [plain(equal), plain(uneven)]


def permute(rank: int, size: int) -> torch.Tensor:
    ring = [(src + 1) % size for src in range(size)]
    return plain(functional.permute_tensor(sample(rank, 4), ring, world()))


def in_place_forms(rank: int, size: int) -> Tensors:
    tensor = sample(rank, 2 * size)
    reduced, whole, block = tensor.clone(), torch.zeros(2 * size * size), torch.zeros(2)
    rooms, swapped = [torch.zeros(2 * size) for _ in range(size)], torch.zeros(2 * size)
    functional.all_reduce_inplace(reduced, "sum", world())
    functional.all_gather_tensor_inplace(whole, tensor, world())
    functional.reduce_scatter_tensor_inplace(block, tensor, "sum", world())
    functional.all_gather_inplace(rooms, tensor, world())
    functional.all_to_all_inplace(swapped, tensor, group=world())
    return [reduced, whole, block, *rooms, swapped]


def dtypes(rank: int, size: int) -> Tensors:
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
    return [plain(functional.all_reduce(sample(rank, 7, dtype=dtype).abs(), "sum", world())) for dtype in kinds]


def several_under_way(rank: int, size: int) -> Tensors:
    pending = [functional.all_reduce(sample(rank, 1000 * n), "sum", world()) for n in range(1, 20)]
    assert any(isinstance(one, functional.AsyncCollectiveTensor) for one in pending)
    return [plain(one).sum() for one in reversed(pending)]


def with_gradient(run: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> Tensors:
    """Return a function's result and the gradient of a weighted sum of it."""
    leaf = tensor.clone().requires_grad_()
    result = run(leaf)
    weights = torch.arange(result.numel(), dtype=result.dtype).view(result.shape)
    (result * weights).sum().backward()
    assert leaf.grad is not None
    return [result.detach().clone(), leaf.grad.clone()]


def differentiable(rank: int, size: int) -> list[Tensors]:
    tensor = sample(rank, 2 * size, 3)
    to = [rank + dst + 1 for dst in range(size)]
    return [
        with_gradient(lambda x: functional.all_gather_single_autograd(x, 0, world()), tensor),
        with_gradient(lambda x: functional.all_gather_tensor_autograd(x, 1, world()), tensor),
        with_gradient(lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, world()), tensor),
        with_gradient(lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world()), tensor),
        with_gradient(lambda x: functional.all_to_all_single_autograd(x, None, None, world()), tensor),
        with_gradient(lambda x: functional.all_to_all_single_autograd(x, to, to, world()), sample(rank, sum(to))),
        with_gradient(lambda x: functional.all_reduce(x, "sum", world()), tensor),
    ]


# ---- the operators, as compiled programs call them


def operators(rank: int, size: int) -> list[Any]:
    name, tensor = named(), sample(rank, 2 * size, 3)
    several = [sample(rank, size, n) for n in (1, 4)]
    return [
        waited(native.all_reduce(tensor, "sum", name)),
        waited(native.all_reduce_coalesced(several, "sum", name)),
        waited(native.all_gather_into_tensor(tensor, size, name)),
        waited(native.all_gather_into_tensor_coalesced(several, size, name)),
        waited(native.reduce_scatter_tensor(tensor, "sum", size, name)),
        waited(native.reduce_scatter_tensor_coalesced(several, "sum", size, name)),
        waited(native.all_to_all_single(tensor, [2] * size, [2] * size, name)),
        waited(native.broadcast(tensor, 1, name)),
        waited(torch.ops._dtensor.shard_dim_alltoall(sample(rank, 2, 3 * size), 0, 1, name)),
    ]


def operators_in_place(rank: int, size: int) -> list[Any]:
    name = named()
    return [
        waited(native.all_reduce_(sample(rank, 5), "sum", name)),
        waited(native.all_reduce_coalesced_([sample(rank, n) for n in (2, 3)], "sum", name)),
        waited(native.broadcast_(sample(rank, 5), 1, name)),
    ]


def operators_with_out(rank: int, size: int) -> Tensors:
    """inductor makes these of FSDP's collectives."""
    name, tensor = named(), sample(rank, 2 * size)
    gathered, block = torch.zeros(2 * size * size), torch.zeros(2)
    waited(native.all_gather_into_tensor_out(tensor, size, name, out=gathered))
    waited(native.reduce_scatter_tensor_out(tensor, "sum", size, name, out=block))
    return [gathered, block]


def operators_of_messages(rank: int, size: int) -> Tensors:
    """Around the ring: one operator for each message, then all of them in one."""
    name, ahead, behind = named(), (rank + 1) % size, (rank - 1) % size
    sent = native.isend(sample(rank, 4), ahead, 3, name)
    one = waited(native.irecv(torch.zeros(4), behind, 3, name))
    waited(sent)
    tensors = [sample(rank, 6), torch.zeros(6)]
    waited(native.batch_p2p_ops(["isend", "irecv"], [ahead, behind], [1, 1], tensors, name))
    return [one, tensors[1]]


def operators_with_gradients(rank: int, size: int) -> list[Tensors]:
    name, tensor, autograd = named(), sample(rank, 2 * size), torch.ops._c10d_functional_autograd
    return [
        with_gradient(lambda x: native.wait_tensor(autograd.all_gather_into_tensor(x, size, name)), tensor),
        with_gradient(lambda x: native.wait_tensor(autograd.reduce_scatter_tensor(x, "sum", size, name)), tensor),
        with_gradient(
            lambda x: native.wait_tensor(autograd.all_to_all_single(x, [2] * size, [2] * size, name)), tensor
        ),
    ]


# ---- torch.distributed.nn.functional


def nn_all_reduce(rank: int, size: int) -> list[Tensors]:
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    return [
        with_gradient(lambda x, op=op: nn_functional.all_reduce(x, op, world()), sample(rank, 3, 4)) for op in kinds
    ]


def nn_broadcast(rank: int, size: int) -> list[Tensors]:
    return [with_gradient(lambda x: nn_functional.broadcast(x, 1, world()), sample(rank, 4))]


def nn_reduce(rank: int, size: int) -> Tensors:
    value, gradient = with_gradient(lambda x: nn_functional.reduce(x, 1, group=world()), sample(rank, 4))
    return [value, gradient] if rank == 1 else [gradient]


def nn_gather(rank: int, size: int) -> list[Tensors]:
    return [with_gradient(lambda x: torch.stack(nn_functional.gather(x, 1, world())), sample(rank, 4))]


def nn_scatter(rank: int, size: int) -> list[Tensors]:
    return [with_gradient(lambda x: nn_functional.scatter(list(x.unbind()), 1, world()), sample(rank, size, 4))]


def nn_all_gather(rank: int, size: int) -> list[Tensors]:
    return [with_gradient(lambda x: torch.stack(nn_functional.all_gather(x, world())), sample(rank, 4))]


def nn_reduce_scatter(rank: int, size: int) -> list[Tensors]:
    def run(leaf: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nn_functional.reduce_scatter(torch.zeros(4), list(leaf.unbind()), group=world())
        return out

    return [with_gradient(run, sample(rank, size, 4))]


def nn_all_to_all(rank: int, size: int) -> list[Tensors]:
    to = [rank + dst + 1 for dst in range(size)]

    def lists(leaf: torch.Tensor) -> torch.Tensor:
        rooms = [torch.zeros(3) for _ in range(size)]
        return torch.stack(nn_functional.all_to_all(rooms, list(leaf.unbind()), world()))

    def single(leaf: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(sum(to))
        out: torch.Tensor = nn_functional.all_to_all_single(room, leaf, to, to, world())
        return out

    return [with_gradient(lists, sample(rank, size, 3)), with_gradient(single, sample(rank, sum(to)))]


def nn_all_gather_base(rank: int, size: int) -> torch.Tensor:
    """Forward only: torch gives it a gradient for NCCL alone."""
    out: torch.Tensor = nn_functional._all_gather_base(torch.zeros(size * 4), sample(rank, 4), world())
    return out


FUNCTIONAL = Suite(
    all_reduce,
    average,
    ways_to_name_a_group,
    input_is_left_alone,
    broadcast,
    gather_and_reduce_scatter,
    coalesced,
    all_to_all,
    permute,
    in_place_forms,
    dtypes,
    several_under_way,
    differentiable,
    operators,
    operators_in_place,
    operators_with_out,
    operators_of_messages,
    operators_with_gradients,
    nn_all_reduce,
    nn_broadcast,
    nn_reduce,
    nn_gather,
    nn_scatter,
    nn_all_gather,
    nn_reduce_scatter,
    nn_all_to_all,
    nn_all_gather_base,
)


@FUNCTIONAL.cases("shm", "server")
def test_functional(check: Check, mode: str) -> None:
    FUNCTIONAL.compare(check, mode)
