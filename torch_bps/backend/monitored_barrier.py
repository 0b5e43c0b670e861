"""A barrier that says which ranks are missing: rank 0 hears from all others, and tells them how it went.

The wording follows gloo's, which users and tests look for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from torch_bps.errors import BytePSError, OperationTimeout

Message = Callable[[torch.Tensor, int], dist.Work]
"""send or receive a tensor to or from a rank"""

_PASSED: Final = 1
_FAILED: Final = 2
_POLL: Final = timedelta(milliseconds=1)


def monitored_barrier(
    rank: int, size: int, timeout: timedelta, wait_all_ranks: bool, send: Message, recv: Message
) -> None:
    """Return when all ranks have come here.

    Args:
        timeout: rank 0's; the others wait for its verdict as long as the group's timeout allows.
        wait_all_ranks: let rank 0 wait for all of them and report all that are missing, not only the first.

    Raises:
        OperationTimeout: on rank 0, naming the missing ranks.
        BytePSError: on the others, when rank 0 missed some, or was lost.
    """
    if rank != 0:
        _report(rank, send, recv)
        return
    missing = _collect(size, timeout, wait_all_ranks, recv)
    verdict = torch.tensor([_FAILED if missing else _PASSED], dtype=torch.uint8)
    answers = [send(verdict, other) for other in range(1, size)]  # a rank that comes later learns of it too
    if missing:
        raise missing
    for answer in answers:
        answer.wait()


def _report(rank: int, send: Message, recv: Message) -> None:
    verdict = torch.zeros(1, dtype=torch.uint8)
    cause = None
    try:
        answer = recv(verdict, 0)
        send(torch.tensor([_PASSED], dtype=torch.uint8), 0).wait()
        answer.wait()
    except BytePSError as error:
        cause = error
    if cause is not None or verdict.item() != _PASSED:
        raise BytePSError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0. Please check rank 0 logs for faulty rank."
        ) from cause


def _collect(size: int, timeout: timedelta, wait_all_ranks: bool, recv: Message) -> BytePSError | None:
    """Hear from all other ranks; return the error that names those that are missing."""
    deadline = time.monotonic() + timeout.total_seconds()
    limit_ms = round(timeout.total_seconds() * 1000)
    works = [(other, recv(torch.zeros(1, dtype=torch.uint8), other)) for other in range(1, size)]
    missing: list[int] = []
    cause: BytePSError | None = None
    for other, work in works:
        left = timedelta(seconds=deadline - time.monotonic())
        if left < _POLL and not wait_all_ranks:
            passed = ", ".join(str(rank) for rank in range(1, other))
            return OperationTimeout(
                f"Rank 0 timed out in monitoredBarrier after {limit_ms} ms. Successfully processed ranks: {passed}"
            )
        try:
            work.wait(max(left, _POLL))
        except BytePSError as error:
            missing.append(other)
            cause = error
            if not wait_all_ranks:
                break
    if not missing:
        return None
    who = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
    timed_out = OperationTimeout(f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit_ms} ms")
    timed_out.__cause__ = cause
    return timed_out
