"""Each collective as a row of wire.ops: from tensors to pushes and pulls.

Functions here fill a Call and send nothing; what a rank would send to itself they copy at once. Errors in what the user
passed are ValueErrors, as everywhere in torch.distributed; what byteps cannot do is an UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from torch_bps.backend.call import Call
from torch_bps.backend.kinds import check_reduce, code_of, name_of, reduce_kind
from torch_bps.backend.staging import check_no_overlap, memory_of
from torch_bps.wire import ops
from torch_bps.wire.dtypes import RAW, REDUCE_KINDS

Tensors = Sequence[torch.Tensor]

_NOTHING: Final = memoryview(bytearray())


def all_reduce(call: Call, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
    """Sum `tensor` over all ranks, in place."""
    _reduce(call, ops.ALL_REDUCE, tensor, op, 0, True)


def reduce(call: Call, tensor: torch.Tensor, op: dist.ReduceOp, root: int) -> None:
    """Sum `tensor` over all ranks into the root's; the others' stay as they are."""
    _check_root(call, "reduce", root)
    _reduce(call, ops.REDUCE_TO_ROOT, tensor, op, root, call.rank == root)


def _reduce(call: Call, code: int, tensor: torch.Tensor, op: dist.ReduceOp, root: int, wanted: bool) -> None:
    name = ops.ROWS[code].name
    kind, factor = reduce_kind(op)
    dtype = check_reduce(name, kind, tensor.dtype)
    if factor is not None:
        scaled = _scaled(tensor, factor)
        if call.size == 1:
            _copy(tensor, scaled)
        pushed = call.pushed(scaled)
        pulled = call.pulled(tensor) if wanted and call.size > 1 else pushed
    else:
        pushed = pulled = call.in_place(tensor) if wanted else call.pushed(tensor)
    pulls = ((0, pulled),) if wanted else ()
    call.add(code, dtype, _label(name, tensor, REDUCE_KINDS[kind]), ((0, pushed),), pulls, redop=kind, root=root)


def reduce_scatter(call: Call, output: torch.Tensor, inputs: Tensors, op: dist.ReduceOp) -> None:
    """Sum the inputs, one for each rank, over all ranks; rank i's output gets the sum of the i-th."""
    name = "reduce_scatter"
    _check_list(call, name, "input list", inputs)
    _check_same(name, output, inputs[call.rank], "output", f"input {call.rank}")
    kind, factor = reduce_kind(op)
    dtype = check_reduce(name, kind, output.dtype)
    if factor is not None:
        inputs = [_scaled(tensor, factor) for tensor in inputs]
    if call.size == 1:
        _copy(output, inputs[0])
        return
    pushes = tuple((rank, call.pushed(tensor)) for rank, tensor in enumerate(inputs))
    pulls = ((call.rank, call.pulled(output)),)
    call.add(ops.REDUCE_SCATTER, dtype, _label(name, output, REDUCE_KINDS[kind]), pushes, pulls, redop=kind)


def reduce_scatter_single(call: Call, output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp) -> None:
    """As reduce_scatter, with the inputs one after the other in one tensor."""
    name = "reduce_scatter"
    _check_dtypes(name, output, input)
    _check_numel(name, input.numel(), output.numel() * call.size, "input", f"{call.size} times the output's")
    kind, factor = reduce_kind(op)
    dtype = check_reduce(name, kind, output.dtype)
    if factor is not None:
        input = _scaled(input, factor)
    if call.size == 1:
        _copy(output, input)
        return
    pushes = _blocks(call.pushed(input), call.size)
    pulls = ((call.rank, call.pulled(output)),)
    call.add(ops.REDUCE_SCATTER, dtype, _label(name, output, REDUCE_KINDS[kind]), pushes, pulls, redop=kind)


def broadcast(call: Call, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` into all others'."""
    _check_root(call, "broadcast", root)
    label = _label("broadcast", tensor)
    if call.rank == root:
        call.add(ops.BROADCAST, code_of(tensor.dtype), label, ((0, call.pushed(tensor)),), root=root)
    else:
        call.add(ops.BROADCAST, code_of(tensor.dtype), label, (), ((0, call.pulled(tensor)),), root=root)


def all_gather(call: Call, outputs: Tensors, input: torch.Tensor) -> None:
    """Copy every rank's input into the output of its number; sizes may differ from rank to rank."""
    _check_list(call, "all_gather", "output list", outputs)
    _check_same("all_gather", outputs[call.rank], input, f"output {call.rank}", "input")
    _check_dtypes("all_gather", input, *outputs)
    pulls = _from_others(call, outputs)
    pushes = ((call.rank, call.pushed(input)),)
    _copy(outputs[call.rank], input)
    call.add(ops.ALL_GATHER, code_of(input.dtype), _label("all_gather", input), pushes, pulls)


def all_gather_single(call: Call, output: torch.Tensor, input: torch.Tensor) -> None:
    """Copy every rank's input into `output`, one after the other (concatenated or stacked: the same bytes)."""
    _check_dtypes("all_gather", input, output)
    numel = input.numel()
    _check_numel("all_gather", output.numel(), numel * call.size, "output", f"{call.size} times the input's")
    source, room = call.outbound(input), call.inbound(output)
    pulls = tuple(piece for piece in _blocks(memory_of(room), call.size) if piece[0] != call.rank)
    room.detach().view(-1).narrow(0, call.rank * numel, numel).copy_(source.detach().view(-1))
    call.add(
        ops.ALL_GATHER,
        code_of(input.dtype),
        _label("all_gather", input),
        ((call.rank, memory_of(source)),),
        pulls,
    )


def gather(call: Call, outputs: Tensors, input: torch.Tensor, root: int) -> None:
    """Copy every rank's input into the root's output of its number; `outputs` is empty elsewhere."""
    _check_root(call, "gather", root)
    label = _label("gather", input)
    if call.rank != root:
        call.add(ops.GATHER, code_of(input.dtype), label, ((call.rank, call.pushed(input)),), root=root)
        return
    _check_list(call, "gather", "output list", outputs)
    _check_same("gather", outputs[root], input, f"output {root}", "input")
    _check_dtypes("gather", input, *outputs)
    pulls = _from_others(call, outputs)
    _copy(outputs[root], input)
    call.add(ops.GATHER, code_of(input.dtype), label, (), pulls, root=root)


def scatter(call: Call, output: torch.Tensor, inputs: Tensors, root: int) -> None:
    """Copy the root's i-th input into rank i's output; `inputs` is empty elsewhere."""
    _check_root(call, "scatter", root)
    label = _label("scatter", output)
    if call.rank != root:
        call.add(ops.SCATTER, code_of(output.dtype), label, (), ((call.rank, call.pulled(output)),), root=root)
        return
    _check_list(call, "scatter", "input list", inputs)
    _check_same("scatter", output, inputs[root], "output", f"input {root}")
    _check_dtypes("scatter", output, *inputs)
    pushes = tuple((rank, call.pushed(tensor)) for rank, tensor in enumerate(inputs) if rank != root)
    _copy(output, inputs[root])
    call.add(ops.SCATTER, code_of(output.dtype), label, pushes, root=root)


def all_to_all(call: Call, outputs: Tensors, inputs: Tensors) -> None:
    """Copy input j of rank i into output i of rank j."""
    rank, size = call.rank, call.size
    _check_list(call, "all_to_all", "output list", outputs)
    _check_list(call, "all_to_all", "input list", inputs)
    _check_same("all_to_all", outputs[rank], inputs[rank], f"output {rank}", f"input {rank}")
    _check_dtypes("all_to_all", *inputs, *outputs)
    pushes = tuple((rank * size + dst, call.pushed(tensor)) for dst, tensor in enumerate(inputs) if dst != rank)
    pulls = tuple((src * size + rank, call.pulled(tensor)) for src, tensor in enumerate(outputs) if src != rank)
    _copy(outputs[rank], inputs[rank])
    sizes = "+".join(str(tensor.numel()) for tensor in inputs)
    call.add(
        ops.ALL_TO_ALL,
        code_of(inputs[0].dtype),
        f"all_to_all {name_of(inputs[0].dtype)}[{sizes}]",
        pushes,
        pulls,
    )


def all_to_all_single(
    call: Call, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> None:
    """As all_to_all, with the inputs (and outputs) one after the other along dimension 0; no splits: equal ones."""
    rank, size = call.rank, call.size
    _check_dtypes("all_to_all", input, output)
    sent = _offsets(call, "input", input, input_splits)
    landed = _offsets(call, "output", output, output_splits)
    source, room = call.outbound(input), call.inbound(output)
    own = source.detach().view(-1)[sent[rank] : sent[rank + 1]]
    own_room = room.detach().view(-1)[landed[rank] : landed[rank + 1]]
    _check_numel("all_to_all", own_room.numel(), own.numel(), f"output split {rank}", f"input split {rank}'s")
    own_room.copy_(own)
    itemsize = input.element_size()
    from_memory, to_memory = memory_of(source), memory_of(room)
    pushes = tuple(
        (rank * size + dst, from_memory[sent[dst] * itemsize : sent[dst + 1] * itemsize])
        for dst in range(size)
        if dst != rank
    )
    pulls = tuple(
        (src * size + rank, to_memory[landed[src] * itemsize : landed[src + 1] * itemsize])
        for src in range(size)
        if src != rank
    )
    call.add(ops.ALL_TO_ALL, code_of(input.dtype), _label("all_to_all", input), pushes, pulls)


def barrier(call: Call) -> None:
    """Be done when every rank has come here."""
    call.add(ops.BARRIER, RAW, "barrier", ((0, _NOTHING),), ((0, _NOTHING),))


def _label(name: str, tensor: torch.Tensor, kind: str = "") -> str:
    shape = list(tensor.shape)
    return f"{name} {kind} {name_of(tensor.dtype)}{shape}" if kind else f"{name} {name_of(tensor.dtype)}{shape}"


def _scaled(tensor: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    return (tensor.detach() * factor).to(tensor.dtype)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a rank's own block."""
    if not target.is_contiguous():
        check_no_overlap(target)
    target = target.detach()
    target.copy_(source.detach().reshape(target.shape))


def _blocks(memory: memoryview, size: int) -> tuple[tuple[int, memoryview], ...]:
    """Cut `memory` into `size` equal blocks, numbered by rank."""
    nbytes = memory.nbytes // size
    return tuple((rank, memory[rank * nbytes : (rank + 1) * nbytes]) for rank in range(size))


def _from_others(call: Call, outputs: Tensors) -> tuple[tuple[int, memoryview], ...]:
    return tuple((rank, call.pulled(tensor)) for rank, tensor in enumerate(outputs) if rank != call.rank)


def _offsets(call: Call, what: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """Return where each rank's elements begin in `tensor`, and its end."""
    if tensor.dim() == 0:
        raise ValueError(f"all_to_all: the {what} needs at least one dimension")
    rows = tensor.shape[0]
    if not splits:
        if rows % call.size:
            raise ValueError(f"all_to_all: the {what}'s {rows} rows cannot be split equally among {call.size} ranks")
        splits = [rows // call.size] * call.size
    if len(splits) != call.size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"all_to_all: {what} splits {list(splits)} do not split {rows} rows among {call.size} ranks")
    row = tensor.numel() // rows if rows else 0
    offsets = [0]
    for count in splits:
        offsets.append(offsets[-1] + count * row)
    return offsets


def _check_root(call: Call, name: str, root: int) -> None:
    if not 0 <= root < call.size:
        raise ValueError(f"{name}: root {root} is not a rank of a group of {call.size}")


def _check_list(call: Call, name: str, what: str, tensors: Tensors) -> None:
    if len(tensors) != call.size:
        raise ValueError(f"{name}: the {what} has {len(tensors)} tensors for {call.size} ranks")


def _check_same(name: str, one: torch.Tensor, other: torch.Tensor, one_name: str, other_name: str) -> None:
    _check_dtypes(name, one, other)
    _check_numel(name, one.numel(), other.numel(), one_name, f"{other_name}'s")


def _check_numel(name: str, numel: int, expected: int, what: str, expected_what: str) -> None:
    if numel != expected:
        raise ValueError(f"{name}: the {what} has {numel} elements, which should be {expected_what} {expected}")


def _check_dtypes(name: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    for tensor in others:
        if tensor.dtype is not first.dtype:
            raise ValueError(f"{name}: tensors of different dtypes, {name_of(first.dtype)} and {name_of(tensor.dtype)}")
