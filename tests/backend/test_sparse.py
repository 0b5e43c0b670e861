"""all_reduce of sparse tensors."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from tests.backend.values import OPS, SIZES, expected_sum, options, same
from torch_bps.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.may_leak("the process groups live as long as the module")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", [OPS.SUM, OPS.AVG])
def test_sparse_all_reduce(worlds, size, dtype, op):
    rows = [torch.tensor([[0, 3 + rank, 3 + rank]]) for rank in range(size)]  # the last two are added up
    values = [torch.arange(1, 7).reshape(3, 2).to(dtype) * (rank + 1) for rank in range(size)]
    tensors = [torch.sparse_coo_tensor(rows[r], values[r], (8, 2), check_invariants=True) for r in range(size)]
    parts = [tensor.to_dense() for tensor in tensors]
    works = worlds[size].run(
        lambda group, rank: group.allreduce([tensors[rank]], options(AllreduceOptions, reduceOp=op))
    )
    for tensor, work in zip(tensors, works, strict=True):
        same(tensor.to_dense(), expected_sum(parts, op))
        assert work.get_future().value()[0] is tensor


def test_sparse_ones_do_not_disturb_the_order_of_others(worlds):
    """The second step of a sparse all_reduce starts at different times on different ranks."""
    world = worlds[3]
    sparse = [torch.eye(4).to_sparse() * (rank + 1) for rank in range(3)]
    after = [torch.full((2,), rank, dtype=torch.int32) for rank in range(3)]
    works = [group.allreduce([sparse[rank]]) for rank, group in enumerate(world.groups[:2])]
    works += [group.allreduce([after[rank]]) for rank, group in enumerate(world.groups[:2])]
    works.append(world.groups[2].allreduce([sparse[2]]))
    works[-1].wait()
    works.append(world.groups[2].allreduce([after[2]]))
    for work in works:
        work.wait()
    for rank in range(3):
        same(sparse[rank].to_dense(), torch.eye(4) * 6)
        same(after[rank], torch.full((2,), 3, dtype=torch.int32))


def test_sparse_tensors_of_different_shapes(worlds):
    tensors = [torch.eye(4 + rank).to_sparse() for rank in range(2)]
    works = [group.allreduce([tensors[rank]]) for rank, group in enumerate(worlds[2].groups)]
    for work in works:
        with pytest.raises(MismatchError, match="another shape"):
            work.wait()


def test_sparse_tensors_elsewhere(worlds):
    with pytest.raises(UnsupportedError, match="layout sparse_coo"):
        worlds[2].groups[0].broadcast([torch.eye(2).to_sparse()], 0)
    with pytest.raises(UnsupportedError, match="MAX of a sparse_coo"):
        worlds[2].groups[0].allreduce([torch.eye(2).to_sparse()], OPS.MAX)
