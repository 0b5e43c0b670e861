"""The rows of the table and how they are printed: the columns and rates of nccl-tests. Pure.

algbw = size / time. busbw = algbw x the factor below: comparable with a link's rate, whatever the number of ranks, see
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
CPU = processor time of a rank's process, not of servers, for each GB of the size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bus_factor(collective: str, size: int) -> float:
    """Return busbw / algbw for `size` ranks."""
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    return 1.0 if collective == "broadcast" else (size - 1) / size


def nbytes_of(text: str) -> int:
    """Return 65536 of "64K". Raises ValueError."""
    unit = text[-1:].upper()
    number = text[:-1] if unit in "KMG" and unit else text
    value = int(number) * _UNITS[unit if number != text else ""]
    if value < 0:
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class Row:
    """One size on one backend.

    Args:
        nbytes: of the whole operation, as in nccl-tests (for all_gather the output, for reduce_scatter the input).
        seconds: median of the slowest rank.
        limit_s: what it cannot take less than (0: not known).
        wrong: elements that were not what they should be, on all ranks.
        calls: how often a rank called it, after the warm-up.
        min_s, p99_s: the spread of its times, each the slowest rank's.
        user_s, system_s: processor time of a rank's process for a call, all its threads, mean of the ranks.
        retransmits: TCP segments sent again by the ranks' hosts while it was measured.
    """

    collective: str
    backend: str
    ranks: int
    nbytes: int
    count: int
    dtype: str
    redop: str
    seconds: float
    limit_s: float
    wrong: int
    calls: int = 0
    min_s: float = 0.0
    p99_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    retransmits: int = 0

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor seconds of a rank for each GB of the operation."""
        return (self.user_s + self.system_s) / self.nbytes * 1e9 if self.nbytes else 0.0

    @property
    def algbw(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """GB/s."""
        return self.algbw * bus_factor(self.collective, self.ranks)


_COLUMNS: Final = (
    "size",
    "count",
    "type",
    "redop",
    "backend",
    "time",
    "algbw",
    "busbw",
    "#wrong",
    "vs {0}",
    "vs limit",
    "CPU",
    "retrans",
)
_UNITS_LINE: Final = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "", "", "(s/GB)", "")
_WIDTHS: Final = (11, 11, 10, 6, 8, 11, 8, 8, 7, 8, 9, 7, 8)


def heading(peer: str) -> str:
    """Return the two lines above the rows; `peer` is the backend that others are compared with."""
    lines = ((name.format(peer) for name in _COLUMNS), _UNITS_LINE)
    return "\n".join("#" + _line(cells)[1:] for cells in lines)


def line(row: Row, peer: Row | None) -> str:
    """Return a row; `peer` is that of the backend to compare with, at the same size."""
    versus = f"{peer.seconds / row.seconds:.2f}x" if peer is not None and peer is not row else ""
    limit = f"{row.seconds / row.limit_s:.2f}x" if row.limit_s else ""
    return _line(
        (
            str(row.nbytes),
            str(row.count),
            row.dtype,
            row.redop,
            row.backend,
            f"{row.seconds * 1e6:.1f}",
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            str(row.wrong),
            versus,
            limit,
            f"{row.cpu_s_per_gb:.2f}",
            str(row.retransmits),
        )
    )


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows for a JSON file."""
    rates = ("algbw", "busbw", "cpu_s_per_gb")
    return [{**asdict(row), **{name: getattr(row, name) for name in rates}} for row in rows]


def _line(cells: Iterable[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
