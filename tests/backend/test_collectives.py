"""Every collective against a direct computation: dtypes, shapes, strides, group sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _make_nccl_premul_sum,
)

from tests.backend.conftest import World
from tests.backend.values import COMPLEX, INTS, MOVED, OPS, SIZES, SUMMED, expected_sum, options, same

pytestmark = pytest.mark.may_leak("the process groups live as long as the module")


# ---- layouts: a tensor with these values that is not simply dense


def dense(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def transposed(values: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(values.dim())))
    return values.permute(order).contiguous().permute(order)


def with_gaps(values: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(*values.shape, 3, dtype=values.dtype)
    room[..., 1] = values
    return room[..., 1]


def offset(values: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(values.numel() + 3, dtype=values.dtype)
    room[2 : 2 + values.numel()] = values.flatten()
    return room[2 : 2 + values.numel()].view(values.shape)


def conjugated(values: torch.Tensor) -> torch.Tensor:
    return values.conj().resolve_conj().conj() if values.is_complex() else values.clone()


LAYOUTS = (dense, transposed, with_gaps, offset, conjugated)


@dataclass
class Case:
    world: World
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout_number: int
    seed: int

    def layout(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor with these values; each has another layout than the one before."""
        self.layout_number += 1
        return LAYOUTS[self.layout_number % len(LAYOUTS)](values)

    def values(self, rank: int, *shape: int) -> torch.Tensor:
        """Return rank's contribution: small numbers, so that every dtype holds all sums and products exactly."""
        generator = torch.Generator().manual_seed(self.seed * 31 + rank)
        shape = shape or self.shape
        whole = torch.randint(1, 4, shape, generator=generator).to(self.dtype)
        return whole + 1j * torch.randint(1, 4, shape, generator=generator) if self.dtype.is_complex else whole

    def tensor(self, rank: int, *shape: int) -> torch.Tensor:
        return self.layout(self.values(rank, *shape))

    def room(self, *shape: int) -> torch.Tensor:
        return self.layout(torch.zeros(shape or self.shape, dtype=self.dtype))


def shapes(min_dims: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 4), min_size=min_dims, max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn, worlds: dict[int, World], dtypes: tuple[torch.dtype, ...], min_dims: int = 0) -> Case:
    return Case(
        worlds[draw(st.sampled_from(SIZES))],
        draw(st.sampled_from(dtypes)),
        draw(shapes(min_dims)),
        draw(st.integers(0, len(LAYOUTS) - 1)),
        draw(st.integers(0, 99)),
    )


def ops_for(dtype: torch.dtype) -> list[object]:
    ops = [OPS.SUM, OPS.PRODUCT]
    if dtype is not torch.bool:
        ops.append(OPS.AVG)
    if dtype not in COMPLEX:
        ops += [OPS.MIN, OPS.MAX]
    if dtype in INTS or dtype is torch.bool:
        ops += [OPS.BAND, OPS.BOR, OPS.BXOR]
    return ops


# ---- reductions


@given(data=st.data())
def test_all_reduce(worlds, data):
    case = data.draw(cases(worlds, SUMMED))
    op = data.draw(st.sampled_from(ops_for(case.dtype)))
    tensors = [case.tensor(rank) for rank in range(case.world.size)]
    expected = expected_sum([tensor.resolve_conj().clone() for tensor in tensors], op)
    case.world.run(lambda group, rank: group.allreduce([tensors[rank]], options(AllreduceOptions, reduceOp=op)))
    for tensor in tensors:
        same(tensor, expected)


@given(data=st.data())
def test_reduce_changes_only_the_root(worlds, data):
    case = data.draw(cases(worlds, SUMMED))
    op = data.draw(st.sampled_from(ops_for(case.dtype)))
    root = data.draw(st.integers(0, case.world.size - 1))
    tensors = [case.tensor(rank) for rank in range(case.world.size)]
    before = [tensor.resolve_conj().clone() for tensor in tensors]
    opts = options(ReduceOptions, reduceOp=op, rootRank=root)
    case.world.run(lambda group, rank: group.reduce([tensors[rank]], opts))
    before[root] = expected_sum(before, op)
    for tensor, value in zip(tensors, before, strict=True):
        same(tensor, value)


@given(data=st.data())
def test_reduce_scatter(worlds, data):
    case = data.draw(cases(worlds, SUMMED))
    op = data.draw(st.sampled_from(ops_for(case.dtype)))
    size = case.world.size
    inputs = [[case.tensor(rank * size + i) for i in range(size)] for rank in range(size)]
    outputs = [case.room() for _ in range(size)]
    opts = options(ReduceScatterOptions, reduceOp=op)
    case.world.run(lambda group, rank: group.reduce_scatter([outputs[rank]], [inputs[rank]], opts))
    for i, output in enumerate(outputs):
        same(output, expected_sum([inputs[rank][i].resolve_conj() for rank in range(size)], op))


@given(data=st.data())
def test_reduce_scatter_single(worlds, data):
    case = data.draw(cases(worlds, SUMMED, min_dims=1))
    size = case.world.size
    whole = (case.shape[0] * size, *case.shape[1:])
    inputs = [case.tensor(rank, *whole) for rank in range(size)]
    outputs = [case.room() for _ in range(size)]
    opts = options(ReduceScatterOptions, reduceOp=OPS.SUM)
    case.world.run(lambda group, rank: group._reduce_scatter_base(outputs[rank], inputs[rank], opts))
    total = expected_sum([tensor.resolve_conj() for tensor in inputs], OPS.SUM)
    for rank, output in enumerate(outputs):
        same(output, total[rank * case.shape[0] : (rank + 1) * case.shape[0]])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [2.0, torch.tensor([3.0])])
def test_premul_sum_multiplies_each_input_once(worlds, size, factor):
    op = _make_nccl_premul_sum(factor)
    tensors = [torch.full((3,), float(rank + 1)) for rank in range(size)]
    worlds[size].run(lambda group, rank: group.allreduce([tensors[rank]], options(AllreduceOptions, reduceOp=op)))
    for tensor in tensors:
        same(tensor, torch.full((3,), float(factor) * size * (size + 1) / 2))
    kept = torch.ones(4)
    inputs = [kept.repeat(size) for _ in range(size)]
    outputs = [torch.zeros(4) for _ in range(size)]
    opts = options(ReduceScatterOptions, reduceOp=op)
    worlds[size].run(lambda group, rank: group.reduce_scatter_single(outputs[rank], inputs[rank], opts))
    for output in outputs:
        same(output, torch.full((4,), float(factor) * size))
    same(inputs[0], kept.repeat(size))  # the inputs stay as they are


def test_coalesced(worlds):
    size = 3
    world = worlds[size]
    tensors = [[torch.full((k + 1,), rank + 1, dtype=dtype) for k, dtype in enumerate(INTS)] for rank in range(size)]
    world.run(lambda group, rank: group.allreduce_coalesced(tensors[rank], options(AllreduceCoalescedOptions)))
    for rank in range(size):
        for k, dtype in enumerate(INTS):
            same(tensors[rank][k], torch.full((k + 1,), 6, dtype=dtype))
    ins = [[torch.full((2,), 10 * rank + k) for k in range(4)] for rank in range(size)]
    outs = [[torch.zeros(2 * size, dtype=torch.int64) for _ in range(4)] for _ in range(size)]
    world.run(lambda group, rank: group.allgather_into_tensor_coalesced(outs[rank], ins[rank]))
    lists = [[[torch.zeros(2, dtype=torch.int64) for _ in range(4)] for _ in range(size)] for _ in range(size)]
    world.run(lambda group, rank: group.allgather_coalesced(lists[rank], ins[rank]))
    for rank in range(size):
        for k in range(4):
            expected = [ins[other][k] for other in range(size)]
            same(outs[rank][k], torch.cat(expected))
            for other in range(size):
                same(lists[rank][other][k], expected[other])
    totals = [[torch.zeros(2, dtype=torch.int64) for _ in range(4)] for _ in range(size)]
    world.run(lambda group, rank: group.reduce_scatter_tensor_coalesced(totals[rank], outs[rank]))
    for rank in range(size):
        for k in range(4):
            same(totals[rank][k], ins[rank][k] * size)


# ---- copies


@given(data=st.data())
def test_broadcast(worlds, data):
    case = data.draw(cases(worlds, MOVED))
    root = data.draw(st.integers(0, case.world.size - 1))
    tensors = [case.tensor(rank) for rank in range(case.world.size)]
    expected = tensors[root].contiguous().resolve_conj().clone()
    opts = options(BroadcastOptions, rootRank=root)
    case.world.run(lambda group, rank: group.broadcast([tensors[rank]], opts))
    for tensor in tensors:
        same(tensor, expected)


@given(data=st.data())
def test_all_gather_of_unequal_sizes(worlds, data):
    case = data.draw(cases(worlds, MOVED))
    size = case.world.size
    sizes = [data.draw(shapes()) for _ in range(size)]
    inputs = [
        case.layout(case.values(rank, *sizes[rank]).reshape(sizes[rank]))
        if sizes[rank]
        else case.layout(case.values(rank, 1).reshape(()))
        for rank in range(size)
    ]
    outputs = [[case.layout(torch.zeros(shape, dtype=case.dtype)) for shape in sizes] for _ in range(size)]
    case.world.run(lambda group, rank: group.allgather([outputs[rank]], [inputs[rank]]))
    for output in outputs:
        for rank in range(size):
            same(output[rank], inputs[rank].contiguous().resolve_conj())


@given(data=st.data())
def test_all_gather_single_concatenates_and_stacks(worlds, data):
    case = data.draw(cases(worlds, MOVED, min_dims=1))
    size = case.world.size
    inputs = [case.tensor(rank) for rank in range(size)]
    plain = [tensor.contiguous().resolve_conj() for tensor in inputs]
    for shape, expected in (
        ((case.shape[0] * size, *case.shape[1:]), torch.cat(plain)),
        ((size, *case.shape), torch.stack(plain)),
    ):
        outputs = [case.room(*shape) for _ in range(size)]
        case.world.run(lambda group, rank, outputs=outputs: group.all_gather_single(outputs[rank], inputs[rank]))
        for output in outputs:
            same(output, expected)


@given(data=st.data())
def test_gather_and_scatter(worlds, data):
    case = data.draw(cases(worlds, MOVED))
    size = case.world.size
    root = data.draw(st.integers(0, size - 1))
    inputs = [case.tensor(rank) for rank in range(size)]
    collected = [case.room() for _ in range(size)]
    opts = options(GatherOptions, rootRank=root)
    case.world.run(lambda group, rank: group.gather([collected] if rank == root else [], [inputs[rank]], opts))
    for tensor, given_ in zip(collected, inputs, strict=True):
        same(tensor, given_.contiguous().resolve_conj())
    outputs = [case.room() for _ in range(size)]
    opts = options(ScatterOptions, rootRank=root)
    case.world.run(lambda group, rank: group.scatter([outputs[rank]], [collected] if rank == root else [], opts))
    for tensor, given_ in zip(outputs, inputs, strict=True):
        same(tensor, given_.contiguous().resolve_conj())


@given(data=st.data())
def test_all_to_all(worlds, data):
    case = data.draw(cases(worlds, MOVED))
    size = case.world.size
    lengths = [[data.draw(st.integers(0, 3)) for _ in range(size)] for _ in range(size)]
    inputs = [[case.tensor(rank * size + dst, lengths[rank][dst], 2) for dst in range(size)] for rank in range(size)]
    outputs = [[case.room(lengths[src][rank], 2) for src in range(size)] for rank in range(size)]
    case.world.run(lambda group, rank: group.alltoall(outputs[rank], inputs[rank]))
    expected = [[inputs[src][rank].contiguous().resolve_conj() for src in range(size)] for rank in range(size)]
    for rank in range(size):
        for src in range(size):
            same(outputs[rank][src], expected[rank][src])
    whole_in = [case.layout(torch.cat([t.contiguous().resolve_conj() for t in inputs[rank]])) for rank in range(size)]
    whole_out = [case.room(sum(lengths[src][rank] for src in range(size)), 2) for rank in range(size)]
    case.world.run(
        lambda group, rank: group.alltoall_base(
            whole_out[rank], whole_in[rank], [lengths[src][rank] for src in range(size)], lengths[rank]
        )
    )
    for rank in range(size):
        same(whole_out[rank], torch.cat(expected[rank]))


def test_all_to_all_with_equal_splits(worlds):
    inputs = [torch.arange(6) + 10 * rank for rank in range(3)]
    outputs = [torch.zeros(6, dtype=torch.int64) for _ in range(3)]
    worlds[3].run(lambda group, rank: group.all_to_all_single(outputs[rank], inputs[rank], [], []))
    for rank in range(3):
        same(outputs[rank], torch.cat([inputs[src][2 * rank : 2 * rank + 2] for src in range(3)]))


def test_barrier_waits_for_all(worlds):
    world = worlds[2]
    first = world.groups[0].barrier()
    assert not first.is_completed()
    world.groups[1].barrier().wait()
    first.wait()


def test_gaps_of_a_view_stay_untouched(worlds):
    rooms = [torch.full((4, 3), 7.0) for _ in range(2)]
    columns = [room[:, 1] for room in rooms]
    for column in columns:
        column.fill_(1.0)
    worlds[2].run(lambda group, rank: group.allreduce([columns[rank]]))
    for room in rooms:
        same(room, torch.tensor([[7.0, 2.0, 7.0]] * 4))


def test_output_that_is_part_of_the_input(worlds):
    """FSDP gathers and scatters in place: a rank's own block is a view of the whole."""
    wholes = [torch.zeros(6) for _ in range(3)]
    for rank, whole in enumerate(wholes):
        whole[2 * rank : 2 * rank + 2] = rank + 1
    worlds[3].run(lambda group, rank: group.all_gather_single(wholes[rank], wholes[rank][2 * rank : 2 * rank + 2]))
    for whole in wholes:
        same(whole, torch.tensor([1.0, 1, 2, 2, 3, 3]))
    worlds[3].run(lambda group, rank: group.reduce_scatter_single(wholes[rank][2 * rank : 2 * rank + 2], wholes[rank]))
    for rank, whole in enumerate(wholes):
        same(whole[2 * rank : 2 * rank + 2], torch.full((2,), 3.0 * (rank + 1)))


def test_parameters_that_require_grad(worlds):
    tensors = [torch.ones(3, requires_grad=True) for _ in range(2)]
    columns = [torch.ones(3, 2, requires_grad=True).t() for _ in range(2)]
    worlds[2].run(lambda group, rank: group.allreduce([tensors[rank]]))
    worlds[2].run(lambda group, rank: group.allreduce([columns[rank]]))
    for tensor in (*tensors, *columns):
        assert tensor.detach().eq(2).all()


# ---- what core is told


def test_labels_tell_kind_dtype_and_shape(worlds):
    hub = worlds[2].hub
    worlds[2].run(lambda group, rank: group.allreduce([torch.zeros(2, 3).half()], options(AllreduceOptions)))
    assert hub.submitted[-1].label == "all_reduce SUM float16[2, 3]"
    worlds[2].run(lambda group, rank: group.broadcast([torch.zeros(()).to(torch.float8_e5m2)], 0))
    assert hub.submitted[-1].label == "broadcast float8_e5m2[]"


def test_a_blocking_caller_goes_first(worlds):
    for async_op in (True, False):
        opts = options(AllgatherOptions, asyncOp=async_op)
        outs = [torch.zeros(2) for _ in range(2)]
        worlds[2].run(
            lambda group, rank, outs=outs, opts=opts: group.all_gather_single(outs[rank], torch.ones(1), opts)
        )
        assert worlds[2].hub.submitted[-1].blocking is not async_op
