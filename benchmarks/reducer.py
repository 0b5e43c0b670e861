"""How fast a server adds: GB/s of pushed bytes for each dtype and number of threads, beside copying the same bytes.

    python benchmarks/reducer.py [--inputs 2] [--sizes 64K,1M,16M] [--threads 1,2]

Adding and copying take turns in the same threads. "of copying" is the time that copying the inputs takes, over the
time of adding them: 1 means that adding costs no more than moving the bytes once.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import Column, Result, Row, spread
from torch_bps.bench.table import nbytes_of
from torch_bps.server import reducer
from torch_bps.transport.memory import copy_bytes
from torch_bps.wire.dtypes import DTYPE_BY_NAME, SUM

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
COLUMNS = (
    Column("dtype", "dtype"),
    Column("size (B)", "nbytes"),
    Column("threads", "threads"),
    Column("adding (GB/s)", "adding", ".1f"),
    Column("copying (GB/s)", "copying", ".1f"),
    Column("of copying", "ratio", ".2f"),
)
JOIN_S = 60.0
_ROUNDS = 20
_BFLOAT16_ONE = 0x3F80


class Inputs:
    """What one thread adds, and copies: `count` pushed buffers of `nbytes`."""

    def __init__(self, dtype: str, nbytes: int, count: int) -> None:
        self._dtype = DTYPE_BY_NAME[dtype].code
        one = np.uint16(_BFLOAT16_ONE) if dtype == "bfloat16" else np.dtype(dtype).type(1)
        values = np.full(nbytes // one.itemsize, one)
        self._views = [memoryview(values.copy()).cast("B") for _ in range(count)]
        self._out = memoryview(bytearray(values.nbytes))
        self.nbytes = values.nbytes * count

    def add(self) -> None:
        """Sum them, as a slot does."""
        accumulator = reducer.Accumulator(self._dtype, SUM, self._out)
        accumulator.fold(self._views, False, True)
        accumulator.finish(len(self._views))

    def copy(self) -> None:
        """Copy each of them."""
        for view in self._views:
            copy_bytes(self._out, view)


def together(jobs: Sequence[Callable[[], None]], times: int) -> float:
    """Run each job `times` in a thread of its own, all at once; returns the seconds until the last has ended."""
    gate = threading.Barrier(len(jobs) + 1)

    def work(job: Callable[[], None]) -> None:
        gate.wait(JOIN_S)
        for _ in range(times):
            job()

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    gate.wait(JOIN_S)
    for thread in threads:
        thread.join(JOIN_S)
    return time.perf_counter() - began


def measure(dtype: str, nbytes: int, num_threads: int, count: int, seconds: float) -> Row:
    """Return one row."""
    inputs = [Inputs(dtype, nbytes, count) for _ in range(num_threads)]
    ways = {"adding": [each.add for each in inputs], "copying": [each.copy for each in inputs]}
    times = {}
    for way, jobs in ways.items():
        together(jobs, 1)  # the first call imports, and touches the pages
        once_s = together(jobs, 3) / 3
        times[way] = max(1, int(seconds / 2 / _ROUNDS / once_s))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, jobs in ways.items():
            taken[way].append(together(jobs, times[way]) / times[way])
    moved = sum(each.nbytes for each in inputs)
    adding, copying = spread(taken["adding"]), spread(taken["copying"])
    return {
        "dtype": dtype,
        "nbytes": nbytes,
        "threads": num_threads,
        "inputs": count,
        "adding": moved / adding["median"] / 1e9,
        "copying": moved / copying["median"] / 1e9,
        "ratio": copying["median"] / adding["median"],
        "adding_s": adding,
        "copying_s": copying,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--sizes", default="64K,1M,16M", help="of a partition")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--inputs", type=int, default=2, help="contributors of a slot")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    reducer.limit_threads()
    rows = [
        measure(dtype, nbytes_of(size), int(threads), options.inputs, options.seconds)
        for dtype in options.dtypes.split(",")
        for size in options.sizes.split(",")
        for threads in options.threads.split(",")
    ]
    title = f"Adding {options.inputs} inputs, beside copying them"
    settings = {"inputs": options.inputs, "seconds": options.seconds, "rounds": _ROUNDS}
    result = Result("reducer", title, COLUMNS, rows, settings)
    result.print()
    if options.json:
        result.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
