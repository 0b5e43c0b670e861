"""Each collective of the benchmark: its tensors, its call, its check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

REDOPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Case:
    """One collective at one size: `run` it as often as you like; `fill` and `wrong` go around a run that is checked.

    Args:
        nbytes: as in table.Row; rounded down so that it divides among the ranks.
        group: whose backend is measured.
    """

    def __init__(self, collective: str, nbytes: int, dtype: torch.dtype, redop: str, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._redop = redop
        self._op = REDOPS[redop]
        self._group = group
        shared = collective in ("all_reduce", "broadcast")
        self.count = nbytes // dtype.itemsize // (1 if shared else self.size)
        """elements that each rank pushes, or for each of the others"""
        whole = self.count * self.size
        length = {"all_gather": self.count, "reduce_scatter": whole, "all_to_all": whole}.get(collective, self.count)
        out = {"all_gather": whole, "reduce_scatter": self.count, "all_to_all": whole}.get(collective, 0)
        self.nbytes = max(length, out) * dtype.itemsize
        self._input = torch.zeros(length, dtype=dtype)
        self._output = torch.zeros(out, dtype=dtype) if out else self._input
        self.run: Callable[[], object] = getattr(self, f"_{collective}")
        self._expected: Callable[[], torch.Tensor] = getattr(self, f"_{collective}_expected")
        self.has_redop = collective in ("all_reduce", "reduce_scatter")

    def fill(self) -> None:
        """Write what the next run is checked with."""
        self._input.copy_(self._values(self.rank, self._input.numel()))

    def wrong(self) -> int:
        """Return how many elements of the result are not what they should be."""
        return int((self._output != self._expected()).sum())

    def _values(self, rank: int, length: int) -> torch.Tensor:
        """Return what a rank pushes: small numbers, so that any order of additions gives the same."""
        return (torch.arange(length) % 5 + rank % 3).to(self._input.dtype)

    def _reduced(self) -> torch.Tensor:
        parts = torch.stack([self._values(rank, self._input.numel()).double() for rank in range(self.size)])
        if self._redop in ("sum", "avg"):
            total = parts.sum(0) / (self.size if self._redop == "avg" else 1)
        else:
            total = parts.amin(0) if self._redop == "min" else parts.amax(0)
        return total.to(self._input.dtype)

    def _all_reduce(self) -> None:
        dist.all_reduce(self._input, self._op, group=self._group)

    _all_reduce_expected = _reduced

    def _broadcast(self) -> None:
        dist.broadcast(self._input, 0, group=self._group)

    def _broadcast_expected(self) -> torch.Tensor:
        return self._values(0, self.count)

    def _all_gather(self) -> None:
        dist.all_gather_into_tensor(self._output, self._input, group=self._group)

    def _all_gather_expected(self) -> torch.Tensor:
        return torch.cat([self._values(rank, self.count) for rank in range(self.size)])

    def _reduce_scatter(self) -> None:
        dist.reduce_scatter_tensor(self._output, self._input, self._op, group=self._group)

    def _reduce_scatter_expected(self) -> torch.Tensor:
        return self._reduced()[self.rank * self.count : (self.rank + 1) * self.count]

    def _all_to_all(self) -> None:
        dist.all_to_all_single(self._output, self._input, group=self._group)

    def _all_to_all_expected(self) -> torch.Tensor:
        own = slice(self.rank * self.count, (self.rank + 1) * self.count)
        return torch.cat([self._values(rank, self._input.numel())[own] for rank in range(self.size)])
