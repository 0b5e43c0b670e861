"""Tells a job where a dedicated server is: joins the Store that torchrun runs, writes the server's address there.

The only part of a server that needs torch (for the Store's protocol), imported when `--rdzv-endpoint` is given.

    endpoint ─┬─ is the job's own store (static rendezvous, env://): write there
              └─ is a c10d rendezvous store: PrefixStore("torch.rendezvous.{id}.{round}") holds MASTER_ADDR and
                 MASTER_PORT of the job's store; rounds are counted from 0

The address goes under "byteps/server/{i}", i from the counter "byteps/servers"; rank 0 reads them (core.rendezvous).
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch_bps.config import quiet_torch
from torch_bps.errors import ConfigError
from torch_bps.topology import join_address
from torch_bps.wire import announcement

log = logging.getLogger("torch_bps.server")

_POLL_S = 0.2
_SAY_EVERY_S = 5.0
_CONNECT_TIMEOUT_S = 2.0


class Announcer:
    """A thread that writes the address into every store of the job it finds, until stopped.

    Args:
        endpoint: "host:port" of torchrun's --rdzv-endpoint (or MASTER_ADDR:MASTER_PORT).
        run_id: torchrun's --rdzv-id.
        text: what to write (wire.announcement).
        on_gone: called once, in this thread: `on_gone(reason, failed)`. Not failed: a store that was there has gone,
            so the job has ended.
        timeout_s: give up when no store was found for so long.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        run_id: str,
        text: str,
        on_gone: Callable[[str, bool], None],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._text = text
        self._on_gone = on_gone
        self._timeout_s = timeout_s
        self._give_up_s = time.monotonic() + timeout_s
        self._stopped, self._stop = socket.socketpair()
        self._written: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name="byteps-announce", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End and join the thread."""
        self._stop.close()
        self._thread.join(10.0)

    def _run(self) -> None:
        where = join_address(*self._endpoint)
        try:
            line = self._find(where)
            if line is None:
                return
            with line:
                told = self._serve(line)
            if not told:
                self._on_gone(f"the job has ended (its store at {where} has gone)", False)
        except TimeoutError as error:
            self._on_gone(str(error), True)
        except Exception as error:
            log.exception("the announcer failed")
            self._on_gone(f"the announcer failed: {error}", True)
        finally:
            self._stopped.close()

    def _find(self, where: str) -> socket.socket | None:
        """Wait for somebody to listen at the endpoint; returns a connection, None when told to stop."""
        said_s = time.monotonic()
        while (line := _dial(*self._endpoint)) is None:
            now_s = time.monotonic()
            if now_s > self._give_up_s:
                raise TimeoutError(f"no job's store at {where} within {self._timeout_s:g} s")
            if now_s - said_s > _SAY_EVERY_S:
                said_s = now_s
                log.info("waiting for a store at %s", where)
            if select.select([self._stopped], [], [], _POLL_S)[0]:
                return None
        return line

    def _serve(self, line: socket.socket) -> bool:
        """Announce to each new round until the store has gone; returns whether it was told to stop instead.

        `line` is a connection that nothing is said on: its end is the store's. A call that fails may be a slow store.
        """
        store = None
        while True:
            ready, _, _ = select.select([self._stopped, line], [], [], _POLL_S)
            if ready:
                return self._stopped in ready
            try:
                store = store or _store(*self._endpoint)
                if store is not None:
                    self._announce(store)
                elif not self._written and time.monotonic() > self._give_up_s:
                    raise TimeoutError(f"what listens at {join_address(*self._endpoint)} is no torch Store")
            except RuntimeError as error:  # torch's DistError and its kin
                log.debug("a store failed: %s", error)
                store = None

    def _announce(self, store: Any) -> None:
        """Write the address to the endpoint's store and to the store that its newest rendezvous round names."""
        from torch._C import _distributed_c10d as c10d

        targets: dict[tuple[str, int], Any] = {self._endpoint: store}
        for number in range(1000):
            round_store: Any = c10d.PrefixStore(f"torch.rendezvous.{self._run_id}.{number}", store)
            if not round_store.check(["MASTER_ADDR"]) or not round_store.check(["MASTER_PORT"]):
                break
            host = round_store.get("MASTER_ADDR").decode()
            port = int(round_store.get("MASTER_PORT").decode())
            targets[(host, port)] = None
        for address, target in targets.items():
            if address in self._written:
                continue
            if target is None:
                # a name such as "localhost" may only mean something on rank 0's machine, which is the endpoint's
                target = _store(*address) or _store(self._endpoint[0], address[1])
            if target is None:
                continue
            number = target.add(announcement.COUNTER, 1) - 1
            target.set(announcement.key(number), self._text)
            self._written.add(address)
            log.info("announced at %s:%s as server %d", *address, number)
            if len(targets) == 1:
                log.info(
                    "no job of --rdzv-id %s there yet: look at the id, unless the rendezvous is static",
                    self._run_id,
                )


def _dial(host: str, port: int) -> socket.socket | None:
    """Return a connection, None if nobody listens there."""
    try:
        line = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
    except OSError:
        return None
    if line.getsockname() == line.getpeername():  # the kernel chose the very port that we asked for: nobody listens
        line.close()
        return None
    return line


def _store(host: str, port: int) -> Any:
    """Return a client of the store there, None if there is none."""
    from torch._C import _distributed_c10d as c10d

    line = _dial(host, port)  # torch would take two seconds to say that nobody listens
    if line is None:
        return None
    line.close()
    try:
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        return c10d.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    except RuntimeError:
        return None


def require_torch() -> None:
    """Import torch. Raises ConfigError when it is missing: --rdzv-endpoint needs it."""
    quiet_torch()
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--rdzv-endpoint needs torch for the Store's protocol: {error}",
            hint="pip install torch, or list this server in BYTEPS_SERVERS at the workers",
        ) from None
