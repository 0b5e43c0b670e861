"""Codes for element types and reduce kinds, as they stand in a frame header.

Called by the backend (from torch dtypes), the engine (to compare), the reducer (to add). Must not import torch.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class DType(NamedTuple):
    """One element type: its code on the wire, torch's name for it, and its size."""

    code: int
    name: str
    itemsize: int


DTYPES: Final[tuple[DType, ...]] = tuple(
    DType(code, name, itemsize)
    for code, (name, itemsize) in enumerate(
        (
            ("raw", 1),  # bytes of a dtype that only moves (float8, quantised, ...)
            ("uint8", 1),
            ("int8", 1),
            ("int16", 2),
            ("int32", 4),
            ("int64", 8),
            ("bool", 1),
            ("float16", 2),
            ("bfloat16", 2),
            ("float32", 4),
            ("float64", 8),
            ("complex64", 8),
            ("complex128", 16),
            ("uint16", 2),
            ("uint32", 4),
            ("uint64", 8),
        )
    )
)
DTYPE_BY_NAME: Final[dict[str, DType]] = {dtype.name: dtype for dtype in DTYPES}
RAW: Final[int] = DTYPE_BY_NAME["raw"].code
HALF_CODES: Final[frozenset[int]] = frozenset((DTYPE_BY_NAME["float16"].code, DTYPE_BY_NAME["bfloat16"].code))
"""Types that are accumulated in float32 and rounded once."""

REDUCE_KINDS: Final[tuple[str, ...]] = (
    "none",
    "SUM",
    "AVG",
    "PRODUCT",
    "MIN",
    "MAX",
    "BAND",
    "BOR",
    "BXOR",
    "PREMUL_SUM",  # each rank has multiplied its own input already: adds like SUM, compared as its own kind
)
NONE, SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(len(REDUCE_KINDS))


def accumulated_nbytes(dtype: int, nbytes: int) -> int:
    """Return the size of the float32 partial sum of `nbytes` of `dtype` (the same size unless it is a half type)."""
    return nbytes * 2 if dtype in HALF_CODES else nbytes
