"""What is said and remembered about operations that fail. Called by core.client."""

from __future__ import annotations

from typing import Final, TypeVar

from torch_bps.core.flight import Flight, FlightId
from torch_bps.errors import BytePSError, ClosedError, MismatchError, PeerLostError

_REMEMBERED: Final = 4096
_V = TypeVar("_V")

HINTS: Final[dict[type[BytePSError], str]] = {
    MismatchError: "all ranks of a group must call the same collectives in the same order with the same sizes",
    PeerLostError: "look at that rank's own output for the first error",
    ClosedError: "",
}


def remember(memory: dict[FlightId, _V], flight_id: FlightId, value: _V) -> None:
    """Put it into the dict and forget the oldest beyond a bound."""
    memory[flight_id] = value
    if len(memory) > _REMEMBERED:
        del memory[next(iter(memory))]


def missing_text(flight: Flight) -> str:
    """Return ", waiting for ranks 1, 3", "" if nobody is known to be missing."""
    if not flight.missing:
        return ""
    kind = "ranks" if flight.operation is not None else "nodes"  # an uplink: a node's sum on its way
    return f", waiting for {kind} {', '.join(map(str, flight.missing))}"


def named(error: BytePSError, flight: Flight, who: str) -> BytePSError:
    """Return the error with this rank, the group and the operation as facts."""
    return error.with_facts(rank=who, group=flight.group.name, operation=f"{flight.label} #{flight.id[2]}")
