"""Part 0 of point-to-point messages: which message goes to which posted receive. Called by server.engine only.

    PUSH  stream_of(src, dst, tag)          sequence = the sender's message number in that stream: 0, 1, 2 ..
    PULL  stream_of(src or ANY, dst, tag)   sequence = the receiver's number of receives for (dst, tag): 0, 1, 2 ..

Both kinds are taken in the order of their numbers (lanes may swap them on the way: early ones wait). Each posted
receive, in order, takes the first message it matches, ANY_SOURCE the one that was here first; so at any time no
waiting receive matches a waiting message. A message that its sender gave up keeps its place, as an error for the
receive that it was meant for: the one after it would be the wrong data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from torch_bps.errors import ProtocolError
from torch_bps.server.instructions import Done, Drop, Fail, Instruction, Release, Send
from torch_bps.server.slots import Record, Slot
from torch_bps.server.statements import MISMATCH_HINT, check_push, mismatch_text, view
from torch_bps.wire import ops
from torch_bps.wire.header import DONE, PULL, Header

if TYPE_CHECKING:
    from torch_bps.server.groups import Group
    from torch_bps.transport.base import Buffer, Channel

Out = list[Instruction]
_Item = TypeVar("_Item")


class _Message:
    """A message that no receive has taken; without a slot once its sender gave it up (then with the reason)."""

    __slots__ = ("error", "number", "slot", "src", "text")

    def __init__(self, src: int, number: int, slot: Slot | None, error: str = "", text: str = "") -> None:
        self.src = src
        self.number = number
        self.slot = slot
        self.error = error
        self.text = text


class _Post:
    """A posted receive that no message has come for."""

    __slots__ = ("header", "origin", "src")

    def __init__(self, src: int, header: Header, origin: Channel) -> None:
        self.src = src
        self.header = header
        self.origin = origin

    def takes(self, src: int) -> bool:
        return self.src in (src, ops.ANY_SOURCE)


class _Line(Generic[_Item]):
    """Hands numbered items on in the order of their numbers."""

    __slots__ = ("early", "next", "void")

    def __init__(self) -> None:
        self.next = 0
        self.early: dict[int, _Item] = {}
        self.void: set[int] = set()
        """numbers that were given up before their frame came"""

    def check(self, number: int) -> bool:
        """Return whether the frame with this number is wanted. Raises ProtocolError if it came before."""
        if number in self.void:
            self.void.discard(number)
            return False
        if number < self.next or number in self.early:
            raise ProtocolError(f"point-to-point number {number} came twice")
        return True

    def put(self, number: int, item: _Item) -> list[_Item]:
        """Add an item; returns those whose turn it is now."""
        early = self.early
        early[number] = item
        turn = []
        while self.next in early:
            turn.append(early.pop(self.next))
            self.next += 1
        return turn


class _Box:
    """All messages and receives of one (dst, tag)."""

    __slots__ = ("messages", "post_line", "posts", "streams")

    def __init__(self) -> None:
        self.streams: dict[int, _Line[_Message]] = {}
        """by source"""
        self.messages: list[_Message] = []
        """in order and not taken"""
        self.post_line: _Line[_Post | None] = _Line()
        """None: given up before its turn"""
        self.posts: list[_Post] = []
        """in order and waiting"""

    def stream(self, src: int) -> _Line[_Message]:
        """Return the order of the messages from one source."""
        line = self.streams.get(src)
        if line is None:
            line = self.streams[src] = _Line()
        return line


class Mailbox:
    """The boxes of one group. Methods append instructions to `out`."""

    __slots__ = ("_boxes", "_group")

    def __init__(self, group: Group) -> None:
        self._group = group
        self._boxes: dict[tuple[int, int], _Box] = {}
        """by (dst, tag)"""

    def push(self, index: int, header: Header, buffer: Buffer | None, origin: Channel, out: Out) -> None:
        """Take in a message (its codes were checked)."""
        src, dst, tag = ops.split_stream(header.stream)
        self._check(header, src, dst)
        if src != index:
            raise ProtocolError(f"rank {self._group.rank_of(index)} pushes a message of rank {src}")
        check_push(header, buffer is not None)
        box = self._box(dst, tag)
        line = box.stream(src)
        if not line.check(header.sequence):
            if buffer is not None:
                out.append(Release((buffer,)))
            return
        slot = Slot(header, Record(self._group, header))
        slot.take(header, buffer, origin)
        for message in line.put(header.sequence, _Message(src, header.sequence, slot)):
            self._deliver(box, dst, message, out)

    def pull(self, index: int, header: Header, origin: Channel, out: Out) -> None:
        """Take in a posted receive (its codes were checked)."""
        src, dst, tag = ops.split_stream(header.stream)
        self._check(header, src, dst)
        if dst != index:
            raise ProtocolError(f"rank {self._group.rank_of(index)} pulls a message to rank {dst}")
        box = self._box(dst, tag)
        if not box.post_line.check(header.sequence):
            return
        for post in box.post_line.put(header.sequence, _Post(src, header, origin)):
            if post is not None:
                self._post(box, dst, post, out)

    def cancel(self, index: int, stream: int, sequence: int, error: str, text: str, out: Out) -> None:
        """Give up a message (by its sender) or a posted receive (by its receiver)."""
        src, dst, tag = ops.split_stream(stream)
        if index == dst:
            self._cancel_post(self._box(dst, tag), dst, sequence, out)
        elif index == src:
            text = f"{self._group.name_of(src)} gave up send #{sequence}: {text}"
            self._cancel_message(self._box(dst, tag), dst, _Message(src, sequence, None, error, text), out)
        else:
            raise ProtocolError(f"rank {self._group.rank_of(index)} gives up a message of others")

    def leave(self, index: int, out: Out) -> None:
        """A member left in order: fail what needs it."""
        for (dst, _tag), box in self._boxes.items():
            if dst == index:
                box.posts.clear()
                for message in self._all_messages(box):
                    self._undeliverable(dst, message, out)
                box.messages.clear()
                box.post_line.early.clear()
                for line in box.streams.values():
                    line.early.clear()
                continue
            if index in box.streams:
                early = box.streams[index].early
                out.extend([Drop(message.slot) for message in early.values() if message.slot is not None])
                early.clear()  # those before them never came
            waiting = []
            for post in box.posts:
                if self._can_come(post, dst):
                    waiting.append(post)
                else:
                    self._nobody(post, dst, out)
            box.posts = waiting

    def clear(self, out: Out) -> None:
        """The group is broken or over: drop everything, tell nobody."""
        for box in self._boxes.values():
            out.extend([Drop(message.slot) for message in self._all_messages(box) if message.slot is not None])
        self._boxes.clear()

    def missing(self, stream: int, sequence: int) -> list[int]:
        """Return the members that a waiting receive or message with this number waits for."""
        src, dst, tag = ops.split_stream(stream)
        box = self._boxes.get((dst, tag))
        if box is None:
            return []
        missing: set[int] = set()
        early = list(filter(None, box.post_line.early.values()))
        for post in box.posts + early:
            if (post.header.stream, post.header.sequence) == (stream, sequence):
                missing |= self._group.present - {dst} if src == ops.ANY_SOURCE else {src}
        for message in self._all_messages(box):
            if (message.src, message.number) == (src, sequence):
                missing.add(dst)
        return sorted(missing)

    def counts(self) -> tuple[int, int, int]:
        """Return the number of messages, of receives, and the payload bytes held."""
        messages = receives = nbytes = 0
        for box in self._boxes.values():
            receives += len(box.posts) + sum(post is not None for post in box.post_line.early.values())
            for message in self._all_messages(box):
                if message.slot is not None:
                    messages += 1
                    nbytes += message.slot.nbytes
        return messages, receives, nbytes

    # ---- inside

    def _box(self, dst: int, tag: int) -> _Box:
        box = self._boxes.get((dst, tag))
        if box is None:
            box = self._boxes[dst, tag] = _Box()
        return box

    def _check(self, header: Header, src: int, dst: int) -> None:
        size = self._group.size
        known = 0 <= src < size or (src == ops.ANY_SOURCE and header.frame == PULL)
        if not known or dst >= size or src == dst or header.block:
            raise ProtocolError(f"no message goes from rank {src} to rank {dst} of {size} (block {header.block})")

    @staticmethod
    def _all_messages(box: _Box) -> list[_Message]:
        messages = list(box.messages)
        for line in box.streams.values():
            messages += line.early.values()
        return messages

    def _deliver(self, box: _Box, dst: int, message: _Message, out: Out) -> None:
        """It is this message's turn."""
        if dst in self._group.left:
            self._undeliverable(dst, message, out)
            return
        for position, post in enumerate(box.posts):
            if post.takes(message.src):
                del box.posts[position]
                self._match(post, message, dst, out)
                return
        box.messages.append(message)

    def _post(self, box: _Box, dst: int, post: _Post, out: Out) -> None:
        """It is this receive's turn."""
        for position, message in enumerate(box.messages):
            if post.takes(message.src):
                del box.messages[position]
                self._match(post, message, dst, out)
                return
        if self._can_come(post, dst):
            box.posts.append(post)
        else:
            self._nobody(post, dst, out)

    def _match(self, post: _Post, message: _Message, dst: int, out: Out) -> None:
        slot = message.slot
        pull = post.header
        if slot is None:
            self._fail(dst, pull, message.error, message.text, "", out)
            return
        push = slot.header
        if push.total != pull.total or push.dtype != pull.dtype:
            group = self._group
            text = mismatch_text(
                f"a message from rank {group.rank_of(message.src)} to rank {group.rank_of(dst)}",
                {
                    ("rank", group.rank_of(message.src)): view(push),
                    ("rank", group.rank_of(dst)): view(pull).replace("send", "recv", 1),
                },
            )
            self._fail(message.src, push, "MismatchError", text, MISMATCH_HINT, out)
            self._fail(dst, pull, "MismatchError", text, MISMATCH_HINT, out)
        else:
            answer = slot.result_header()._replace(block=pull.sequence & 0xFFFFFFFF)
            out.append(Send(slot, post.origin, answer))
            out.append(Done(slot.pusher_origin, slot.result_header(DONE)))
        out.append(Drop(slot))

    def _cancel_message(self, box: _Box, dst: int, given_up: _Message, out: Out) -> None:
        line = box.stream(given_up.src)
        number = given_up.number
        if number >= line.next:
            old = line.early.get(number)
            if old is None:
                line.void.add(number)
            elif old.slot is None:
                return  # given up before
            else:
                out.append(Drop(old.slot))
            for message in line.put(number, given_up):
                self._deliver(box, dst, message, out)
            return
        for position, message in enumerate(box.messages):
            if message.src == given_up.src and message.number == number and message.slot is not None:
                box.messages[position] = given_up
                out.append(Drop(message.slot))

    def _cancel_post(self, box: _Box, dst: int, number: int, out: Out) -> None:
        line = box.post_line
        if number < line.next:
            box.posts = [post for post in box.posts if post.header.sequence != number]
            return
        if number not in line.early:
            line.void.add(number)
        for post in line.put(number, None):
            if post is not None:
                self._post(box, dst, post, out)

    def _can_come(self, post: _Post, dst: int) -> bool:
        left = self._group.left
        if post.src == ops.ANY_SOURCE:
            return len(left - {dst}) < self._group.size - 1
        return post.src not in left

    def _nobody(self, post: _Post, dst: int, out: Out) -> None:
        group = self._group
        who = "every other rank" if post.src == ops.ANY_SOURCE else group.name_of(post.src)
        text = (
            f"{who} left the group (it ended or destroyed it) before it sent what {group.name_of(dst)} "
            f"waits for (recv #{post.header.sequence})"
        )
        self._fail(dst, post.header, "PeerLostError", text, "", out)

    def _undeliverable(self, dst: int, message: _Message, out: Out) -> None:
        slot = message.slot
        if slot is None:
            return
        name = self._group.name_of(dst)
        text = f"{name} left the group (it ended or destroyed it) before it received send #{message.number}"
        self._fail(message.src, slot.header, "PeerLostError", text, "", out)
        out.append(Drop(slot))

    def _fail(self, index: int, header: Header, error: str, text: str, hint: str, out: Out) -> None:
        if index in self._group.present:
            out.append(Fail((index,), self._group.id, header.stream, header.sequence, error, text, hint))
