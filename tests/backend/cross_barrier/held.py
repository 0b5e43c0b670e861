"""A process group of one real rank, whose sums come when the test says so.

A sum adds what the other ranks, which do not exist, would have: half of this rank's values each. Until a sum is waited
for, or released, it has not been added, and its Work is not completed; waiting for one that is held fails the test.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from torch_bps.backend import priority


class HeldWork(dist.Work):
    """One sum.

    Attributes:
        held: waiting for it is an error of the test.
        error: what it comes to instead of a sum.
        priority: that it was called with.
    """

    def __init__(self, tensors: list[torch.Tensor], others: float, held: bool) -> None:
        super().__init__()
        self.tensors = tensors
        self.held = held
        self.error: Exception | None = None
        self.priority = priority.chosen(0)
        self.waits = 0
        self._others = others
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.waits += 1
        assert self._done or not self.held, "waited for a sum that is held"
        if self.error is not None:
            raise self.error
        self.release()
        return True

    def release(self) -> None:
        """Let the sum be there."""
        if not self._done and self._others:
            with torch.no_grad():
                for tensor in self.tensors:
                    tensor.add_(tensor, alpha=self._others)
        self._done = True

    def is_completed(self) -> bool:
        return self._done

    def get_future(self) -> Future[list[torch.Tensor]]:
        self.wait()
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self.tensors)
        return future


class HeldGroup(dist.ProcessGroup):
    """Rank 0 of `size`.

    Attributes:
        sums: the Works of all sums of floats, in the order of the calls.
        hold: hold those that come.
        refusal: raised by those that come.
        others_use_all: the other ranks use parameters that this one does not.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.sums: list[HeldWork] = []
        self.hold = False
        self.refusal: Exception | None = None
        self.others_use_all = False

    def getBackendName(self) -> str:
        return "held"

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> HeldWork:
        if not tensors[0].is_floating_point():  # DDP's map of used parameters
            if self.others_use_all:
                tensors[0].fill_(1)
            return HeldWork(tensors, 0.0, held=False)
        if self.refusal is not None:
            raise self.refusal
        self.sums.append(HeldWork(tensors, (self.size() - 1) / 2, self.hold))
        return self.sums[-1]

    def broadcast(self, tensors: list[torch.Tensor], opts: object = None) -> HeldWork:
        return HeldWork(tensors, 0.0, held=False)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None) -> HeldWork:
        for copies, tensor in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.copy_(tensor)
        return HeldWork([], 0.0, held=False)

    def barrier(self, opts: object = None) -> HeldWork:
        return HeldWork([], 0.0, held=False)


dist.Backend.register_backend("held", HeldGroup, devices=["cpu"])
