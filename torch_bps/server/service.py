"""Joins the engine to channels: frames in, instructions out. The same class is a server and, inside a rank, the
engine of that rank's own part on its host (core.local).

    channel ──frame──> Service ──event──> Engine ──instructions──> Service ──> Folder (adds), channels (results)

Must not know what a tensor, a Store or a torch is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch_bps.errors import BytePSError, ProtocolError
from torch_bps.server import reducer
from torch_bps.server.connection import Connection
from torch_bps.server.engine import Done, Drop, Engine, Fail, Fold, Instruction, Release, Send, Uplink
from torch_bps.server.membership import Membership, Process
from torch_bps.server.slots import Slot
from torch_bps.transport.base import Buffer, Channel, Memory, Reactor
from torch_bps.wire import control
from torch_bps.wire.dtypes import accumulated_nbytes
from torch_bps.wire.header import BOARD, DECLARE, PULL, PUSH, Header

log = logging.getLogger("torch_bps.server")


class Folder(Protocol):
    """Runs the adds: inline (ranks of one host) or in engine threads (a server)."""

    def submit(self, slot: Slot, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `job()`, then `done()` in the reactor's thread. Jobs of one slot run in order."""


class InlineFolder:
    """Adds in the reactor's own thread: a rank's cores are busy with its own work."""

    def submit(self, slot: Slot, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Run both at once."""
        job()
        done()


class Service:
    """One summation service.

    Thread safety: all methods in the reactor's thread.

    Args:
        reactor, memory: where it runs, where sums live.
        name: uuid hex, told to clients.
        node: identity of the host; clients with the same one may use shared memory.
        endpoints: addresses of the data planes, told to clients.
        nic_gbps: rate of the host's link, told to clients; 0: unknown.
        folder: runs the adds.
        heartbeat_timeout_s: a process that is silent for this long is lost; 0 = never.
        uplink: for a node's local service: `uplink(slot, want)` pushes the node's sum on and later calls `uplinked` or
            `uplink_failed` here.
    """

    def __init__(
        self,
        reactor: Reactor,
        memory: Memory,
        *,
        name: str,
        node: str,
        endpoints: Sequence[str] = (),
        nic_gbps: float = 0.0,
        folder: Folder | None = None,
        heartbeat_timeout_s: float = 0.0,
        uplink: Callable[[Slot, bool], None] | None = None,
    ) -> None:
        self.reactor = reactor
        self.memory = memory
        self.name = name
        self.node = node
        self.endpoints = list(endpoints)
        self.nic_gbps = nic_gbps
        self.engine = Engine()
        self.membership = Membership()
        self.channels: set[Channel] = set()
        """all that are open"""
        self.on_change: Callable[[], None] = lambda: None
        """called when a process left or a slot was drained: a server that drains looks whether it may end"""
        self.on_news: Callable[[str], None] = lambda text: None
        """called with a line for people when a process has come or gone"""
        self.on_board: Callable[[int, int, Buffer], None] | None = None
        """called with (group, member index, memory) when a rank of this host lends its board (core.boards)"""
        self._folder = folder or InlineFolder()
        self._uplink = uplink
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._swept_s = time.monotonic()
        self._todo: deque[Instruction] = deque()
        self._executing = False
        self._run: dict[type[Any], Callable[[Any], None]] = {
            Fold: self._fold,
            Send: self._send,
            Done: self._done,
            Release: self._release,
            Drop: self._drop,
            Fail: self._fail,
            Uplink: self._push_up,
        }
        if heartbeat_timeout_s:
            reactor.call(self._sweep)

    def accept(self, channel: Channel) -> Connection:
        """Return the handler of a new channel (a listener's `accept`)."""
        self.channels.add(channel)
        return Connection(self)

    def is_idle(self) -> bool:
        """Whether no slot is alive: nobody is owed anything by this service."""
        return self.engine.is_idle()

    def holds_own(self, group: int) -> bool:
        """Whether an operation of the group that this process itself (a rank) takes part in is not over here."""
        process = self.membership.processes.get(self.name)
        index = process.groups.get(group) if process is not None else None
        return index is not None and self.engine.holds(group, index)

    def uplinked(self, slot: Slot) -> None:
        """The node's sum came back from the servers; it is in slot.result."""
        self.execute(self.engine.uplinked(slot))

    def uplink_failed(self, slot: Slot, error: BytePSError) -> None:
        """The node's sum could not be pushed on."""
        self.execute(self.engine.uplink_failed(slot, type(error).__name__, str(error)))

    def end(self, text: str) -> None:
        """Tell every process that this service ends."""
        for process in list(self.membership.processes.values()):
            self.membership.remove(process)
            self._take_leave(process, text)

    def _take_leave(self, process: Process, text: str = "") -> None:
        """Say Bye. The lanes are the peer's to close: their end could overtake the Bye and look like a loss."""
        process.send(control.Bye(text))
        process.control.close_when_sent()

    def cut(self) -> None:
        """Close what is still open."""
        for channel in list(self.channels):
            channel.close()

    # ---- frames

    def frame(self, process: Process, channel: Channel, header: Header, buffer: Buffer | None) -> None:
        """Handle one data frame; takes over the buffer."""
        index = process.groups.get(header.group)
        if index is None:
            if buffer is not None:
                buffer.release()
            if header.group in process.left_groups:
                return  # overtaken by its own Leave
            raise ProtocolError(f"{process} sent a frame of group {header.group:x}, which it has not joined")
        try:
            if header.frame == PUSH:
                instructions = self.engine.push(index, header, buffer, channel)
            elif header.frame == PULL and buffer is None:
                instructions = self.engine.pull(index, header, channel)
            elif header.frame == DECLARE and buffer is None:
                instructions = self.engine.declare(index, header, channel)
            elif header.frame == BOARD and buffer is not None and self.on_board is not None:
                self.on_board(header.group, index, buffer)
                return
            else:
                raise ProtocolError(f"{process} sent a frame {header.frame} that only services send")
        except BytePSError:
            if buffer is not None:
                buffer.release()
            raise
        if instructions:
            self.execute(instructions)

    def message(self, process: Process, message: control.AnyMessage) -> None:
        """Handle one control message of a process that said hello."""
        process.heard_s = time.monotonic()
        match message:
            case control.Ping(number):
                process.send(control.Pong(number))
            case control.Join():
                self._join(process, message)
            case control.Leave(group):
                index = self.membership.leave(process, group)
                if index is not None:
                    self.execute(self.engine.leave(group, index, None, ""))
            case control.Cancel():
                index = process.groups.get(message.group)
                if index is not None:
                    self.execute(
                        self.engine.cancel(
                            index, message.group, message.stream, message.sequence, message.error, message.text
                        )
                    )
            case control.Query(group, stream, sequence):
                if group in process.groups:
                    missing = self.engine.missing(group, stream, sequence)
                    process.send(control.Waiting(group, stream, sequence, missing))
            case control.Bye(reason):
                self._bye(process, reason)
            case _:
                raise ProtocolError(f"{process} sent a {type(message).__name__}, which has no place here")

    def _join(self, process: Process, message: control.Join) -> None:
        if message.uplink and self._uplink is None:
            raise ProtocolError(f"{process} asks a server to sum for one node")
        if message.group in process.groups:
            raise ProtocolError(f"{process} joined group {message.group:x} twice")
        self.engine.join(
            message.group,
            size=message.size,
            index=message.index,
            rank=message.rank,
            num_nodes=message.num_nodes,
            node=message.node,
            uplink=message.uplink,
        )
        self.membership.join(process, message.group, message.index)
        process.send(control.Joined(message.group))

    def _bye(self, process: Process, reason: str) -> None:
        for group in list(process.groups):
            index = self.membership.leave(process, group)
            assert index is not None
            error = "PeerLostError" if reason else None
            self.execute(self.engine.leave(group, index, error, f"{process} ended: {reason}"))
        self.membership.remove(process)
        self.on_news(f"{process} has left{f': {reason}' if reason else ''}")
        self._take_leave(process)
        self.on_change()

    def lost(self, process: Process, text: str) -> None:
        """A process died, froze, or broke the protocol: every group it was in is broken."""
        if self.membership.processes.get(process.hello.process) is not process:
            return  # it said Bye, or was lost before
        self.membership.remove(process)
        log.warning("%s is lost: %s", process, text)
        for group in list(process.groups):
            index = self.membership.leave(process, group)
            assert index is not None
            self.execute(self.engine.leave(group, index, "PeerLostError", f"{process} is lost: {text}"))
        for channel in process.channels:
            channel.close()
        self.on_change()

    def _sweep(self) -> None:
        now_s = time.monotonic()
        late = now_s - self._swept_s > self._heartbeat_timeout_s / 2
        self._swept_s = now_s
        for process in list(self.membership.processes.values()):
            if late:
                process.heard_s = now_s  # this process itself slept: its own clock proves nothing
            elif now_s - process.heard_s > self._heartbeat_timeout_s:
                self.lost(process, f"it was silent for {now_s - process.heard_s:.0f} s (BYTEPS_HEARTBEAT_TIMEOUT)")
        self.reactor.call_later(self._heartbeat_timeout_s / 8, self._sweep)

    # ---- instructions

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """Carry out instructions, and those that follow from them, in order."""
        self._todo.extend(instructions)
        if self._executing:
            return
        self._executing = True
        try:
            while self._todo:
                instruction = self._todo.popleft()
                self._run[type(instruction)](instruction)
        finally:
            self._executing = False

    def _fold(self, instruction: Fold) -> None:
        slot, buffers, last = instruction
        if slot.accumulator is None:
            out_nbytes = accumulated_nbytes(slot.dtype, slot.nbytes) if slot.keep32 else slot.nbytes
            slot.result = self.memory.alloc(out_nbytes)
            slot.accumulator = reducer.Accumulator(slot.dtype, slot.redop, slot.result.view, slot.keep32)
        accumulator = slot.accumulator
        views = [buffer.view for buffer in buffers]

        def job() -> None:
            accumulator.fold(views, slot.acc32, last)
            if last:
                accumulator.finish(slot.divisor)

        def done() -> None:
            for buffer in buffers:
                buffer.release()
            self.execute(self.engine.folded(slot))

        self._folder.submit(slot, job, done)

    def _send(self, instruction: Send) -> None:
        slot, origin, header = instruction
        result = slot.result
        if result is None or not header.nbytes:
            origin.send(header)
        elif result.view.nbytes == header.nbytes:
            origin.send(header, result.retain())
        else:  # the memory held a node's float32 sum of a half type, twice the size of the result
            result.retain()
            origin.send(header, Buffer(result.view[: header.nbytes], lambda _: result.release()))

    def _done(self, instruction: Done) -> None:
        instruction.origin.send(instruction.header)

    def _release(self, instruction: Release) -> None:
        for buffer in instruction.buffers:
            buffer.release()

    def _drop(self, instruction: Drop) -> None:
        slot = instruction.slot
        if slot.result is not None:
            slot.result.release()
            slot.result = None
        slot.accumulator = None
        self.on_change()

    def _push_up(self, instruction: Uplink) -> None:
        assert self._uplink is not None
        self._uplink(instruction.slot, instruction.want)

    def _fail(self, instruction: Fail) -> None:
        for index in instruction.indices:
            process = self.membership.member(instruction.group, index)
            if process is not None:
                process.send(
                    control.Failed(
                        instruction.group,
                        instruction.stream,
                        instruction.sequence,
                        instruction.error,
                        instruction.text,
                        instruction.hint,
                    )
                )
