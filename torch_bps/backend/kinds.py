"""torch's dtypes and ReduceOps as the codes of wire.dtypes, and which sums exist.

Called by collectives, before anything is sent.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from torch_bps.errors import UnsupportedError
from torch_bps.wire import dtypes
from torch_bps.wire.dtypes import DTYPE_BY_NAME, DTYPES, RAW, REDUCE_KINDS

_CODES: Final[dict[torch.dtype, int]] = {
    getattr(torch, dtype.name): dtype.code for dtype in DTYPES if dtype.code != RAW and hasattr(torch, dtype.name)
}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: DTYPES[code].name for dtype, code in _CODES.items()}
HALF_TYPES: Final = (torch.float16, torch.bfloat16)
_KINDS: Final = {
    dist.ReduceOp.SUM: dtypes.SUM,
    dist.ReduceOp.AVG: dtypes.AVG,
    dist.ReduceOp.PRODUCT: dtypes.PRODUCT,
    dist.ReduceOp.MIN: dtypes.MIN,
    dist.ReduceOp.MAX: dtypes.MAX,
    dist.ReduceOp.BAND: dtypes.BAND,
    dist.ReduceOp.BOR: dtypes.BOR,
    dist.ReduceOp.BXOR: dtypes.BXOR,
    dist.ReduceOp.PREMUL_SUM: dtypes.PREMUL_SUM,
}


def _supported() -> frozenset[tuple[int, int]]:
    """Return the pairs (reduce kind, dtype) that the reducer can do."""
    every = {dtype.code for dtype in DTYPES} - {RAW}
    bools = {DTYPE_BY_NAME["bool"].code}
    complexes = {DTYPE_BY_NAME["complex64"].code, DTYPE_BY_NAME["complex128"].code}
    floats = {DTYPE_BY_NAME[name].code for name in ("float16", "bfloat16", "float32", "float64")}
    by_kind = {
        dtypes.SUM: every,
        dtypes.PRODUCT: every,
        dtypes.AVG: every - bools,
        dtypes.PREMUL_SUM: every - bools,
        dtypes.MIN: every - complexes,
        dtypes.MAX: every - complexes,
        dtypes.BAND: every - complexes - floats,
        dtypes.BOR: every - complexes - floats,
        dtypes.BXOR: every - complexes - floats,
    }
    return frozenset((kind, code) for kind, codes in by_kind.items() for code in codes)


_SUPPORTED: Final = _supported()


def code_of(dtype: torch.dtype) -> int:
    """Return the wire code of `dtype`; RAW for those that only move."""
    return _CODES.get(dtype, RAW)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of `dtype` for messages."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def reduce_kind(op: dist.ReduceOp) -> tuple[int, float | torch.Tensor | None]:
    """Return the wire code of `op`, and the factor of a PREMUL_SUM."""
    state: Any = op.__getstate__()  # the only way to the factor, and quicker than `op.op`
    return _KINDS.get(state[0], dtypes.NONE), state[1]


def check_reduce(name: str, kind: int, dtype: torch.dtype) -> int:
    """Return the wire code of `dtype`.

    Raises:
        UnsupportedError: there is no such sum.
    """
    code = _CODES.get(dtype, RAW)
    if (kind, code) not in _SUPPORTED:
        raise UnsupportedError(
            f"{name}: {REDUCE_KINDS[kind]} of {name_of(dtype)} is not supported",
            hint="convert the tensor" if code == RAW else "use another ReduceOp, or convert the tensor",
        )
    return code
