"""A summation server: `byteps server`, `python -m torch_bps.server`. Ready in under half a second, without torch.

    byteps server --host 10.0.0.7 --port 4711            long-lived; BYTEPS_SERVERS=10.0.0.7:4711 at the workers
    byteps server --rdzv-endpoint 10.0.0.1:29400 --rdzv-id job1       finds the job; BYTEPS_NUM_SERVERS=k there

SIGTERM (or Ctrl-C) drains: nobody new is accepted, who is connected may finish for --drain-timeout seconds and is then
told, and it exits 0. A second one ends it at once. Wrong settings exit with 2, a job that was never found with 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import uuid
from types import FrameType

from torch_bps import affinity, interfaces, topology
from torch_bps.config import Config
from torch_bps.errors import BytePSError, ConfigError
from torch_bps.server import reducer
from torch_bps.server.folder import ThreadFolder
from torch_bps.server.service import Service
from torch_bps.transport.arena import Arena
from torch_bps.transport.base import Listener
from torch_bps.transport.reactor import EpollReactor
from torch_bps.transport.registry import SCHEMES, make
from torch_bps.wire import announcement

log = logging.getLogger("torch_bps.server")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="byteps server",
        description="Run a summation server: it adds what the ranks push and sends the sums back.",
        epilog="At the workers: BYTEPS_SERVERS=HOST:PORT,... or, with --rdzv-endpoint, BYTEPS_NUM_SERVERS=k.",
    )
    p.add_argument("--host", default="", help="address or name to listen at, or several with commas, one for each "
                   "network interface (default: those of BYTEPS_INTERFACE, else the one that reaches the rendezvous, "
                   "else 127.0.0.1; 0.0.0.0 or :: for all)")  # fmt: skip
    p.add_argument("--port", type=int, default=0, help="control port (default: any free one); data uses PORT+1")
    p.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help="torchrun's: find the job there")
    p.add_argument("--rdzv-id", default="none", metavar="ID", help="torchrun's --rdzv-id (its default: none)")
    p.add_argument(
        "--rdzv-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="how long to look for the job (default: %(default)g)",
    )
    p.add_argument(
        "--drain-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="how long SIGTERM lets ranks finish (default: %(default)g)",
    )
    p.add_argument("--threads", type=int, default=0, help="engine threads (default: BYTEPS_SERVER_ENGINE_THREAD)")
    p.add_argument("--verbose", action="store_true", help="log at DEBUG")
    p.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)  # end with this process (co-located)
    p.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)  # write the announcement there
    return p


class Server:
    """One server process. Thread safety: `main` runs the reactor in the main thread."""

    def __init__(self, options: argparse.Namespace, config: Config) -> None:
        self.options = options
        self.reactor = EpollReactor("byteps-io-0")
        self._draining = False
        self._signalled = False
        self._running = True
        self._ended = False
        self._exit_code = 0
        _check(options)
        endpoint = _endpoint(options.rdzv_endpoint)
        hosts = _hosts(options.host, config, endpoint)
        if config.numa_on:
            affinity.hold_near(interfaces.holding(hosts))  # before any thread is started: they are held too
        name = uuid.uuid4().hex
        self._arena = Arena(config.shared_memory_bytes)
        node = topology.node_identity(config.node_id)
        self._folder = ThreadFolder(self.reactor, options.threads or config.server_engine_thread)
        self.service = Service(
            self.reactor,
            self._arena,
            name=name,
            node=node,
            nic_gbps=config.nic_gbps,
            folder=self._folder,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self.service.on_change = self._look
        self.service.on_news = lambda text: log.info("%s", text)
        self._transports = {
            scheme: make(
                scheme,
                self._arena,
                socket_buffer_nbytes=config.socket_buffer_bytes,
                silence_s=config.heartbeat_timeout_s,
            )
            for scheme in SCHEMES
        }
        self._listeners: list[Listener] = []
        data_port = options.port + 1 if options.port else 0
        control_listener = self._listen("zmq", topology.join_address(hosts[0], options.port))
        places = [("shm", f"byteps-{name}"), *(("tcp", topology.join_address(host, data_port)) for host in hosts)]
        for scheme, where in places:
            self.service.endpoints.append(self._listen(scheme, where).address)
        self.service.endpoints.append(control_listener.address)
        address = control_listener.address.removeprefix("zmq://")
        if hosts[0] in ("0.0.0.0", "::"):
            address = topology.join_address(topology.host_label(), topology.split_address(address)[1])
        self.announcement = announcement.Announcement(address, name, topology.host_label())
        self._endpoint = endpoint
        self._is_local = all(topology.is_loopback(host) for host in hosts)

    def _listen(self, scheme: str, where: str) -> Listener:
        listener: Listener = self._transports[scheme].listen(self.reactor, where, self.service.accept)
        self._listeners.append(listener)
        return listener

    def run(self) -> int:
        """Serve until a signal, the parent's end or the job's; returns the exit code."""
        options = self.options
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN if options.parent else self._on_signal)
        if options.parent:
            self._watch_parent(options.parent)
        announcer = None
        if self._endpoint:
            from torch_bps.server.announce import Announcer, require_torch

            require_torch()
            announcer = Announcer(
                self._endpoint,
                options.rdzv_id,
                announcement.encode(self.announcement),
                lambda reason, failed: self.reactor.call(self._gone, reason, failed),
                options.rdzv_timeout,
            )
        log.info("server %s ready at %s (also %s)", self.service.name[:8], self.announcement.address,
                 ", ".join(self.service.endpoints))  # fmt: skip
        if self._is_local and not options.parent:
            log.info("only ranks of this host can reach it; --host ADDRESS lets others in")
        if options.ready_fd >= 0:
            os.write(options.ready_fd, announcement.encode(self.announcement).encode() + b"\n")
            os.close(options.ready_fd)
        while self._running:
            self.reactor.run_once(1.0)
        if announcer is not None:
            announcer.stop()
        self.close()
        return self._exit_code

    def close(self) -> None:
        """Close everything."""
        for listener in self._listeners:
            listener.close()
        self._folder.stop()
        for transport in self._transports.values():
            if hasattr(transport, "close"):
                transport.close()
        self.reactor.stop()
        self._arena.close()

    # ---- the end

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reactor.call(self._told, signal.Signals(number).name)

    def _told(self, reason: str) -> None:
        if self._signalled:
            log.info("ending at once: a second %s", reason)
            self._running = False
        self._signalled = True
        self._drain(reason)

    def _gone(self, reason: str, failed: bool) -> None:
        """The job's store has gone, or (`failed`) was never found."""
        if failed:
            log.error("%s", reason)
            self._exit_code = 1
        self._drain(reason)

    def _drain(self, reason: str) -> None:
        if self._draining:
            return
        self._draining = True
        for listener in self._listeners:
            listener.close()
        log.info("draining: %s", reason)
        self.reactor.call_later(self.options.drain_timeout, self._end)
        self._look()

    def _look(self) -> None:
        """While draining: end as soon as nobody is connected any more."""
        if self._draining and not self.service.membership.processes:
            self.reactor.call_later(0.05, self._end)  # the last Bye is still on its way out

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        owed = "" if self.service.is_idle() else "; results that nobody came for are dropped"
        self.service.end("it was told to end")
        log.info("ended%s", owed)
        self.reactor.call_later(0.1, self._stop)  # the goodbyes still have to leave

    def _stop(self) -> None:
        self._running = False

    def _watch_parent(self, pid: int) -> None:
        """End when the process that started this server ends, however it ends."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            self._poll_parent(pid)  # no pidfd here (old kernel, sandbox), or it has gone already
            return
        self.reactor.add(fd, select.EPOLLIN, lambda events: self._parent_gone(fd))
        if os.getppid() != pid:
            self._parent_gone(fd)

    def _parent_gone(self, fd: int) -> None:
        self.reactor.remove(fd)
        os.close(fd)
        log.info("the rank that started this server has gone")
        self._running = False

    def _poll_parent(self, pid: int) -> None:
        if os.getppid() != pid:
            self._running = False
        else:
            self.reactor.call_later(0.5, lambda: self._poll_parent(pid))


def _check(options: argparse.Namespace) -> None:
    for option, value, low, high in (
        ("--port", options.port, 0, 65534),  # PORT+1 is for data
        ("--threads", options.threads, 0, 64),
        ("--rdzv-timeout", options.rdzv_timeout, 0, 1e9),
        ("--drain-timeout", options.drain_timeout, 0, 1e9),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} {value} is out of range", hint=f"allowed: {low} to {high:g}")


def _hosts(text: str, config: Config, endpoint: tuple[str, int] | None) -> list[str]:
    """Return the addresses to listen at; control at the first."""
    hosts = [part.strip() for part in text.split(",") if part.strip()]
    hosts = hosts or [interface.address for interface in interfaces.find(config.interfaces)]
    return hosts or [_address_towards(*endpoint) if endpoint else "127.0.0.1"]


def _address_towards(host: str, port: int) -> str:
    try:
        return topology.address_towards(host, port)
    except ConfigError as error:
        raise ConfigError(error.what, hint="check --rdzv-endpoint") from None


def _endpoint(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    try:
        return topology.split_address(text)
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint: {error}", hint="give the one that torchrun has") from None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s byteps server %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    if options.parent and not options.verbose:
        logging.getLogger().setLevel(logging.WARNING)
    try:
        reducer.limit_threads()
        config = Config.load()
        server = Server(options, config)
    except BytePSError as error:
        print(f"byteps server: {error}", file=sys.stderr)
        return 2
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
