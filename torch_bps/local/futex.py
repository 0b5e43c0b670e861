"""Sleeping until another process changes a word of shared memory, and waking those who sleep (futex(2)).

Python has no futex; a ctypes call of it costs about 1 us. Also a full memory fence.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from typing import Final

AVAILABLE: Final = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 1 << 32
"""Stores of one rank must be seen in their order by the others, which x86 promises and Python cannot ask of others."""

NUM_CORES: Final = len(os.sched_getaffinity(0)) if AVAILABLE else 1
"""that this process may use"""
_LOOK_S: Final = 20e-6
"""less than it takes to sleep and be woken; longer made nothing faster"""
SLICE_S: Final = 0.05
"""the longest sleep"""
_FUTEX: Final = 202  # the system call's number on x86_64
_WAIT, _WAKE = 0, 1
_EVERYBODY: Final = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_slice = _Timespec(0, int(SLICE_S * 1e9))
_SLICE_ADDRESS: Final = ctypes.addressof(_slice)
_ARGUMENTS: Final = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
_sleeping = ctypes.CDLL(None).syscall  # lets other threads run meanwhile
_sleeping.argtypes = _ARGUMENTS
_quick = ctypes.PyDLL(None).syscall
_quick.argtypes = _ARGUMENTS


def look(words: memoryview, index: int, value: int) -> bool:
    """Look for a while whether a word is at least `value`; for where each rank has a core of its own."""
    until_s = time.perf_counter() + _LOOK_S
    while time.perf_counter() < until_s:
        if words[index] >= value:
            return True
    return False


def wait(address: int, seen: int) -> None:
    """Sleep until `wake`, a signal, or SLICE_S; not at all if the 32-bit word at `address` is not `seen` any more."""
    _sleeping(_FUTEX, address, _WAIT, seen, _SLICE_ADDRESS)


def wake(address: int) -> None:
    """Wake everybody who sleeps at `address`."""
    _quick(_FUTEX, address, _WAKE, _EVERYBODY, None)


_lock = threading.Lock()


def fence() -> None:
    """Make earlier stores visible before later loads: a locked instruction is one on x86. One thread's own lock would
    do, but a shared one is as cheap: it is held for no time."""
    with _lock:
        pass
