"""torch's dtypes and ReduceOps as the codes of wire.dtypes.

Called by collectives, before anything is sent.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from torch_bps.errors import UnsupportedError
from torch_bps.wire import dtypes
from torch_bps.wire.dtypes import DTYPES, RAW, REDUCE_KINDS
from torch_bps.wire.reductions import check

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
    if code == RAW:
        raise UnsupportedError(
            f"{name}: {REDUCE_KINDS[kind]} of {name_of(dtype)} is not possible",
            hint="convert the tensor: this dtype can only be moved, not reduced",
        )
    check(code, kind, f"{name}: ")
    return code
