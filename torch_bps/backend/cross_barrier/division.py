"""Divide a bucket by the number of ranks, with the very rounding of DDP's own reduction.

Without a comm hook DDP multiplies a gradient by 1/n while it copies it into the bucket, and divides it by n where it
accumulated in the bucket already (gradient_as_bucket_view, and a gradient that was not set to None). The two differ in
the last bit unless n is a power of two. Called by barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_bps.backend.cross_barrier.arrival import BucketPlan


class Division:
    """Divides buckets of one model.

    Cost: one pass over the bucket; a call for each gradient where both roundings are possible.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._size = ddp.process_group.size()
        self._storage_before: dict[nn.Parameter, int] = {}  # of its gradient, before this backward pass added to it
        self._handles: list[RemovableHandle] = []
        self._either = ddp.gradient_as_bucket_view and self._size & (self._size - 1) != 0
        if self._either:
            self._handles = [p.register_hook(self._noting_storage(p)) for p in _reduced(ddp)]  # type: ignore[no-untyped-call]

    def divide(self, plan: BucketPlan) -> None:
        """Divide the bucket's gradients, in place."""
        if not self._either:
            plan.buffer.mul_(1.0 / self._size)
            return
        bucket = plan.buffer.untyped_storage().data_ptr()
        for parameter, view in zip(plan.parameters, plan.views, strict=True):
            if self._storage_before.pop(parameter, bucket) == bucket:
                view.div_(self._size)
            else:
                view.mul_(1.0 / self._size)

    def close(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()

    def _noting_storage(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            gradient = parameter.grad
            self._storage_before[parameter] = 0 if gradient is None else gradient.untyped_storage().data_ptr()

        return note


def _reduced(ddp: DistributedDataParallel) -> Iterator[nn.Parameter]:
    return (p for p in ddp._module_parameters if p.requires_grad)
