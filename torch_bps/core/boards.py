"""How the ranks of one host come to see each other's boards (torch_bps.local): each lends its own to the others.

    alloc in the arena ──> a BOARD frame to every other rank's service ──> all are here ──> Lane

Called by core.opening, once all ranks have joined the group at all services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_bps.core.link import Link
from torch_bps.core.operation import Operation
from torch_bps.core.waiting import Waiting
from torch_bps.errors import BytePSError, ProtocolError
from torch_bps.local.board import board_nbytes, ring_nbytes
from torch_bps.local.lane import Lane
from torch_bps.transport.base import Buffer
from torch_bps.wire.header import BOARD, Header

if TYPE_CHECKING:
    from torch_bps.core.runtime import Runtime


class Boards:
    """The boards that this process lends and was lent. Thread safety: the reactor's thread, but for `lane`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._here: dict[int, dict[int, Buffer]] = {}
        """group -> rank -> board"""
        self._waiting: dict[int, Waiting] = {}

    def lane(
        self, group: int, name: str, rank: int, links: Sequence[Link], deadline_s: float, check: Callable[[], None]
    ) -> Lane:
        """Return the lane of a group; `links` are those to the services of its ranks, this one's included. Blocks.

        Args:
            check: called now and then; raises if another rank has failed.

        Raises:
            OperationTimeout: other ranks' boards did not come.
            ProtocolError: what came is no board of this group.
            BytePSError: there is no more shared memory.
        """
        runtime, size = self._runtime, len(links)
        waiting = Waiting(size - 1)
        runtime.in_reactor(lambda: self._lend(group, rank, links, waiting))
        waiting.wait(deadline_s, lambda: f"waiting for the shared memory of {size - 1 - waiting.done} ranks", check)
        here = self._here[group]
        for peer, buffer in here.items():
            if buffer.view.nbytes != board_nbytes(size):
                raise ProtocolError(f"rank {peer} lends {buffer.view.nbytes} bytes as its board")
        client = runtime.client

        def broken(error: BytePSError) -> None:
            runtime.reactor.call(client.break_group, group, error)

        def ended(duration_s: float, operation: Operation) -> None:
            client.traffic.carried("shm", _nbytes(operation.pushes), _nbytes(operation.pulls), duration_s)

        return Lane(
            [here[peer].view for peer in range(size)],
            rank,
            who=client.who,
            name=name,
            stall_warning_s=runtime.config.stall_warning_s,
            on_broken=broken,
            on_end=ended,
        )

    def _lend(self, group: int, rank: int, links: Sequence[Link], waiting: Waiting) -> None:
        size = len(links)
        nbytes = board_nbytes(size)
        own = self._runtime.arena.alloc(nbytes)
        control_nbytes = nbytes - ring_nbytes(size)
        own.view[:control_nbytes] = bytes(control_nbytes)
        here = self._here.setdefault(group, {})
        for _ in here:
            waiting.one(None)
        here[rank] = own
        self._waiting[group] = waiting
        for peer, link in enumerate(links):
            if peer != rank:
                own.retain()
                link.send(Header(BOARD, group=group, nbytes=nbytes), own)

    def arrived(self, group: int, rank: int, buffer: Buffer) -> None:
        """A rank's board is here. Raises ProtocolError if that rank's is here already."""
        here = self._here.setdefault(group, {})
        if rank in here:
            raise ProtocolError(f"rank {rank} lends a second board for group {group:x}")
        here[rank] = buffer
        waiting = self._waiting.get(group)
        if waiting is not None:
            waiting.one(None)

    def give_back(self, group: int) -> None:
        """Release the boards of a group whose lane is closed and released."""
        self._waiting.pop(group, None)
        for buffer in self._here.pop(group, {}).values():
            buffer.release()

    def give_back_all(self) -> None:
        """Release every board."""
        for group in list(self._here):
            self.give_back(group)


def _nbytes(pieces: Sequence[tuple[int, memoryview]]) -> int:
    return sum(memory.nbytes for _, memory in pieces)
