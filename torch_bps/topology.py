"""Where this process runs: which host it is on, which of its addresses reach the others. Called by core and server."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from torch_bps.errors import ConfigError


def node_identity(override: str = "", root: str = "/") -> str:
    """Return a text that exactly the processes share that can reach each other's shared memory.

    The kernel's boot id and the network namespace: abstract unix sockets, over which memory is handed on, live in the
    latter. Host names and LOCAL_RANK say neither in containers.

    Args:
        override: BYTEPS_NODE_ID.
        root: of the file system, for tests.
    """
    if override:
        return f"id:{override}"
    try:
        boot = Path(root, "proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat(Path(root, "proc/self/ns/net")).st_ino
    except OSError:
        return f"host:{socket.gethostname()}"
    return f"{boot}/{namespace}"


def host_label() -> str:
    """Return the host's name, for messages only."""
    return socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """Return this host's address that the kernel would use to reach `host`; sends nothing.

    A wildcard is never returned; loopback only where `host` is loopback or has no route.

    Raises:
        ConfigError: `host` cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"the host {host!r} cannot be resolved: {error}", hint="check MASTER_ADDR") from None
    for family, kind, proto, _, address in found:
        with socket.socket(family, kind, proto) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            if own not in ("0.0.0.0", "::"):
                return own
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether other hosts cannot reach this address."""
    return address.startswith("127.") or address in ("::1", "localhost")


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """Return (host, port) of "host:port" or "[ipv6]:port".

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and "[" not in host:
        raise ValueError(f"{text!r}: an IPv6 address needs brackets, [{host}]:{port}")
    if not colon or not host or "[" in host:
        raise ValueError(f"{text!r} is no HOST:PORT")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 65536:
        raise ValueError(f"{text!r}: {port!r} is no port")
    return host, int(port)
