"""all_reduce of a sparse COO tensor: the sizes first, then each rank's indices and values to every other rank.

The second step cannot be a collective: it starts when the first is done, which is earlier or later on each rank than
the user's next collective, and collectives are matched by their order. So it is messages, under a tag of its own.
"""

from __future__ import annotations

import zlib
from typing import Final

import torch
import torch.distributed as dist

from torch_bps.backend.call import Call
from torch_bps.backend.kinds import HALF_TYPES, check_reduce, code_of, name_of, reduce_kind
from torch_bps.backend.point_to_point import recv, send
from torch_bps.errors import MismatchError, UnsupportedError
from torch_bps.wire import dtypes, ops
from torch_bps.wire.dtypes import REDUCE_KINDS

_KINDS: Final = (dtypes.SUM, dtypes.AVG, dtypes.PREMUL_SUM)


class SparseReduce:
    """One such all_reduce. The sum is made in rank order, so it is the same on all ranks.

    Args:
        tensor: summed in place.
        tag: the same on all ranks, and different from those of other sparse all_reduces under way.
    """

    def __init__(self, call: Call, tensor: torch.Tensor, op: dist.ReduceOp, tag: int) -> None:
        self._kind, factor = reduce_kind(op)
        check_reduce("all_reduce", self._kind, tensor.dtype)
        if tensor.layout is not torch.sparse_coo or self._kind not in _KINDS:
            raise UnsupportedError(
                f"all_reduce: {REDUCE_KINDS[self._kind]} of a {str(tensor.layout).removeprefix('torch.')} tensor "
                "is not supported",
                hint="sparse tensors must be COO, and are summed or averaged",
            )
        self._tensor = tensor
        self._tag = tag
        mine = tensor.detach()
        if tensor.dtype not in HALF_TYPES:  # those would be added, and rounded, here already
            mine = mine.coalesce()
        self._indices, self._values = mine._indices().contiguous(), mine._values().contiguous()
        if factor is not None:
            self._values = (self._values * factor).to(self._values.dtype)
        # each rank's number of values, and a checksum of what else must agree
        self._sizes = torch.zeros(call.size, 2, dtype=torch.int64, device=tensor.device)
        self._sizes[call.rank, 0] = self._values.shape[0]
        self._sizes[call.rank, 1] = zlib.crc32(repr((tensor.sparse_dim(), list(tensor.shape))).encode())
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._exchange_sizes(call)

    def _exchange_sizes(self, call: Call) -> None:
        if call.size == 1:
            self._parts = [(self._indices, self._values)]
            self._add(call)
            return
        tensor = self._tensor
        label = f"all_reduce {REDUCE_KINDS[self._kind]} sparse {name_of(tensor.dtype)}{list(tensor.shape)}"
        sizes = call.in_place(self._sizes)
        row = sizes.nbytes // call.size
        blocks = [(rank, sizes[rank * row : (rank + 1) * row]) for rank in range(call.size)]
        own = blocks.pop(call.rank)
        call.add(ops.ALL_GATHER, code_of(torch.int64), label, (own,), tuple(blocks))
        call.next_stage = self._exchange_values

    def _exchange_values(self, call: Call) -> None:
        counts, checksums = self._sizes.t().tolist()
        for rank in range(call.size):
            if checksums[rank] != checksums[call.rank]:
                raise MismatchError(
                    f"all_reduce: rank {rank}'s sparse tensor has another shape than rank {call.rank}'s, "
                    f"{list(self._tensor.shape)} with {self._tensor.sparse_dim()} sparse dimensions"
                )
        for rank in range(call.size):
            if rank == call.rank:
                self._parts.append((self._indices, self._values))
                continue
            count = counts[rank]
            part = (
                self._indices.new_empty(self._indices.shape[0], count),
                self._values.new_empty(count, *self._values.shape[1:]),
            )
            self._parts.append(part)
            for tensor in (self._indices, self._values):
                send(call, tensor, rank, self._tag)
            for tensor in part:
                recv(call, tensor, rank, self._tag)
        call.next_stage = self._add

    def _add(self, call: Call) -> None:
        values = torch.cat([values for _, values in self._parts])
        dtype = values.dtype
        if dtype in HALF_TYPES:
            values = values.float()
        indices = torch.cat([indices for indices, _ in self._parts], dim=1)
        total = torch.sparse_coo_tensor(indices, values, self._tensor.shape, check_invariants=True).coalesce()
        if self._kind == dtypes.AVG:
            total = _divided(total, call.size)
        with torch.no_grad():
            self._tensor.copy_(total.to(dtype))  # not detach(): that would get the new indices and values alone


def _divided(total: torch.Tensor, size: int) -> torch.Tensor:
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total / size
    values = torch.div(total.values(), size, rounding_mode="trunc")
    return torch.sparse_coo_tensor(total.indices(), values, total.shape, is_coalesced=True, check_invariants=False)
