"""This host's network interfaces: those that BYTEPS_INTERFACE lists, and their addresses. Called by core and server."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from torch_bps.errors import ConfigError

_SIOCGIFADDR: Final = 0x8915
_GLOBAL_SCOPES: Final = ("00", "10")  # in /proc/net/if_inet6; the second is loopback's
_DOWN: Final = ("down", "lowerlayerdown", "notpresent")  # "unknown" is what drivers without a carrier say


class Interface(NamedTuple):
    """An interface that is up, and its addresses ("" where it has none of that family)."""

    name: str
    ipv4: str
    ipv6: str

    @property
    def address(self) -> str:
        """The one that others are told."""
        return self.ipv4 or self.ipv6

    def address_of(self, family: int) -> str:
        """Return the address of socket.AF_INET or AF_INET6, "" if it has none."""
        return self.ipv6 if family == socket.AF_INET6 else self.ipv4


def names() -> list[str]:
    """Return the names of all interfaces."""
    return [name for _, name in socket.if_nameindex()]


def find(wanted: Sequence[str], root: str = "/") -> list[Interface]:
    """Return the interfaces that BYTEPS_INTERFACE lists.

    Args:
        root: of the file system, for tests.

    Raises:
        ConfigError: one stands there twice, does not exist, is down, or has no address.
    """
    known = names()
    found: list[Interface] = []
    for name in wanted:
        what = f"BYTEPS_INTERFACE={','.join(wanted)!r}: {name}"
        if name not in known:
            raise ConfigError(f"{what} is no network interface", hint=f"this host has {', '.join(known)}")
        if any(name == other.name for other in found):
            raise ConfigError(f"{what} stands there twice", hint="BYTEPS_LANES=4 gives two interfaces two lanes each")
        if (state := _state(name, root)) in _DOWN:
            raise ConfigError(f"{what} is down ({state})", hint=f"ip link set {name} up, or name another interface")
        interface = Interface(name, _ipv4(name), _ipv6(name, root))
        if not interface.address:
            raise ConfigError(f"{what} has no address", hint="give it one, or name another interface")
        found.append(interface)
    return found


def holding(addresses: Sequence[str], root: str = "/") -> list[str]:
    """Return the names of the interfaces that have one of these addresses."""
    return [name for name in names() if _ipv4(name) in addresses or _ipv6(name, root) in addresses]


def _state(name: str, root: str) -> str:
    """Return the kernel's operational state; "" where there is no /sys of this network namespace."""
    try:
        return Path(root, "sys/class/net", name, "operstate").read_text().strip()
    except OSError:
        return ""


def _ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(name: str, root: str) -> str:
    try:
        lines = Path(root, "proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope in _GLOBAL_SCOPES:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""
