"""Who is connected to a service: processes, their channels, the groups they joined. Called by server.service only."""

from __future__ import annotations

from torch_bps.errors import ProtocolError
from torch_bps.transport.base import Channel
from torch_bps.wire import control


class Process:
    """A rank's process as a service sees it. Thread safety: the reactor's thread."""

    __slots__ = ("channels", "control", "groups", "heard_s", "hello", "left_groups")

    def __init__(self, hello: control.Hello, channel: Channel, now_s: float) -> None:
        self.hello = hello
        self.control = channel
        self.channels: list[Channel] = [channel]
        self.groups: dict[int, int] = {}
        """group id -> this process's member index"""
        self.left_groups: set[int] = set()
        self.heard_s = now_s

    def send(self, message: control.Message) -> None:
        """Send a control message."""
        send_control(self.control, message)

    def __str__(self) -> str:
        return f"rank {self.hello.rank} (host {self.hello.host}, pid {self.hello.pid})"


def send_control(channel: Channel, message: control.Message) -> None:
    """Send a control message on `channel`."""
    from torch_bps.transport.base import Buffer

    header, payload = control.encode(message)
    channel.send(header, Buffer(memoryview(payload)))


class Membership:
    """Processes by uuid, and the member of each group by its index."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self._members: dict[int, dict[int, Process]] = {}

    def hello(self, message: control.Hello, channel: Channel, now_s: float) -> Process:
        """Add a process. Raises ProtocolError if its uuid is connected already."""
        if message.process in self.processes:
            raise ProtocolError(f"process {message.process} said hello twice")
        process = self.processes[message.process] = Process(message, channel, now_s)
        return process

    def attach(self, message: control.Attach, channel: Channel) -> Process:
        """Add a lane. Raises ProtocolError if its process is unknown."""
        process = self.processes.get(message.process)
        if process is None:
            raise ProtocolError(f"a lane of unknown process {message.process!r}")
        process.channels.append(channel)
        return process

    def join(self, process: Process, group: int, index: int) -> None:
        """Note that `process` is member `index` of `group`."""
        process.groups[group] = index
        self._members.setdefault(group, {})[index] = process

    def leave(self, process: Process, group: int) -> int | None:
        """Forget the membership; returns its index, None if there was none."""
        index = process.groups.pop(group, None)
        if index is not None:
            process.left_groups.add(group)
            members = self._members[group]
            del members[index]
            if not members:
                del self._members[group]
        return index

    def remove(self, process: Process) -> None:
        """Forget the process (its groups were left before)."""
        self.processes.pop(process.hello.process, None)

    def member(self, group: int, index: int) -> Process | None:
        """Return the member, None if it has gone."""
        return self._members.get(group, {}).get(index)
