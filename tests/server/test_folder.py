"""Engine threads: which add goes next."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, cast

from torch_bps.server.folder import ThreadFolder
from torch_bps.transport.base import Reactor
from torch_bps.wire.header import PUSH, Header

DEADLINE_S = 20.0


class Slot(NamedTuple):
    key: int
    header: Header
    nbytes: int = 1 << 20


class Loop:
    """A reactor that runs calls where they are made."""

    def call(self, function: Any, *arguments: object) -> None:
        function(*arguments)


def test_the_most_urgent_add_goes_first_and_small_ones_at_once() -> None:
    folder = ThreadFolder(cast(Reactor, Loop()), 1)
    begun, go, over = threading.Event(), threading.Event(), threading.Event()
    order: list[int] = []

    def hold() -> None:
        begun.set()
        assert go.wait(DEADLINE_S)

    try:
        folder.submit(cast(Any, Slot(0, Header(PUSH))), hold, lambda: None)
        assert begun.wait(DEADLINE_S)
        for key, priority in enumerate((0, 5, -5, 0), 1):
            slot = Slot(key, Header(PUSH, priority=priority))
            folder.submit(cast(Any, slot), lambda: None, lambda key=key: order.append(key))  # type: ignore[misc]
        folder.submit(cast(Any, Slot(9, Header(PUSH), 64)), lambda: None, lambda: order.append(9))
        assert order == [9]
        last = Slot(10, Header(PUSH, priority=6))
        folder.submit(cast(Any, last), lambda: None, over.set)
        go.set()
        assert over.wait(DEADLINE_S)
    finally:
        go.set()
        folder.stop()
    assert order == [9, 3, 1, 4, 2]
