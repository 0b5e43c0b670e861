"""What is refused, and that nothing has been sent then."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from tests.backend.values import OPS, SIZES, options, same
from torch_bps.errors import UnsupportedError

pytestmark = pytest.mark.may_leak("the process groups live as long as the module")


def nothing_sent(worlds, size: int = 2) -> int:
    return len(worlds[size].hub.submitted)


@pytest.mark.parametrize(
    ("dtype", "op", "text"),
    [
        (torch.float8_e4m3fn, OPS.SUM, "SUM of float8_e4m3fn"),
        (torch.float32, OPS.BAND, "BAND of float32"),
        (torch.complex64, OPS.MAX, "MAX of complex64"),
        (torch.bool, OPS.AVG, "AVG of bool"),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_sums_that_do_not_exist(worlds, size, dtype, op, text):
    before = nothing_sent(worlds, size)
    group = worlds[size].groups[0]
    with pytest.raises(UnsupportedError, match=text):
        group.allreduce([torch.zeros(2).to(dtype)], options(AllreduceOptions, reduceOp=op))
    assert nothing_sent(worlds, size) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda group, wide: group.allreduce([wide]),
        lambda group, wide: group.broadcast([wide], 1),
        lambda group, wide: group.recv([wide], 1),
        lambda group, wide: group.allgather([[wide, torch.zeros(4, 3)]], [torch.zeros(4, 3)]),
        lambda group, wide: group.reduce_scatter([wide], [[torch.zeros(4, 3)] * 2]),
    ],
)
def test_an_expanded_tensor_cannot_hold_a_result(worlds, call):
    before = nothing_sent(worlds)
    with pytest.raises(UnsupportedError, match="share memory"):
        call(worlds[2].groups[0], torch.zeros(1, 3).expand(4, 3))
    assert nothing_sent(worlds) == before


def test_an_expanded_tensor_can_be_read(worlds):
    inputs = [torch.full((1, 2), rank).expand(3, 2) for rank in range(2)]
    outputs = [[torch.zeros(3, 2, dtype=torch.int64) for _ in range(2)] for _ in range(2)]
    worlds[2].run(lambda group, rank: group.allgather([outputs[rank]], [inputs[rank]]))
    same(outputs[0][1], torch.ones(3, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: g.broadcast([torch.zeros(2)], 5), "root 5 is not a rank of a group of 2"),
        (lambda g: g.allgather([[torch.zeros(2)]], [torch.zeros(2)]), "has 1 tensors for 2 ranks"),
        (lambda g: g.allgather([[torch.zeros(3)] * 2], [torch.zeros(2)]), "output 0 has 3 elements"),
        (lambda g: g.all_gather_single(torch.zeros(3), torch.zeros(2)), "output has 3 elements"),
        (lambda g: g.all_gather_single(torch.zeros(4), torch.zeros(2).half()), "different dtypes"),
        (lambda g: g.reduce_scatter_single(torch.zeros(2), torch.zeros(3)), "input has 3 elements"),
        (lambda g: g.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []), "cannot be split equally"),
        (lambda g: g.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 1], [2, 1]), "do not split 2 rows"),
        (lambda g: g.all_to_all_single(torch.tensor(1), torch.tensor(1), [], []), "at least one dimension"),
        (lambda g: g.send([torch.zeros(2)], 2, 0), "2 is not a rank"),
        (lambda g: g.gather([[torch.zeros(2)]], [torch.zeros(2)], 0), "has 1 tensors for 2 ranks"),
        (lambda g: g.scatter([torch.zeros(2)], [[torch.zeros(3)] * 2], 0), "output has 2 elements"),
    ],
)
def test_wrong_arguments_are_value_errors(worlds, call, text):
    before = nothing_sent(worlds)
    with pytest.raises(ValueError, match=text):
        call(worlds[2].groups[0])
    assert nothing_sent(worlds) == before


def test_meta_tensors(worlds):
    with pytest.raises(UnsupportedError, match="device meta"):
        worlds[2].groups[0].allreduce([torch.zeros(2, device="meta")])
