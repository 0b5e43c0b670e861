"""One runtime a process: the IO thread, the connections, this rank's own service. All groups and shims share it.

    open_group ──> rendezvous (who, where, which servers) ──> links ──> Join ──> Group
    Group.close ... the last one ends the runtime: Bye to everyone, threads joined, descriptors closed

The first group starts it, the last close ends it, and it can start again.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch_bps
from torch_bps import affinity, interfaces, topology
from torch_bps.config import Config
from torch_bps.core.boards import Boards
from torch_bps.core.client import Client
from torch_bps.core.connector import Connector
from torch_bps.core.group import Group
from torch_bps.core.launch import ColocatedServer
from torch_bps.core.link import Link
from torch_bps.core.local import NodeUplink
from torch_bps.core.opening import Opening
from torch_bps.core.waiting import Waiting
from torch_bps.errors import BytePSError, ClosedError, OperationTimeout
from torch_bps.server.service import Service
from torch_bps.transport.arena import Arena
from torch_bps.transport.inproc import InprocTransport
from torch_bps.transport.reactor import EpollReactor
from torch_bps.transport.registry import SCHEMES, make
from torch_bps.wire import announcement, control

log = logging.getLogger("torch_bps.core")

_DRAIN_S = 10.0
_BYE_S = 2.0
_END_S = 0.5

_T = TypeVar("_T")
_lock = threading.Lock()
_runtime: Runtime | None = None


def open_group(store: Any, rank: int, size: int, *, timeout_s: float, name: str, config: Config) -> Group:
    """Open a group: meet the other ranks in `store`, connect to the engines, agree. Blocks.

    Args:
        store: torch.distributed.Store with a prefix of the group's own.
        rank, size: in the group; size is at least 2.
        timeout_s: for opening it.
        name: for messages.

    Raises:
        OperationTimeout: ranks or servers did not come; the message names them.
        ConfigError, PeerLostError, VersionError...: a setting is wrong, a server cannot be reached; on all ranks.
    """
    runtime = _acquire(config, rank)
    try:
        return Opening(runtime, store, rank, size, timeout_s, name, config).open()
    except BaseException:
        runtime.release(abort=True)
        raise


def _acquire(config: Config, rank: int) -> Runtime:
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = Runtime(config, rank)
        _runtime.users += 1
        return _runtime


def current() -> Runtime | None:
    """Return the running runtime."""
    return _runtime


class Runtime:
    """The process's runtime. Use open_group and Group.close.

    Thread safety: public methods from any thread but the IO thread.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self.users = 0
        self.config = config
        self.process = uuid.uuid4().hex
        self.node = topology.node_identity(config.node_id)
        self.host = topology.host_label()
        self.who = f"rank {rank} (host {self.host}, pid {os.getpid()})"
        self.groups: dict[int, Group] = {}
        self.interfaces = interfaces.find(config.interfaces)
        self.world_nodes = 0
        self.node_server = ""
        self._server: ColocatedServer | None = None
        self._is_held = False
        self._server_lock = threading.Lock()
        self._closed = False
        self.reactor = EpollReactor("byteps-io-0")
        self.arena = Arena(config.shared_memory_bytes)
        self._inproc = InprocTransport()
        self._transports: dict[str, Any] = {
            scheme: make(
                scheme,
                self.arena,
                socket_buffer_nbytes=config.socket_buffer_bytes,
                silence_s=config.heartbeat_timeout_s,
                interfaces=self.interfaces,
            )
            for scheme in SCHEMES
        }
        self._transports["inproc"] = self._inproc
        uplink = NodeUplink()
        self.service = Service(
            self.reactor,
            self.arena,
            name=self.process,
            node=self.node,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            uplink=uplink,
        )
        self.client = Client(
            self.reactor,
            credit_nbytes=config.credit_bytes,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            stall_warning_s=config.stall_warning_s,
            who=self.who,
        )
        uplink.service, uplink.client = self.service, self.client
        self.boards = Boards(self)
        self.service.on_board = self.boards.arrived
        self.client.on_broken = self._on_broken
        self.client.on_lost = self._on_lost
        hello = control.Hello(self.process, rank, self.host, os.getpid(), release=torch_bps.__version__)
        self.connector = Connector(self.reactor, self._transports, self.client, hello, config, self.node)
        self.local_address = f"shm://byteps-{self.process}"
        self.reactor.start()
        try:
            self._listeners = self.in_reactor(self._listen)
        except BaseException:
            self.reactor.stop()
            raise

    def _listen(self) -> list[Any]:
        accept = self.service.accept
        return [
            self._inproc.listen(self.reactor, "self", accept),
            self._transports["shm"].listen(self.reactor, self.local_address.removeprefix("shm://"), accept),
        ]

    def hold_near(self, addresses: Sequence[str]) -> None:
        """Let the IO thread run near the interfaces that have these addresses, from now on."""
        if self.config.numa_on and not self._is_held:
            self._is_held = True
            self.reactor.call(affinity.hold_near, interfaces.holding(addresses))

    def start_server(self, hosts: Sequence[str]) -> announcement.Announcement:
        """Start this node's co-located server, unless it runs already; returns where it is."""
        with self._server_lock:
            if self._server is None:
                self._server = ColocatedServer(hosts)
            return self._server.announcement

    def in_reactor(self, function: Callable[[], _T], timeout_s: float = 30.0) -> _T:
        """Run `function` in the IO thread and return its result. Blocks."""
        results: list[_T] = []
        waiting = Waiting(1)

        def run() -> None:
            try:
                results.append(function())
            except BytePSError as error:
                waiting.one(error)
            else:
                waiting.one(None)

        self.reactor.call(run)
        waiting.wait(time.monotonic() + timeout_s, lambda: "the IO thread does not answer")
        if waiting.error is not None:
            raise waiting.error
        return results[0]

    # ---- breaking

    def _on_broken(self, group_id: int, error: BytePSError) -> None:
        group = self.groups.get(group_id)
        if group is not None and group.broken is None:
            group.break_(error)

    def _on_lost(self, link: Link, error: BytePSError) -> None:
        for group in list(self.groups.values()):
            if link in group.links() and group.broken is None:
                group.break_(error)
                self.client.fail_group(group.id, error, tell=True)

    # ---- closing

    def close_group(self, group: Group, abort: bool) -> None:
        """Leave a group (Group.close)."""
        self.groups.pop(group.id, None)
        error = ClosedError(f"the process group {group.name!r} was destroyed here", rank=self.who)

        def leave() -> None:
            self.client.fail_group(group.id, error, tell=True)

        def say_leave() -> None:
            for link in group.links():
                if link.closed is None:
                    link.send_message(control.Leave(group.id))

        if not self._closed:
            if group.lane is not None:
                group.lane.close(abort or group.broken is not None)
                group.lane.release()
                self.reactor.call(self.boards.give_back, group.id)
            if not abort and group.broken is None:
                self._drain(group)
            self.reactor.call(leave)
            self.reactor.call(say_leave)
        self.release(abort or group.broken is not None)

    def release(self, abort: bool) -> None:
        """Give the runtime back; the last user ends it."""
        global _runtime
        with _lock:
            self.users -= 1
            if self.users or self._closed:
                return
            self._closed = True
            if _runtime is self:
                _runtime = None
        self._stop(abort)

    def _drain(self, group: Group) -> None:
        """Wait until this rank's own service owes nothing to the ranks that are slower.

        What others have begun and this rank has not is no reason to wait: it fails for them once this rank leaves.
        """
        deadline_s = time.monotonic() + _DRAIN_S
        said_s = time.monotonic() + 2.0
        while self.in_reactor(lambda: self.service.holds_own(group.id)):
            now_s = time.monotonic()
            if now_s > deadline_s:
                log.warning("%s: leaving although other ranks have not come for their results", self.who)
                return
            if now_s > said_s:
                said_s = deadline_s
                log.warning("%s: waiting for slower ranks to fetch their results before leaving", self.who)
            time.sleep(0.002)

    def _stop(self, abort: bool) -> None:
        error = ClosedError("the process group was destroyed", rank=self.who)
        try:
            log.info("%s: %s", self.who, self.client.traffic.summary())
            links = self.in_reactor(lambda: list(self.client.links.values()))
            waiting = Waiting(len(links))

            def bye() -> None:
                self.client.close(error)
                for link in links:
                    link.bye("it aborted" if abort else "", lambda: waiting.one(None))

            self.reactor.call(bye)
            try:
                waiting.wait(time.monotonic() + (0.3 if abort else _BYE_S), lambda: "")
            except OperationTimeout:
                pass  # a peer that is gone or frozen does not answer: its links are closed all the same
            self.in_reactor(self._close_all)
            until_s = time.monotonic() + _END_S
            while self.in_reactor(lambda: bool(self.service.channels)) and time.monotonic() < until_s:
                time.sleep(0.001)
            self.in_reactor(self.service.cut)
        finally:
            self.reactor.stop()
            for transport in self._transports.values():
                if hasattr(transport, "close"):
                    transport.close()
            self.arena.close()
            if self._server is not None:
                self._server.stop(0.5 if abort else _DRAIN_S + 2.0)

    def _close_all(self) -> None:
        self.boards.give_back_all()
        self.service.end(f"{self.who} has left")
        for listener in self._listeners:
            listener.close()
        for link in list(self.client.links.values()):
            link.close()
        self.client.links.clear()

    def forked(self) -> None:
        """In a forked child: make everything inert and close the inherited descriptors. Takes no lock."""
        error = ClosedError(
            f"this is a forked child (pid {os.getpid()}) of {self.who}",
            hint="a process group only works in the process that opened it",
        )
        self._closed = True
        for group in self.groups.values():
            group.closed = error
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self.reactor.fds():
            os.dup2(null, fd, inheritable=False)  # the number stays taken: the objects that own it may still close it
        os.close(null)


def _in_child() -> None:
    global _runtime, _lock
    _lock = threading.Lock()
    if _runtime is not None:
        _runtime.forked()
        _runtime = None


def _at_exit() -> None:
    """A script that never destroys its groups: end in order, but do not wait for anybody."""
    runtime = _runtime
    if runtime is not None:
        for group in list(runtime.groups.values()):
            group.close()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
