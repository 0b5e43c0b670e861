"""Which reduce kinds work on which dtype: the table for backend, engine (refuses frames) and reducer. Pure."""

from __future__ import annotations

from typing import Final

from torch_bps.errors import UnsupportedError
from torch_bps.wire.dtypes import (
    AVG,
    BAND,
    BOR,
    BXOR,
    DTYPES,
    MAX,
    MIN,
    PREMUL_SUM,
    PRODUCT,
    REDUCE_KINDS,
    SUM,
)

_FIELD = (SUM, AVG, PRODUCT, PREMUL_SUM)
_ORDERED = (*_FIELD, MIN, MAX)
_INTEGER = (*_ORDERED, BAND, BOR, BXOR)


def _kinds(name: str) -> frozenset[int]:
    if name == "raw":
        return frozenset()
    if name == "bool":
        return frozenset(_INTEGER) - {AVG, PREMUL_SUM}
    if name.startswith("complex"):
        return frozenset(_FIELD)
    return frozenset(_ORDERED if "float" in name else _INTEGER)


KINDS: Final[tuple[frozenset[int], ...]] = tuple(_kinds(dtype.name) for dtype in DTYPES)
"""By dtype code: the reduce kinds that work."""


def supported(dtype: int, redop: int) -> bool:
    """Return whether elements of `dtype` can be combined with `redop`; False for codes that do not exist."""
    return 0 <= dtype < len(KINDS) and redop in KINDS[dtype]


def check(dtype: int, redop: int, what: str = "") -> None:
    """Raise UnsupportedError unless `supported`; `what` ("all_reduce: ") begins its message."""
    if supported(dtype, redop):
        return
    kind = REDUCE_KINDS[redop] if 0 <= redop < len(REDUCE_KINDS) else f"reduce kind {redop}"
    if not 0 <= dtype < len(DTYPES):
        raise UnsupportedError(f"{what}{kind} of dtype code {dtype}: there is no such dtype")
    name = DTYPES[dtype].name
    works = ", ".join(REDUCE_KINDS[code] for code in sorted(KINDS[dtype]))
    raise UnsupportedError(
        f"{what}{kind} of {name} is not possible",
        hint=f"{name} has {works}" if works else f"{name} can only be moved, not reduced",
    )
