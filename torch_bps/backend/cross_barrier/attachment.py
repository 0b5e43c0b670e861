"""The places of a model and its optimizer that a cross-barrier is called from, and how they are given back.

Called by barrier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_bps.backend.cross_barrier import guards

OnBucket = Callable[[GradBucket], "Future[torch.Tensor]"]
Step = Callable[[Callable[[], Any] | None], Any]


class ModuleHook:
    """A hook of a module or an optimizer that copies and pickles of it do not keep."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[Callable[..., None]]]:
        return ModuleHook, (nothing,)


def nothing(*args: object) -> None:
    """Do nothing: what is left of the hook in a copy."""


class HookSlot:
    """DDP's one place for a comm hook, which it never gives back: empty, it acts as DDP does without."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.on_bucket: OnBucket | None = None
        self.group = ddp.process_group

    @property
    def is_free(self) -> bool:
        """Whether no cross-barrier uses it."""
        return self.on_bucket is None

    @staticmethod
    def of(ddp: DistributedDataParallel) -> HookSlot:
        """Return the slot of a model that guards.check_model let pass, made if there was none.

        Raises:
            UnsupportedError: the model has a built-in comm hook.
        """
        if ddp._comm_hooks:
            free: Any = ddp._comm_hooks[0][1]
            return free  # type: ignore[no-any-return]
        slot = HookSlot(ddp)
        try:
            ddp.register_comm_hook(slot, sum_bucket)
        except RuntimeError as error:  # one of the built-in hooks, which DDP does not list
            ddp._comm_hooks.clear()
            raise guards.taken_slot() from error
        return slot


# not annotated: DDP compares annotations with types, and those of this module are strings
def sum_bucket(state, bucket):  # type: ignore[no-untyped-def]
    """Start the bucket's sum (DDP's comm hook)."""
    slot: HookSlot = state
    if slot.on_bucket is not None:
        return slot.on_bucket(bucket)
    buffer = bucket.buffer().mul_(1.0 / slot.group.size())
    return dist.all_reduce(buffer, group=slot.group, async_op=True).get_future().then(lambda done: done.value()[0])


def replace_step(optimizer: Optimizer, step: Step) -> Callable[[], None]:
    """Have `optimizer.step` call `step`; returns what undoes that.

    A scheduler made later wraps the method once more, and keeps it. So the method goes on calling what it stands for.
    """
    before: Any = optimizer.step
    active = [True]

    @functools.wraps(before)
    def late_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not active:
            return before(closure)
        if hasattr(before, "_wrapped_by_lr_sched"):
            self._opt_called = True  # type: ignore[attr-defined]
        return step(closure)

    optimizer.step = MethodType(late_step, optimizer)  # type: ignore[method-assign]
    mine = optimizer.step

    def undo() -> None:
        active.clear()
        if vars(optimizer).get("step") is not mine:
            return
        if hasattr(before, "_wrapped_by_lr_sched"):
            optimizer.step = before  # type: ignore[method-assign]
        else:
            del optimizer.step

    return undo
