"""An operation under way, and the partitions (tasks) it consists of. Plain records, filled by core.plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_bps.core.link import Link
from torch_bps.core.operation import Operation
from torch_bps.errors import BytePSError
from torch_bps.transport.base import Buffer
from torch_bps.wire.header import DONE, Header, Key, key_of

if TYPE_CHECKING:
    from torch_bps.core.group import Group

FlightId = tuple[int, int, int]
"""(group, stream, sequence) as in the frames"""


_DST_AND_TAG = (1 << 48) - 1
_RECEIVE_BLOCK = 0xFFFFFFFF


def receive_key(group: int, stream: int, posted: int) -> Key:
    """Return what the answer to the pull of a message's part 0 is found by: the source may not be known yet."""
    return group, stream & _DST_AND_TAG, posted & 0xFFFFFFFF, _RECEIVE_BLOCK, 0


def answered_key(header: Header) -> Key:
    """Return the key of the task that a RESULT or DONE answers."""
    if header.stream and header.part == 0 and header.frame != DONE:
        return receive_key(header.group, header.stream, header.block)
    return key_of(header)


class Task:
    """One partition: a frame to send, and what comes back.

    `push` is the payload (None for a PULL, and for 0 bytes), `into` where the result goes (None: a DONE is awaited).
    `key` is what the answer is found by; `credit_nbytes` what it counts while under way.
    """

    __slots__ = ("credit_nbytes", "flight", "header", "into", "issued_s", "key", "link", "push", "receiving")

    def __init__(
        self,
        flight: Flight,
        link: Link,
        header: Header,
        push: memoryview | None,
        into: memoryview | None,
        key: Key,
        credit_nbytes: int,
    ) -> None:
        self.flight = flight
        self.link = link
        self.header = header
        self.push = push
        self.into = into
        self.key = key
        self.credit_nbytes = credit_nbytes
        self.issued_s = 0.0
        self.receiving: TensorBuffer | None = None
        """what its result is being received into"""


class TensorBuffer(Buffer):
    """The user's memory as a Buffer; `task` keeps the tensors alive while a channel still holds it."""

    __slots__ = ("task",)

    def __init__(self, view: memoryview, task: Task) -> None:
        super().__init__(view)
        self.task = task

    def divert(self) -> None:
        """Let the rest of a result under way go nowhere: its operation failed, the user may use the tensor again."""
        self.view = memoryview(bytearray(self.view.nbytes))


class Flight:
    """An operation under way. Thread safety: made in the caller's thread, then the reactor's only."""

    __slots__ = (
        "asked_s",
        "deadline_s",
        "declares",
        "error",
        "group",
        "homes",
        "id",
        "label",
        "missing",
        "on_done",
        "operation",
        "outstanding",
        "priority",
        "remaining",
        "servers",
        "started_s",
        "tasks",
    )

    def __init__(
        self,
        group: Group,
        flight_id: FlightId,
        label: str,
        priority: int,
        on_done: Callable[[BytePSError | None], None],
        operation: Operation | None = None,
    ) -> None:
        self.group = group
        self.id = flight_id
        self.label = label
        self.priority = priority
        self.on_done = on_done
        self.operation = operation
        self.tasks: list[Task] = []
        self.declares: list[tuple[Link, Header]] = []
        """frames without an answer, to home engines that no task goes to"""
        self.homes: list[Link] = []
        """who knows which ranks are missing"""
        self.servers: dict[tuple[int, int], Link] = {}
        """(block, part) -> the server that this node's sum of it goes to (hierarchical groups)"""
        self.outstanding: set[Task] = set()
        self.remaining = 0
        self.error: BytePSError | None = None
        self.missing: list[int] = []
        self.started_s = 0.0
        self.deadline_s = 0.0
        self.asked_s = 0.0
