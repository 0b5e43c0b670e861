"""How operations begin, fail and end in the engine, and their slots with them. Called by server.engine only.

first frame ──> admit ──> open a slot for each partition ──> finish each ──> retire
                  │ ranks disagree, one gave up, or one has left: fail ──> kill its slots; later frames are refused
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.server import statements
from torch_bps.server.groups import Failure, Group, remember
from torch_bps.server.instructions import Drop, Fail, Instruction, Release
from torch_bps.server.slots import Record, Slot
from torch_bps.wire.header import Header, Key

if TYPE_CHECKING:
    from torch_bps.transport.base import Buffer


class Operations:
    """The live slots of all groups. Methods append instructions to `out`."""

    def __init__(self) -> None:
        self.slots: dict[Key, Slot] = {}
        """those of operations that have not failed"""
        self.num_slots = 0
        """all that were not dropped yet; without messages in mailboxes"""

    def admit(
        self, group: Group, index: int, header: Header, buffer: Buffer | None, out: list[Instruction]
    ) -> Record | None:
        """Return the operation that a frame belongs to, having noted its statement; None if it has failed or fails."""
        key = header[6:8]
        record = group.records.get(key)
        if record is None:
            if self.is_broken(group, index, header, out, buffer):
                return None
            failure = group.failed.get(key)
            if failure is not None:
                if buffer is not None:
                    out.append(Release((buffer,)))
                if index != failure.silent:
                    out.append(Fail((index,), group.id, *key, failure.error, failure.text, failure.hint))
                return None
            record = Record(group, header)
        if not record.agrees(header):
            if buffer is not None:
                out.append(Release((buffer,)))
            text = record.mismatch_with(index, header)
            self.fail(record, group.present, Failure("MismatchError", text, statements.MISMATCH_HINT), out)
            return None
        group.records[key] = record
        record.state(index, record.contributor(index), header)
        return record

    def fail(self, record: Record, indices: set[int], failure: Failure, out: list[Instruction]) -> None:
        """End an operation with an error for `indices`; later frames of it get the same."""
        group = record.group
        group.records.pop(record.key, None)
        remember(group.failed, record.key, failure)
        self.kill(record, out)
        if indices:
            out.append(Fail(tuple(sorted(indices)), group.id, *record.key, failure.error, failure.text, failure.hint))

    def fail_if_gone(self, record: Record, out: list[Instruction]) -> bool:
        """Fail the operation if it needs a member that has left; returns whether it did."""
        group = record.group
        for contributor in group.gone(record.by_node):
            if record.needs_gone(contributor):
                left = sorted(group.ranks[index] for index in group.left if group.nodes[index] == contributor)
                who = statements.listing("rank", left) if record.by_node else group.name_of(contributor)
                text = f"{who} left the group (it ended or destroyed it) before {statements.name_of(record.header)}"
                self.fail(record, record.concerned(), Failure("PeerLostError", text), out)
                return True
        return False

    @staticmethod
    def retire(record: Record) -> None:
        """Forget an operation that nothing more is expected of."""
        if record.slots or (record.home and not record.is_complete()):
            return
        group = record.group
        group.records.pop(record.key, None)
        if record.home and not record.reduces:
            remember(group.settled, record.header.sequence, record.header)

    # ---- slots

    def open(self, record: Record, header: Header) -> Slot:
        """Make the slot of an operation's frame."""
        slot = Slot(header, record)
        self.slots[slot.key] = slot
        self.num_slots += 1
        record.slots[slot] = None
        return slot

    def finish(self, slot: Slot, out: list[Instruction]) -> None:
        """End a slot whose every answer is given."""
        del self.slots[slot.key]
        del slot.record.slots[slot]
        out.append(self.dropped(slot))
        self.retire(slot.record)

    def kill(self, record: Record, out: list[Instruction]) -> None:
        """Drop an operation's slots; those that the service works on when it is done with them."""
        for slot in record.slots:
            del self.slots[slot.key]
            slot.dead = True
            if record.reduces and slot.ready:
                out.append(Release(tuple(slot.ready.values())))
                slot.ready.clear()
            if not slot.busy:
                out.append(self.dropped(slot))
        record.slots.clear()

    def dropped(self, slot: Slot) -> Drop:
        """Return the last instruction about a slot."""
        self.num_slots -= 1
        return Drop(slot)

    @staticmethod
    def is_broken(
        group: Group, index: int, header: Header, out: list[Instruction], buffer: Buffer | None = None
    ) -> bool:
        """Answer a frame of a broken group; returns whether it is one."""
        broken = group.broken
        if broken is None:
            return False
        if buffer is not None:
            out.append(Release((buffer,)))
        out.append(Fail((index,), group.id, 0, -1, broken.error, broken.text, broken.hint))
        return True

    def clear(self, group: Group, out: list[Instruction]) -> None:
        """Drop everything of a group."""
        for record in group.records.values():
            self.kill(record, out)
        group.records.clear()
        group.failed.clear()
        group.settled.clear()
        group.mailbox.clear(out)
