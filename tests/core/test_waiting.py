"""The bridge from the IO thread: answers, deadlines, and reasons not to wait on."""

from __future__ import annotations

import time

import pytest

from torch_bps.core.waiting import Waiting
from torch_bps.errors import OperationTimeout, PeerLostError


def test_a_deadline_says_what_was_awaited() -> None:
    with pytest.raises(OperationTimeout, match="Timed out waiting for Godot"):
        Waiting(1).wait(time.monotonic() + 0.05, lambda: "waiting for Godot")


def test_another_ranks_failure_ends_the_wait_long_before_the_deadline() -> None:
    def check() -> None:
        raise PeerLostError("rank 1 could not open the group")

    started = time.monotonic()
    with pytest.raises(PeerLostError, match="could not open"):
        Waiting(1).wait(started + 60.0, lambda: "", check)
    assert time.monotonic() - started < 10.0


def test_answers_and_the_first_error_end_the_wait() -> None:
    all_here, failed = Waiting(2), Waiting(3)
    all_here.one(None)
    all_here.one(None)
    failed.one(PeerLostError("first"))
    failed.one(PeerLostError("second"))
    for waiting in (all_here, failed, Waiting(0)):
        waiting.wait(time.monotonic() + 5.0, lambda: "")
    assert all_here.error is None
    assert failed.error is not None
    assert failed.error.what == "first"
