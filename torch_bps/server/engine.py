"""Decides what happens to every frame of a summation server: events in, instructions out.

Called by server.service, in one thread. Knows no sockets, clocks, threads or torch; buffers and origins are opaque:
it hands them back in instructions and never looks into them. A member is a connection that joined a group, by index.

    push, pull, declare, cancel, leave (from members)      folded, uplinked, uplink_failed (from the service)
        -> [Fold | Uplink | Send | Done | Release | Drop | Fail, ...]      to be carried out in order

Every buffer that a push hands in comes back exactly once, in a Fold or a Release, or as a slot's `result` that a Drop
ends. Every push and pull is answered exactly once, by Send or Done, unless its operation fails: then its members get
a Fail. Methods raise ProtocolError for what no honest member sends; then they have kept nothing of the frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.errors import ProtocolError
from torch_bps.server import statements
from torch_bps.server.groups import Failure, Group, remember
from torch_bps.server.instructions import Done, Drop, Fail, Fold, Instruction, Release, Send, Uplink
from torch_bps.server.operations import Operations
from torch_bps.server.slots import Slot
from torch_bps.wire.header import DONE, HOME, WANT, Header
from torch_bps.wire.ops import SEND

if TYPE_CHECKING:
    from torch_bps.transport.base import Buffer, Channel

__all__ = ["Done", "Drop", "Engine", "Fail", "Fold", "Instruction", "Release", "Send", "Uplink"]

_ENDED_GROUPS = 4096


class Engine:
    """All groups of one service. Not thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._ended: dict[int, None] = {}
        self._operations = Operations()
        self._slots = self._operations.slots

    # ---- members

    def join(
        self, group: int, *, size: int, index: int, rank: int, num_nodes: int = 1, node: int = 0, uplink: bool = False
    ) -> None:
        """Add a member; the first one makes the group.

        Raises:
            ProtocolError: another member said otherwise about the group, the index is taken, or the group has ended.
        """
        if group in self._ended:
            raise ProtocolError(f"rank {rank} joins group {group:x}, which has ended")
        known = self._groups.get(group)
        made = known or Group(group, size, num_nodes, uplink)
        if (made.size, made.num_nodes, made.uplink) != (size, num_nodes, uplink):
            raise ProtocolError(
                f"rank {rank} joins group {group:x} as one of {size} ranks on {num_nodes} nodes (uplink {uplink}), but "
                f"it has {made.size} on {made.num_nodes} (uplink {made.uplink})"
            )
        made.join(index, rank, node)
        self._groups[group] = made

    def leave(self, group: int, index: int, error: str | None, text: str) -> list[Instruction]:
        """Remove a member: in order (`error` is None), or because it was lost, which breaks the group."""
        found = self._member(group, index)
        out: list[Instruction] = []
        found.present.discard(index)
        found.left.add(index)
        if error is not None:
            if found.broken is None:
                found.broken = Failure(statements.error_name(error), text)
                self._operations.clear(found, out)
                if found.present:
                    out.append(Fail(tuple(sorted(found.present)), group, 0, -1, found.broken.error, text, ""))
        elif found.broken is None:
            for record in list(found.records.values()):
                if not self._operations.fail_if_gone(record, out):
                    for slot in list(record.slots):
                        self._finish_relay(slot, out)
            found.mailbox.leave(index, out)
        if found.is_over():
            self._operations.clear(found, out)
            del self._groups[group]
            remember(self._ended, group, None, _ENDED_GROUPS)
        return out

    # ---- frames

    def push(self, index: int, header: Header, buffer: Buffer | None, origin: Channel) -> list[Instruction]:
        """Handle a PUSH. Takes over the buffer unless it raises."""
        slot = self._slots.get(header[5:10])
        if slot is None or not slot.repeats(header):
            return self._first_push(index, header, buffer, origin)
        # the common case: a reduced slot that another contributor has begun, and all is as that one said
        record = slot.record
        group = record.group
        if index not in group.present or (buffer is None) != (header.nbytes == 0):
            self._member(header.group, index)
            statements.check_push(header, buffer is not None)
        contributor = group.nodes[index] if record.by_node else index
        if contributor in slot.pushes:
            raise ProtocolError(f"{group.name_of(contributor, record.by_node)} pushes {slot.key} twice")
        if contributor not in record.stated:
            record.state(index, contributor, header)
        return self._contribute(slot, contributor, header, buffer, origin, [])

    def pull(self, index: int, header: Header, origin: Channel) -> list[Instruction]:
        """Handle a PULL."""
        group = self._checked(index, header)
        out: list[Instruction] = []
        if header.op == SEND and header.part == 0:
            if not self._operations.is_broken(group, index, header, out):
                group.mailbox.pull(index, header, origin, out)
            return out
        if statements.is_reduce(header):
            raise ProtocolError(f"{statements.name_of(header)}: a pull of a reduced block")
        pusher, puller = self._roles(group, header)
        if index == pusher or puller not in (-1, index):
            raise ProtocolError(f"{group.name_of(index)} has no business pulling {header[5:10]}")
        slot = self._slots.get(header[5:10])
        record = group.records.get(header[6:8])
        if slot is not None and record is not None and record.agrees(header) and index in slot.pulls:
            raise ProtocolError(f"{group.name_of(index)} pulls {slot.key} twice")
        record = self._operations.admit(group, index, header, None, out)
        if record is None:
            return out
        if slot is None:
            slot = self._operations.open(record, header)
        slot.pulls[index] = None
        if slot.pushed:
            out.append(Send(slot, origin, slot.result_header()))
        else:
            slot.waiting.append(origin)
        if not (group.left and self._operations.fail_if_gone(record, out)):
            self._finish_relay(slot, out)
        return out

    def declare(self, index: int, header: Header, origin: Channel) -> list[Instruction]:
        """Handle a DECLARE: it is compared, nothing else."""
        group = self._checked(index, header)
        if header.op == SEND:
            raise ProtocolError("a declared point-to-point message")
        out: list[Instruction] = []
        record = self._operations.admit(group, index, header, None, out)
        if record is not None and not (group.left and self._operations.fail_if_gone(record, out)):
            self._operations.retire(record)
        return out

    def cancel(self, index: int, group: int, stream: int, sequence: int, error: str, text: str) -> list[Instruction]:
        """A member gives an operation up: it fails for all others."""
        found = self._member(group, index)
        out: list[Instruction] = []
        key = (stream, sequence)
        if found.broken is not None:
            return out
        error = statements.error_name(error)
        if stream:
            found.mailbox.cancel(index, stream, sequence, error, text, out)
            if index != (stream >> 48) - 1:
                return out  # a receiver's number is not the message's
        if key in found.failed:
            return out
        record = found.records.get(key)
        name = statements.name_of(record.header) if record else f"operation #{sequence}"
        if error != "MismatchError":
            text = f"{found.name_of(index)} gave up {name}: {text}"
        failure = Failure(error, text, "", index)
        if record is None:
            remember(found.failed, key, failure)
        else:
            self._operations.fail(record, record.concerned() - {index}, failure, out)
        return out

    # ---- reports of the service

    def folded(self, slot: Slot) -> list[Instruction]:
        """A Fold is done, and its buffers are released."""
        slot.busy = False
        if slot.dead:
            return [self._operations.dropped(slot)]
        out: list[Instruction] = []
        self._advance(slot, out)
        return out

    def uplinked(self, slot: Slot) -> list[Instruction]:
        """An Uplink is done: slot.result is the result."""
        slot.busy = False
        if slot.dead:
            return [self._operations.dropped(slot)]
        out: list[Instruction] = []
        self._answer_pushes(slot, out)
        return out

    def uplink_failed(self, slot: Slot, error: str, text: str) -> list[Instruction]:
        """An Uplink came to nothing: the operation fails for every member."""
        slot.busy = False
        if slot.dead:
            return [self._operations.dropped(slot)]
        out: list[Instruction] = []
        self._operations.fail(slot.record, slot.record.group.present, Failure(statements.error_name(error), text), out)
        return out

    # ---- questions

    def missing(self, group: int, stream: int, sequence: int) -> list[int]:
        """Return the ranks (nodes for BY_NODE operations) that have not stated an operation; [] if it is not known."""
        found = self._groups.get(group)
        if found is None:
            return []
        record = found.records.get((stream, sequence))
        by_node = record is not None and record.by_node
        numbers = record.missing() if record else []
        if stream and not numbers:
            numbers = found.mailbox.missing(stream, sequence)
        return [found.rank_of(number, by_node) for number in numbers]

    def is_idle(self) -> bool:
        """Whether nobody is owed anything: no live slots, no waiting messages or receives."""
        return not self._operations.num_slots and not any(
            any(group.mailbox.counts()) for group in self._groups.values()
        )

    def holds(self, group: int, index: int) -> bool:
        """Whether a slot of the group is alive that a member takes part in: others still come for its results."""
        found = self._groups.get(group)
        return found is not None and any(
            record.slots and (record.settled or index in record.members) for record in found.records.values()
        )

    def describe(self) -> dict[str, int]:
        """Return counters for people and metrics."""
        boxes = [group.mailbox.counts() for group in self._groups.values()]
        return {
            "groups": len(self._groups),
            "members": sum(len(group.present) for group in self._groups.values()),
            "operations": sum(len(group.records) for group in self._groups.values()),
            "slots": self._operations.num_slots,
            "messages": sum(messages for messages, _, _ in boxes),
            "receives": sum(receives for _, receives, _ in boxes),
            "held_nbytes": sum(slot.held_nbytes() for slot in self._slots.values()) + sum(n for _, _, n in boxes),
        }

    # ---- the way of a push

    def _first_push(self, index: int, header: Header, buffer: Buffer | None, origin: Channel) -> list[Instruction]:
        """Handle a push that is no plain repetition of another contributor's."""
        group = self._checked(index, header)
        statements.check_push(header, buffer is not None)
        out: list[Instruction] = []
        if header.op == SEND and header.part == 0:
            if not self._operations.is_broken(group, index, header, out, buffer):
                group.mailbox.push(index, header, buffer, origin, out)
            return out
        reduces = statements.is_reduce(header)
        if not reduces and index != self._roles(group, header)[0]:
            raise ProtocolError(f"{group.name_of(index)} has no business pushing {header[5:10]}")
        slot = self._slots.get(header[5:10])
        record = group.records.get(header[6:8])
        if slot is not None and record is not None and record.agrees(header):
            slot.check_repetition(header)
            if slot.pushed if not reduces else record.contributor(index) in slot.pushes:
                raise ProtocolError(f"{group.name_of(index)} pushes {slot.key} twice")
        record = self._operations.admit(group, index, header, buffer, out)
        if record is None:
            return out
        if slot is None:
            slot = self._operations.open(record, header)
        if reduces:
            return self._contribute(slot, record.contributor(index), header, buffer, origin, out)
        slot.take(header, buffer, origin)
        answer = slot.result_header()
        out.extend([Send(slot, waiting, answer) for waiting in slot.waiting])
        slot.waiting.clear()
        if not (group.left and self._operations.fail_if_gone(record, out)):
            self._finish_relay(slot, out)
        return out

    def _contribute(
        self,
        slot: Slot,
        contributor: int,
        header: Header,
        buffer: Buffer | None,
        origin: Channel,
        out: list[Instruction],
    ) -> list[Instruction]:
        record = slot.record
        if header.flags & HOME:
            record.home = True
        slot.pushes[contributor] = (origin, header.flags)
        if buffer is not None:
            slot.ready[contributor] = buffer
        if not (record.group.left and self._operations.fail_if_gone(record, out)) and not slot.busy:
            self._advance(slot, out)
        return out

    def _advance(self, slot: Slot, out: list[Instruction]) -> None:
        """Do the next thing for a reduced slot that is not busy."""
        if slot.nbytes and slot.folded < slot.expected:
            buffers = slot.next_buffers()
            if buffers:
                slot.busy = True
                out.append(Fold(slot, buffers, slot.folded == slot.expected))
        elif len(slot.pushes) == slot.expected:
            if slot.record.group.uplink:
                slot.busy = True
                out.append(Uplink(slot, slot.wants()))
            else:
                self._answer_pushes(slot, out)

    def _answer_pushes(self, slot: Slot, out: list[Instruction]) -> None:
        result = done = slot.result_header()
        for origin, flags in slot.pushes.values():
            if flags & WANT:
                out.append(Send(slot, origin, result))
                continue
            if done is result:
                done = slot.result_header(DONE)
            out.append(Done(origin, done))
        self._operations.finish(slot, out)

    def _finish_relay(self, slot: Slot, out: list[Instruction]) -> None:
        """End a relayed slot if everything about it has happened."""
        if slot.pushed and len(slot.pulls) == slot.expected:
            out.append(Done(slot.pusher_origin, slot.result_header(DONE)))
            self._operations.finish(slot, out)

    # ---- groups

    def _member(self, group: int, index: int) -> Group:
        found = self._groups.get(group)
        if found is None or index not in found.present:
            raise ProtocolError(f"index {index} is no member of group {group:x}")
        return found

    def _checked(self, index: int, header: Header) -> Group:
        group = self._member(header.group, index)
        statements.check_codes(header)
        return group

    @staticmethod
    def _roles(group: Group, header: Header) -> tuple[int, int]:
        if group.uplink:
            raise ProtocolError(f"{statements.name_of(header)} is relayed, but this service only sums for its node")
        return statements.roles(header, group.size)
