"""A group of ranks as core sees it: who is in it, which engines serve it, the number of the next operation.

A group is a table entry: connections, threads and credits belong to the runtime.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from torch_bps.core.flight import Flight
from torch_bps.core.link import Link
from torch_bps.core.operation import Operation
from torch_bps.core.plan import Plane, plan_collective, plan_first_part
from torch_bps.errors import BytePSError, ClosedError
from torch_bps.wire import ops

if TYPE_CHECKING:
    from torch_bps.core.runtime import Runtime
    from torch_bps.local.lane import Lane


class Group:
    """What `core.runtime.open_group` returns.

    Thread safety: `submit` and `close` from any thread.

    Attributes:
        reduce_plane: engines of the reducing operations; relay_plane: of the others.
        uplink_plane: the servers, where reduce_plane is the node's own (hierarchical).
        is_local: all ranks on one host, no servers.
        lane: runs the collectives of a local group instead of the engines, where it can.
        charge_nbytes: what one of a block's several partitions takes of the process's credit, at least.
        round_length: blocks are cut into multiples of it (core.placement); the same on every rank.
    """

    def __init__(
        self,
        runtime: Runtime,
        group_id: int,
        name: str,
        rank: int,
        size: int,
        *,
        reduce_plane: Plane,
        relay_plane: Plane,
        uplink_plane: Plane | None,
        is_local: bool,
        round_length: int,
        partition_bytes: int,
        charge_nbytes: int = 0,
        description: str,
        lane: Lane | None = None,
    ) -> None:
        self.runtime = runtime
        self.id = group_id
        self.name = name
        self.rank = rank
        self.size = size
        self.reduce_plane = reduce_plane
        self.relay_plane = relay_plane
        self.uplink_plane = uplink_plane
        self.is_local = is_local
        self.round_length = round_length
        self.partition_bytes = partition_bytes
        self.charge_nbytes = charge_nbytes
        self.lane = lane
        self.broken: BytePSError | None = None
        self.closed: BytePSError | None = None
        self._description = description
        self._lock = threading.Lock()
        self._next = 0
        self._sent: dict[tuple[int, int], int] = {}
        self._posted: dict[int, int] = {}

    @property
    def last_sequence(self) -> int:
        """Number of the last collective that was submitted, -1 before the first."""
        return self._next - 1

    def describe(self) -> str:
        """Return one line for people: engines, transports, why."""
        return self._description

    def links(self) -> list[Link]:
        """Return every link that serves the group, each once."""
        planes = (self.reduce_plane, self.relay_plane, self.uplink_plane)
        return list(dict.fromkeys(link for plane in planes if plane is not None for link in plane.links))

    def break_(self, error: BytePSError) -> None:
        """Let everything later, and what the lane runs, fail: a member or a server is lost."""
        self.broken = error
        if self.lane is not None:
            self.lane.fail(error)

    def submit(self, operation: Operation) -> None:
        """Start an operation; its on_done is called once. Sets operation.sequence.

        on_done is called in the IO thread, in the lane's, or, for a blocking operation, in the caller's before this
        returns.

        Raises:
            ClosedError: the group was closed, or this is a forked child.
            BytePSError: the group is broken (a member or a server is lost).
        """
        error = self.closed or self.broken  # before the lock: in a forked child another thread may have held it
        if error is not None:
            raise error.with_facts(rank=self.runtime.client.who, group=self.name, operation=operation.label)
        client = self.runtime.client
        lane = self.lane if operation.op != ops.SEND else None
        with self._lock:
            if lane is not None:
                operation.sequence = self._next
                self._next += 1
                if not lane.enter(operation, inline=operation.blocking):
                    return
            elif operation.op == ops.SEND:
                flight = self._message(operation)
            else:
                operation.sequence = sequence = self._next
                self._next += 1
                flight = Flight(
                    self, (self.id, 0, sequence), operation.label, operation.priority, operation.on_done, operation
                )
                plan_collective(self, flight, operation)
            if lane is None:
                if operation.timeout_s > 0:
                    flight.deadline_s = time.monotonic() + operation.timeout_s
                client.reactor.call(client.start, flight)
                return
        lane.run(operation)

    def _message(self, operation: Operation) -> Flight:
        tag = operation.tag
        if operation.pushes:
            stream = ops.stream_of(self.rank, operation.peer, tag)
            number = self._sent.get((operation.peer, tag), 0)
            self._sent[operation.peer, tag] = number + 1
        else:
            stream = ops.stream_of(operation.peer, self.rank, tag)
            number = self._posted.get(tag, 0)
            self._posted[tag] = number + 1
        operation.sequence = number
        flight = Flight(
            self, (self.id, stream, number), operation.label, operation.priority, operation.on_done, operation
        )
        plan_first_part(self, flight, operation, number)
        return flight

    def close(self, abort: bool = False) -> None:
        """Leave the group; the last group's close ends the runtime. Blocks; harmless when called again.

        Args:
            abort: fail what is under way and do not wait for other ranks.
        """
        if self.closed is None:
            self.closed = ClosedError(f"the process group {self.name!r} was destroyed", rank=self.rank)
            self.runtime.close_group(self, abort)
