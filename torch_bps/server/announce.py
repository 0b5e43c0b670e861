"""Tells a job where a dedicated server is: joins the Store that torchrun runs, writes the server's address there.

The only part of a server that needs torch (for the Store's protocol), imported when `--rdzv-endpoint` is given.

    endpoint ─┬─ is the job's own store (static rendezvous, env://): write there
              └─ is a c10d rendezvous store: PrefixStore("torch.rendezvous.{id}.{round}") holds MASTER_ADDR and
                 MASTER_PORT of the job's store; rounds are counted from 0

The address goes under "byteps/server/{i}", i from the counter "byteps/servers"; rank 0 reads them (core.rendezvous).
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any

from torch_bps.errors import ConfigError
from torch_bps.wire import announcement

log = logging.getLogger("torch_bps.server")

_POLL_S = 0.5
_GONE_AFTER_S = 5.0


class Announcer:
    """A thread that writes the address into every store of the job it finds, until stopped.

    Args:
        endpoint: "host:port" of torchrun's --rdzv-endpoint (or MASTER_ADDR:MASTER_PORT).
        run_id: torchrun's --rdzv-id.
        text: what to write (wire.announcement).
        on_gone: called once, in this thread, when a store that was there has gone: the job has ended.
        timeout_s: give up (and call on_gone) when no store was found for so long.
    """

    def __init__(self, endpoint: tuple[str, int], run_id: str, text: str, on_gone: Any, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._text = text
        self._on_gone = on_gone
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        self._written: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name="byteps-announce", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End and join the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def _run(self) -> None:
        reason = f"no job's store at {self._endpoint[0]}:{self._endpoint[1]} within {self._timeout_s:g} s"
        try:
            give_up_s = time.monotonic() + self._timeout_s
            store: Any = None
            said_s = time.monotonic()
            while not self._stop.wait(_POLL_S):
                now_s = time.monotonic()
                if store is None:
                    store = _connect(*self._endpoint)
                    if store is None and now_s > give_up_s:
                        break
                    if store is None and now_s - said_s > 5.0:
                        said_s = now_s
                        log.info("waiting for a store at %s:%s", *self._endpoint)
                    if store is not None:
                        log.info("found a store at %s:%s", *self._endpoint)
                    continue
                try:
                    self._announce(store)
                except RuntimeError as error:  # torch's DistError and its kin: the store has gone
                    reason = f"the store at {self._endpoint[0]}:{self._endpoint[1]} has gone ({_first_line(error)})"
                    break
            else:
                return
        except Exception as error:
            log.exception("the announcer failed")
            reason = str(error)
        self._on_gone(reason)

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
                target = _connect(*address) or _connect(self._endpoint[0], address[1])
            if target is None:
                continue
            number = target.add(announcement.COUNTER, 1) - 1
            target.set(announcement.key(number), self._text)
            self._written.add(address)
            log.info("announced at %s:%s as server %d", *address, number)


def _connect(host: str, port: int) -> Any:
    from torch._C import _distributed_c10d as c10d

    try:
        return c10d.TCPStore(host, port, None, False, timeout=timedelta(seconds=2), wait_for_workers=False)
    except RuntimeError:
        return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def require_torch() -> None:
    """Raise ConfigError when torch is missing: --rdzv-endpoint needs it."""
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--rdzv-endpoint needs torch for the Store's protocol: {error}",
            hint="pip install torch, or list this server in BYTEPS_SERVERS at the workers",
        ) from None
