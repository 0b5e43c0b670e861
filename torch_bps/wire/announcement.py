"""How a dedicated server is written down in a job's Store: one counter, one JSON text a server."""

from __future__ import annotations

import msgspec

from torch_bps.errors import ProtocolError

COUNTER = "byteps/servers"


def key(number: int) -> str:
    """Return the key of the `number`-th announced server."""
    return f"byteps/server/{number}"


class Announcement(msgspec.Struct, frozen=True):
    """One server: the control address, its process's uuid, where it runs."""

    address: str
    service: str
    host: str


def encode(value: Announcement) -> str:
    """Return the text."""
    return msgspec.json.encode(value).decode()


def decode(text: bytes | str) -> Announcement:
    """Return the announcement. Raises ProtocolError for anything else."""
    try:
        return msgspec.json.decode(text, type=Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed server announcement {text[:80]!r}: {error}") from None
