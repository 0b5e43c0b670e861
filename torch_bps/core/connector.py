"""Connects this process to services and joins groups there, for threads that block until it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from torch_bps.config import Config
from torch_bps.core.client import Client
from torch_bps.core.link import Link
from torch_bps.core.waiting import Waiting
from torch_bps.errors import PeerLostError
from torch_bps.transport.base import Reactor, Transport
from torch_bps.wire import control

log = logging.getLogger("torch_bps.core")

_CONNECT_RETRY_S = 0.2


class Connector:
    """Makes links; they are kept in client.links, one an address, for all groups.

    Thread safety: `connect` and `join` from any thread but the IO thread.
    """

    def __init__(
        self,
        reactor: Reactor,
        transports: dict[str, Transport],
        client: Client,
        hello: control.Hello,
        config: Config,
        node: str,
    ) -> None:
        self._reactor = reactor
        self._transports = transports
        self._client = client
        self._hello = hello
        self._config = config
        self._node = node

    def connect(
        self,
        addresses: Iterable[str],
        deadline_s: float,
        names: dict[str, str] | None = None,
        retry: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> list[Link]:
        """Return a ready link to each address, connecting to those that are new.

        Args:
            addresses: may repeat.
            deadline_s: time.monotonic() by when all must be up.
            names: of addresses, for messages.
            retry: try again when a connection is refused: the service may be starting.
            check: called now and then; raises if there is no use in waiting on.

        Raises:
            OperationTimeout, PeerLostError, VersionError: the first that failed.
        """
        addresses = list(addresses)
        said_s = time.monotonic() + 5.0
        while True:
            waiting = Waiting(len(set(addresses)))
            self._reactor.call(self._start_links, list(dict.fromkeys(addresses)), names or {}, waiting)
            waiting.wait(deadline_s, waiting.servers_up, check)
            if waiting.error is None:
                return [self._client.links[address] for address in addresses]
            now_s = time.monotonic()
            refused = isinstance(waiting.error, PeerLostError)
            if refused:
                check()
            if not retry or not refused or now_s + _CONNECT_RETRY_S > deadline_s:
                raise waiting.error
            if now_s > said_s:
                said_s = now_s + 5.0
                log.warning("%s (%s)", waiting.servers_up(), waiting.error.what)
            time.sleep(_CONNECT_RETRY_S)

    def _start_links(self, addresses: list[str], names: dict[str, str], waiting: Waiting) -> None:
        for address in addresses:
            link = self._client.links.get(address)
            if link is not None and link.ready:
                waiting.one(None)
                continue
            single = address.startswith(("shm:", "inproc:"))
            if link is None:
                link = Link(
                    self._reactor,
                    self._transports,
                    self._client,
                    self._hello,
                    address,
                    name=self._client.who if address == "inproc://self" else names.get(address, ""),
                    wanted=self._config.transport,
                    lanes=max(self._config.lanes, len(self._config.interfaces)),
                    single=single,
                    node=self._node,
                )
                self._client.links[address] = link
            link.when_ready(waiting.one)

    def join(
        self, joins: Sequence[tuple[Link, control.Join]], deadline_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Join a group at its services. Raises what one of them answers; `check` as for connect."""
        waiting = Waiting(len(joins))

        def start() -> None:
            for link, message in joins:
                link.join(message, waiting.one)

        self._reactor.call(start)
        waiting.wait(deadline_s, lambda: f"waiting for {waiting.total - waiting.done} services to answer a join", check)
        if waiting.error is not None:
            raise waiting.error
