"""The ranks of one host: each rank runs a service for its own part of every sum, reached through shared memory.

A group on one host needs nothing else. Where a group spans hosts, this service sums for the node and pushes the sum
on to a server before it answers (its uplink).

    rank 0 ──shm──┐
    rank 1 ──shm──┤ Service of rank 2 ── Uplink(slot) ──> NodeUplink ──> Client ──> server ──> uplinked(slot)
    rank 2 ─inproc┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.core.flight import Flight, Task
from torch_bps.errors import BytePSError, ClosedError
from torch_bps.server.service import Service
from torch_bps.wire import ops
from torch_bps.wire.header import ACC32, BY_NODE, HOME, PUSH, WANT, Header

if TYPE_CHECKING:
    from torch_bps.core.client import Client
    from torch_bps.server.slots import Slot


class NodeUplink:
    """Pushes a node's sums on to the servers. Thread safety: the reactor's thread."""

    def __init__(self) -> None:
        self.service: Service | None = None
        self.client: Client | None = None

    def __call__(self, slot: Slot, want: bool) -> None:
        """Push `slot`'s sum on; report to the service when its result (if wanted) is back in the slot's memory."""
        service, client = self.service, self.client
        assert service is not None
        assert client is not None
        group_id, stream, sequence, block, part = slot.key
        own = client.flight((group_id, stream, sequence))
        if own is None:
            error: BytePSError = ClosedError("this rank, which sums it for its node, gave the operation up")
            service.uplink_failed(slot, error)
            return
        header: Header = slot.header
        plane = own.group.uplink_plane
        assert plane is not None
        server = own.servers[block, part]
        home = plane.links[plane.placement.home(sequence)]

        def done(error: BytePSError | None) -> None:
            if error is None:
                service.uplinked(slot)
            else:
                service.uplink_failed(slot, error)

        flight = Flight(own.group, own.id, own.label, own.priority, done)
        flight.deadline_s = own.deadline_s
        flight.homes = [home]
        result = slot.result
        push = result.view if result is not None else None
        nbytes = push.nbytes if push is not None else 0
        flags = BY_NODE | (WANT if want else 0) | (ACC32 if slot.keep32 else 0) | (HOME if server is home else 0)
        up = header._replace(frame=PUSH, flags=flags, nbytes=nbytes)
        into = memoryview(b"") if push is None else push[: slot.nbytes]
        # without credit: the pushes that it came from hold some until it is back
        flight.tasks.append(Task(flight, server, up, push, into if want else None, slot.key, 0))
        if server is not home and block == 0 and part == 0:
            raise AssertionError(f"part 0 of {ops.ROWS[header.op].name} is not at its home")
        client.start(flight)
