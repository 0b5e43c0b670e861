"""Messages between two ranks. A message to oneself never reaches core: a SelfMail matches sends and receives."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import torch

from torch_bps.backend.call import Call
from torch_bps.backend.kinds import code_of, name_of
from torch_bps.backend.work import WorkBytePS
from torch_bps.errors import BytePSError, MismatchError
from torch_bps.wire import ops

# Tags of our own messages: users' are not negative.
MONITORED_BARRIER_TAG: Final = -(1 << 31)
SPARSE_TAG: Final = MONITORED_BARRIER_TAG + 4096
NUM_TAGS: Final = 1024
"""calls that may be under way at once; then a tag is used again"""


def send(call: Call, tensor: torch.Tensor, dst: int, tag: int) -> None:
    """Send `tensor` to rank `dst`."""
    _check_peer(call, "send", dst)
    label = f"send to {dst} {name_of(tensor.dtype)}{list(tensor.shape)}"
    call.add(ops.SEND, code_of(tensor.dtype), label, ((0, call.pushed(tensor)),), peer=dst, tag=tag)


def recv(call: Call, tensor: torch.Tensor, src: int, tag: int) -> None:
    """Receive into `tensor` from rank `src`, or from whoever sends (ops.ANY_SOURCE)."""
    if src != ops.ANY_SOURCE:
        _check_peer(call, "recv", src)
    where = "anyone" if src == ops.ANY_SOURCE else str(src)
    label = f"recv from {where} {name_of(tensor.dtype)}{list(tensor.shape)}"
    call.add(ops.SEND, code_of(tensor.dtype), label, (), ((0, call.pulled(tensor)),), peer=src, tag=tag)


def _check_peer(call: Call, name: str, peer: int) -> None:
    if not 0 <= peer < call.size:
        raise ValueError(f"{name}: {peer} is not a rank of a group of {call.size}")


class SelfMail:
    """Messages of a rank to itself, matched in order for each tag.

    Thread safety: any thread.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._sent: dict[int, deque[torch.Tensor]] = {}
        self._waiting: dict[int, deque[tuple[torch.Tensor, WorkBytePS]]] = {}

    def send(self, tensor: torch.Tensor, tag: int, work: WorkBytePS) -> None:
        """Send a copy of `tensor`; `work` is done at once."""
        with self._lock:
            waiting = self._waiting.get(tag)
            if waiting:
                target, receiver = waiting.popleft()
            else:
                self._sent.setdefault(tag, deque()).append(tensor.detach().clone())
                receiver = None
        if receiver is not None:
            self._hand_over(tensor.detach(), target, receiver)
        work.finish_local()

    def recv(self, tensor: torch.Tensor, tag: int, work: WorkBytePS) -> None:
        """Receive into `tensor`; `work` is done when there was a message."""
        with self._lock:
            sent = self._sent.get(tag)
            if not sent:
                self._waiting.setdefault(tag, deque()).append((tensor, work))
                return
            message = sent.popleft()
        self._hand_over(message, tensor, work)

    def close(self, error: BytePSError) -> None:
        """Fail the receives that wait."""
        with self._lock:
            waiting = [pair for queue in self._waiting.values() for pair in queue]
            self._waiting.clear()
            self._sent.clear()
        for _, work in waiting:
            work.finish_local(error)

    def _hand_over(self, message: torch.Tensor, target: torch.Tensor, work: WorkBytePS) -> None:
        error = None
        if message.dtype is target.dtype and message.numel() == target.numel():
            target.detach().copy_(message.reshape(target.shape))
        else:
            error = MismatchError(
                f"rank {self._rank} sent itself {name_of(message.dtype)}{list(message.shape)} "
                f"and receives {name_of(target.dtype)}{list(target.shape)}"
            )
        work.finish_local(error, self._rank)
