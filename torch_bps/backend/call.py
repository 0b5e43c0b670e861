"""What one call of a collective needs: host memory of its tensors, and the Operations for core.

Made by process_group, filled by collectives, run by work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_bps.backend.staging import Stage, check_layout, check_no_overlap, memory_of, stage_for
from torch_bps.core.operation import Operation, Piece
from torch_bps.errors import BytePSError

NextStage = Callable[["Call"], None]


class Call:
    """Collects what is to be done; nothing has been sent before Work.start.

    Args:
        rank, size: of the group.
        timeout_s: deadline of each operation.
        priority: smaller is sooner.
        blocking: the caller waits for it at once.
        on_done: what core calls once for each operation.
    """

    __slots__ = (
        "blocking",
        "copy_backs",
        "keep",
        "next_stage",
        "on_done",
        "operations",
        "priority",
        "rank",
        "size",
        "stage",
        "timeout_s",
    )

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        priority: int,
        blocking: bool,
        on_done: Callable[[BytePSError | None], None],
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.priority = priority
        self.blocking = blocking
        self.on_done = on_done
        self.operations: list[Operation] = []
        self.keep: list[torch.Tensor] = []
        """tensors whose memory core works in"""
        self.copy_backs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(host tensor with a result, where it belongs)"""
        self.next_stage: NextStage | None = None
        """fills the call again once its operations are done; run in a worker"""
        self.stage: Stage | None = None

    def outbound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense host tensor with the values of `tensor`, to read."""
        host = self._stage(tensor).outbound(tensor)
        self.keep.append(host)
        return host

    def inbound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense host tensor whose values will be those of `tensor` when the call is done."""
        host = self._stage(tensor).inbound(tensor)
        self.keep.append(host)
        if host is not tensor:
            self.copy_backs.append((host, tensor))
        return host

    def pushed(self, tensor: torch.Tensor) -> memoryview:
        """Return memory with the values of `tensor`."""
        return memory_of(self.outbound(tensor))

    def pulled(self, tensor: torch.Tensor) -> memoryview:
        """Return memory for a result that belongs into `tensor`."""
        return memory_of(self.inbound(tensor))

    def in_place(self, tensor: torch.Tensor) -> memoryview:
        """Return memory with the values of `tensor`, for a result that belongs into it too."""
        host = self._stage(tensor).outbound(tensor)
        self.keep.append(host)
        if host is not tensor:
            check_no_overlap(tensor)
            self.copy_backs.append((host, tensor))
        return memory_of(host)

    def add(
        self,
        op: int,
        dtype: int,
        label: str,
        pushes: tuple[Piece, ...] = (),
        pulls: tuple[Piece, ...] = (),
        *,
        redop: int = 0,
        root: int = 0,
        peer: int = -1,
        tag: int = 0,
    ) -> None:
        """Add an operation. In a group of one rank there is nothing to send, so there it is dropped."""
        if self.size == 1:
            return
        self.operations.append(
            Operation(
                op,
                dtype=dtype,
                redop=redop,
                root=root,
                pushes=pushes,
                pulls=pulls,
                peer=peer,
                tag=tag,
                priority=self.priority,
                blocking=self.blocking,
                timeout_s=self.timeout_s,
                label=label,
                on_done=self.on_done,
                owner=self.keep,
            )
        )

    def settle(self) -> None:
        """Wait until all that is pushed is in host memory."""
        if self.stage is not None:
            self.stage.settle()

    def bring_back(self) -> None:
        """Copy the results to where they belong."""
        if self.stage is not None:
            for host, tensor in self.copy_backs:
                self.stage.bring_back(host, tensor)
        self.copy_backs.clear()

    def _stage(self, tensor: torch.Tensor) -> Stage:
        check_layout(tensor)
        stage = stage_for(tensor)
        if self.stage is None:
            self.stage = stage
        elif self.stage is not stage:
            raise ValueError(f"the tensors of one collective must be on one device; this one is on {tensor.device}")
        return stage
