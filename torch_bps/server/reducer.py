"""Adds what was pushed. Called by server.service, from whichever thread runs the adds of a slot.

    Accumulator(dtype, redop, out) ──> fold([a, b], ..) ──> fold([c], ..) ──> finish(divisor)      `out` is the result

numpy does the work. float16 and bfloat16 are summed in float32 and rounded once; they go through torch where it can be
imported (numpy is 2 to 10 times slower), in blocks below torch's threshold for OpenMP that also stay in cache.
Integers wrap, as torch's do. AVG divides once, at the end: floats truly, integers toward zero.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torch_bps.wire.dtypes import AVG, BAND, BOR, BXOR, DTYPES, HALF_CODES, MAX, MIN, PREMUL_SUM, PRODUCT, SUM
from torch_bps.wire.reductions import check

_Array = NDArray[Any]

_BLOCK: Final = 32768
"""elements; torch starts OpenMP threads above this"""

_UFUNC: Final[dict[int, np.ufunc]] = {
    SUM: np.add,
    AVG: np.add,
    PREMUL_SUM: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}
_BOOL_UFUNC: Final[dict[int, np.ufunc]] = {
    SUM: np.logical_or,
    MAX: np.logical_or,
    BOR: np.logical_or,
    PRODUCT: np.logical_and,
    MIN: np.logical_and,
    BAND: np.logical_and,
    BXOR: np.logical_xor,
}
_TORCH_NAME: Final = {
    SUM: "add",
    AVG: "add",
    PREMUL_SUM: "add",
    PRODUCT: "mul",
    MIN: "minimum",
    MAX: "maximum",
}
_HALF_NAME: Final = {code: DTYPES[code].name for code in HALF_CODES}
_NUMPY: Final = tuple(
    np.dtype(np.uint16 if dtype.name == "bfloat16" else np.uint8 if dtype.name == "raw" else dtype.name)
    for dtype in DTYPES
)

_torch: ModuleType | None = None
_torch_sought = False
_single_threaded = False


def limit_threads() -> None:
    """Let torch, once it is loaded, add with one thread in this whole process: for a server, which has its own."""
    global _single_threaded
    _single_threaded = True
    if _torch is not None:
        _torch.set_num_threads(1)


def _load_torch() -> ModuleType | None:
    """Return torch, imported on first use; None where it is missing or broken."""
    global _torch, _torch_sought
    if not _torch_sought:
        try:
            import torch
        except (ImportError, OSError):
            _torch = None
        else:
            if _single_threaded:
                torch.set_num_threads(1)
            _torch = torch
        _torch_sought = True
    return _torch


class Accumulator:
    """The sum (or product, minimum ..) of one slot.

    Thread safety: one thread at a time.

    Args:
        dtype, redop: wire.dtypes codes; they must be `supported`.
        out: where the result goes: its nbytes, or those of the float32 sums with `keep32`. Any alignment.
        keep32: leave float32 sums of a half type, neither rounded nor divided.
    """

    __slots__ = ("_begun", "_dtype", "_keep32", "_out", "_redop", "_sums", "_ufunc")

    def __init__(self, dtype: int, redop: int, out: memoryview, keep32: bool = False) -> None:
        check(dtype, redop)
        self._dtype = dtype
        self._redop = redop
        self._out = out
        self._keep32 = keep32
        self._ufunc = (_BOOL_UFUNC if _NUMPY[dtype] == np.bool_ else _UFUNC)[redop]
        self._begun = False
        self._sums: _Array | None = None

    def fold(self, views: Sequence[memoryview], acc32: bool, last: bool = False) -> None:
        """Add the views in order; none of them is modified.

        Args:
            acc32: they are float32 partial sums of a half type.
            last: no fold comes after this one: lets two half inputs be added without float32 sums in between.
        """
        if not views or not self._out.nbytes:
            return
        half = self._dtype in HALF_CODES
        torch = _load_torch() if half and not acc32 else None
        if torch is not None and last and len(views) == 2 and not (self._begun or self._keep32 or self._redop == AVG):
            self._add_pair(torch, views[0], views[1])
            return
        sums = self._sums
        if sums is None:
            sums = self._sums = self._begin(half)
        if torch is not None:
            self._fold_torch(torch, views, sums)
            return
        if half and not acc32:
            load = _from_bfloat16 if _HALF_NAME[self._dtype] == "bfloat16" else _from_float16
            arrays = [np.frombuffer(view, _NUMPY[self._dtype]) for view in views]
            self._fold_numpy(arrays, sums, load)
        else:
            self._fold_numpy([np.frombuffer(view, sums.dtype) for view in views], sums, None)

    def finish(self, divisor: int) -> None:
        """Make `out` the result. AVG divides by `divisor`."""
        sums, self._sums = self._sums, None
        if sums is None or self._keep32:
            return
        if self._dtype not in HALF_CODES:
            if self._redop == AVG:
                _divide(sums, divisor)
            return
        torch = _load_torch()
        scale = float(divisor) if self._redop == AVG else None
        with np.errstate(all="ignore"):
            if torch is not None:
                out = _tensors(torch, self._out, _HALF_NAME[self._dtype])
                for block, target in zip(_split(torch.from_numpy(sums)), out, strict=True):
                    if scale is not None:
                        block.div_(scale)
                    target.copy_(block)
            else:
                if scale is not None:
                    np.divide(sums, scale, out=sums)
                result = np.frombuffer(self._out, _NUMPY[self._dtype])
                if _HALF_NAME[self._dtype] == "bfloat16":
                    _to_bfloat16(sums, result)
                else:
                    np.copyto(result, sums, casting="unsafe")
        _spare.put(sums)

    # ---- inside

    def _begin(self, half: bool) -> _Array:
        """Return the array that the sum grows in."""
        if not half:
            return np.frombuffer(self._out, _NUMPY[self._dtype])
        if self._keep32:
            return np.frombuffer(self._out, np.float32)
        return _spare.get(self._out.nbytes // 2)

    def _fold_numpy(self, arrays: Sequence[_Array], sums: _Array, load: Callable[[_Array], _Array] | None) -> None:
        ufunc = self._ufunc
        begun, self._begun = self._begun, True
        # two inputs stream through; more of them, or conversions, go block by block so that the sum stays in cache
        step = _BLOCK if load is not None or len(arrays) > 2 else sums.size
        with np.errstate(all="ignore"):
            for start in range(0, sums.size, step):
                total = sums[start : start + step]
                parts = [array[start : start + step] for array in arrays]
                if load is not None:
                    parts = [load(part) for part in parts]
                if begun:
                    ufunc(total, parts[0], out=total)
                elif len(parts) == 1:
                    np.copyto(total, parts[0])
                else:
                    ufunc(parts[0], parts[1], out=total)
                for part in parts[1 if begun else 2 :]:
                    ufunc(total, part, out=total)

    def _fold_torch(self, torch: ModuleType, views: Sequence[memoryview], sums: _Array) -> None:
        begun, self._begun = self._begun, True
        inputs = [_tensors(torch, view, _HALF_NAME[self._dtype]) for view in views]
        totals = _split(torch.from_numpy(sums))
        combine = getattr(torch, _TORCH_NAME[self._redop])
        for number, total in enumerate(totals):
            blocks = [blocks[number] for blocks in inputs]
            if not begun:
                total.copy_(blocks.pop(0))
            for block in blocks:
                combine(total, block, out=total)

    def _add_pair(self, torch: ModuleType, a: memoryview, b: memoryview) -> None:
        """Combine two half inputs: torch computes each element in float32 and rounds it once."""
        combine = getattr(torch, _TORCH_NAME[self._redop])
        blocks = [_tensors(torch, view, _HALF_NAME[self._dtype]) for view in (a, b, self._out)]
        for x, y, target in zip(*blocks, strict=True):
            combine(x, y, out=target)


def combine(dtype: int, redop: int, views: Sequence[memoryview], out: memoryview) -> None:
    """Make `out` the result of all `views`, in their order: what an Accumulator does, sooner where that is simple."""
    if dtype in HALF_CODES or redop == AVG or len(views) != 2:
        accumulator = Accumulator(dtype, redop, out)
        accumulator.fold(views, False, True)
        accumulator.finish(len(views))
        return
    kind = _NUMPY[dtype]
    ufunc = (_BOOL_UFUNC if kind == np.bool_ else _UFUNC)[redop]
    first, second = views
    with np.errstate(all="ignore"):
        ufunc(np.frombuffer(first, kind), np.frombuffer(second, kind), out=np.frombuffer(out, kind))


class _Spare:
    """Float32 arrays to sum halves in, kept for the next slot of that size: fresh pages cost more than the add.

    Thread safety: any thread.
    """

    _KEPT: Final = 16
    _LARGEST_NBYTES: Final = 8 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Array] = []

    def get(self, size: int) -> _Array:
        """Return an array of `size` elements, not zeroed."""
        with self._lock:
            for position in range(len(self._free) - 1, -1, -1):
                if self._free[position].size == size:
                    return self._free.pop(position)
        return np.empty(size, np.float32)

    def put(self, array: _Array) -> None:
        """Take an array back."""
        if array.nbytes <= self._LARGEST_NBYTES:
            with self._lock:
                self._free.append(array)
                if len(self._free) > self._KEPT:
                    del self._free[0]


_spare = _Spare()


def _tensors(torch: ModuleType, view: memoryview, name: str) -> Any:
    """Return a view's blocks as tensors. torch warns about read-only memory, so that is given to it as an address."""
    source: object = view
    if view.readonly:
        source = (ctypes.c_char * view.nbytes).from_address(np.frombuffer(view, np.uint8).ctypes.data)
    return _split(torch.frombuffer(source, dtype=getattr(torch, name)))


def _split(tensor: Any) -> Any:
    return tensor.split(_BLOCK) if tensor.numel() > _BLOCK else (tensor,)


def _divide(sums: _Array, divisor: int) -> None:
    """Divide in place: floats truly (complex by part), integers toward zero."""
    if sums.dtype.kind == "c":
        sums = sums.view(np.float32 if sums.dtype == np.complex64 else np.float64)
    if sums.dtype.kind == "f":
        with np.errstate(all="ignore"):
            np.divide(sums, sums.dtype.type(divisor), out=sums)
        return
    # in 64 bits: the divisor may be more than the dtype holds
    wide: _Array = sums if sums.dtype.itemsize == 8 else sums.astype(np.int64)
    quotient = wide // wide.dtype.type(divisor)
    if wide.dtype.kind == "i":
        quotient += (wide < 0) & (quotient * divisor != wide)
    np.copyto(sums, quotient, casting="unsafe")


def _from_float16(array: _Array) -> _Array:
    return array.astype(np.float32)


def _from_bfloat16(array: _Array) -> _Array:
    wide = array.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _to_bfloat16(sums: _Array, result: _Array) -> None:
    """Round to nearest, ties to even; a NaN stays one."""
    for start in range(0, sums.size, _BLOCK):
        block = sums[start : start + _BLOCK]
        bits = block.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        rounded[np.isnan(block)] = 0x7FC0
        np.copyto(result[start : start + _BLOCK], rounded, casting="unsafe")
