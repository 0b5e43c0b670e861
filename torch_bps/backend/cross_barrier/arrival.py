"""A bucket of gradients on its way: its sum, where that will lie, and who is to be given it.

    UNDER WAY ──step()──> put off: its parameters await their update
        └──────────────────────┴──finish──> here

Called by barrier; knows no optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class BucketPlan:
    """What is the same for a bucket in every step, until DDP rebuilds its buckets.

    Args:
        buffer: the bucket's memory.
        parameters: whose gradients it holds, in their order in memory.
        priority: of its sum; smaller is sooner.

    Attributes:
        views: the gradients, as DDP lays them out.
        busy: whether a sum is under way in the memory.
    """

    __slots__ = ("buffer", "busy", "parameters", "priority", "views")

    def __init__(self, buffer: torch.Tensor, parameters: list[nn.Parameter], priority: int) -> None:
        self.buffer = buffer
        self.parameters = parameters
        self.priority = priority
        self.busy = False
        self.views: list[torch.Tensor] = []
        offset = buffer.storage_offset()
        for parameter in parameters:
            # not bucket.gradients(): that forgets strides such as channels_last
            layout = parameter if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
            self.views.append(buffer.as_strided(layout.size(), layout.stride(), offset))
            offset += parameter.numel()


class Arrival:
    """One bucket's sum in one step.

    Args:
        plan: the bucket.
        work: the sum.
        in_bucket: the parameters' `grad` are themselves views of the bucket (gradient_as_bucket_view).
        unfinished: class that the gradients have until they are here.

    Attributes:
        put_off: the optimizer's step has been, and the update is to follow.
        updates: parameters that await their update, and its gradients.
        groups: the param groups of these, as they stood at the step.
    """

    def __init__(self, plan: BucketPlan, work: dist.Work, in_bucket: bool, unfinished: type[torch.Tensor]) -> None:
        self.plan = plan
        self.work = work
        self.put_off = False
        self.updates: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.groups: list[dict[str, Any]] = []
        self._in_bucket = in_bucket
        self._unfinished = unfinished
        # weakly: zero_grad() may drop a gradient, and its memory with it
        self._gradients: list[weakref.ref[torch.Tensor] | None] = []
        for parameter in plan.parameters:
            gradient = parameter.grad
            if gradient is None:  # not used on this rank; DDP makes one at the end of the pass if another rank did
                self._gradients.append(None)
                continue
            gradient.__class__ = unfinished
            self._gradients.append(weakref.ref(gradient))
        plan.busy = True

    def own_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the parameters whose `grad` is what this sum will be, not None or what a user put there."""
        found = []
        for parameter, view, known in zip(self.plan.parameters, self.plan.views, self._gradients, strict=True):
            gradient = parameter.grad
            if gradient is not None and (known is None or gradient is known()):
                found.append((parameter, view))
        return found

    def is_back(self) -> bool:
        """Return whether waiting would not take long."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Wait for the sum (at most the group's timeout) and put it where the gradients are looked for.

        Raises:
            RuntimeError: the sum failed (of whatever kind the backend raises).
        """
        self.work.wait()
        gradients, values = [], []
        for parameter, view, known in zip(self.plan.parameters, self.plan.views, self._gradients, strict=True):
            gradient = parameter.grad if known is None else known()
            if gradient is not None:
                gradients.append(gradient)
                values.append(view)
        self.give_classes_back()
        if not self._in_bucket and gradients:
            torch._foreach_copy_(gradients, values)
        self.plan.busy = False

    def give_classes_back(self) -> None:
        """Make the gradients ordinary tensors."""
        for known in self._gradients:
            gradient = known() if known is not None else None
            if type(gradient) is self._unfinished:
                gradient.__class__ = torch.Tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, each once: DDP then keeps the strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
