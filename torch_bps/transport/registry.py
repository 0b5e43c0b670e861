"""Which transports there are, and which one a client takes of those that a service offers.

Adding a transport: one file, one line in _TRANSPORTS.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from torch_bps.errors import ConfigError
from torch_bps.interfaces import Interface
from torch_bps.transport.arena import Arena
from torch_bps.transport.memory import Pool

_TRANSPORTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "tcp": ("torch_bps.transport.tcp:TcpTransport", ("pool", "socket_buffer_nbytes", "silence_s", "interfaces")),
    "shm": ("torch_bps.transport.shm:ShmTransport", ("arena",)),
    "zmq": ("torch_bps.transport.zmq:ZmqTransport", ()),
}
"""scheme -> class, and what its constructor takes"""
SCHEMES: Final = tuple(_TRANSPORTS)
_PREFERENCE: Final = ("shm", "tcp", "zmq")


def make(
    scheme: str,
    arena: Arena,
    *,
    socket_buffer_nbytes: int = 0,
    silence_s: float = 0.0,
    interfaces: Sequence[Interface] = (),
) -> Any:
    """Return a new transport (transport.base.Transport, with `close` where there is something to close).

    Args:
        arena: where shm keeps what it sends.
        socket_buffer_nbytes, silence_s, interfaces: for tcp.
    """
    given = {
        "arena": arena,
        "pool": Pool(),
        "socket_buffer_nbytes": socket_buffer_nbytes,
        "silence_s": silence_s,
        "interfaces": interfaces,
    }
    path, names = _TRANSPORTS[scheme]
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)(*(given[name] for name in names))


def scheme_of(address: str) -> str:
    """Return "tcp" of "tcp://host:port". Raises ConfigError."""
    scheme, separator, rest = address.partition("://")
    if not separator or not rest:
        raise ConfigError(f"{address!r} is no address", hint="addresses look like tcp://host:port")
    return scheme


def choose(wanted: str, offered: Sequence[str], same_node: bool) -> tuple[list[str], str]:
    """Return the addresses to use, several where a server has as many interfaces, and the sentence that says why.

    Args:
        wanted: auto, or the scheme that the user asks for (BYTEPS_TRANSPORT).
        offered: the service's addresses.
        same_node: whether the service is on this host, so that shared memory works.

    Raises:
        ConfigError: what is wanted is not offered.
    """
    by_scheme: dict[str, list[str]] = {}
    for address in offered:
        by_scheme.setdefault(scheme_of(address), []).append(address)
    if wanted != "auto":
        if wanted == "shm" and not same_node:
            raise ConfigError("BYTEPS_TRANSPORT=shm, but the server is on another node", hint="use auto or tcp")
        if wanted not in by_scheme:
            raise ConfigError(
                f"BYTEPS_TRANSPORT={wanted} is not offered by the server",
                hint=f"it offers {', '.join(sorted(by_scheme)) or 'nothing'}",
            )
        return by_scheme[wanted], f"BYTEPS_TRANSPORT={wanted}"
    for scheme in _PREFERENCE:
        if scheme in by_scheme and (scheme != "shm" or same_node):
            where = "on this node" if same_node else "on another node"
            return by_scheme[scheme], f"{scheme}, the fastest for a server {where}"
    raise ConfigError(f"the server offers no transport that this version knows: {', '.join(offered) or 'none'}")
