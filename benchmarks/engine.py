"""What the two pure cores cost: nanoseconds for each event of server.engine and of core.scheduler.

    python benchmarks/engine.py [--ranks 4] [--parts 32]

No bytes move and nothing waits: this is the share of a partition's time that is Python deciding. An event of the engine
is a push or a pull of a rank, or the report that a fold is done; of the scheduler a task submitted, issued, or done.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Result, Row, spread
from torch_bps.core.scheduler import Scheduler
from torch_bps.server.engine import Engine, Fold
from torch_bps.transport.base import Buffer
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPE_BY_NAME, SUM
from torch_bps.wire.header import PULL, PUSH, WANT, Header

PART_NBYTES = 1 << 20
FLOAT32 = DTYPE_BY_NAME["float32"].code
COLUMNS = (
    Column("core", "core"),
    Column("work", "work"),
    Column("events", "events"),
    Column("ns/event, median", "median", ".0f", 1e9),
    Column("min", "min", ".0f", 1e9),
    Column("p99", "p99", ".0f", 1e9),
)


class Peer:
    """A rank's connection, as the engine sees it: it only hands it back."""


class EngineWork:
    """One operation after the other, all of `parts` partitions, of `ranks` ranks.

    Args:
        op: ops.ALL_REDUCE (everybody pushes and wants the result) or ops.BROADCAST (rank 0 pushes, the others pull).
    """

    def __init__(self, op: int, ranks: int, parts: int) -> None:
        self._engine = Engine()
        for rank in range(ranks):
            self._engine.join(1, size=ranks, index=rank, rank=rank)
        self._op, self._parts = op, parts
        self._peers = [Peer() for _ in range(ranks)]
        self._buffer = Buffer(memoryview(bytearray(1)))
        self._sequence = 0
        self._frames: list[tuple[int, Header]] = []

    def prepare(self) -> None:
        """Make the frames of the next operation."""
        total = self._parts * PART_NBYTES
        reduces = self._op == ops.ALL_REDUCE
        self._frames = []
        for part in range(self._parts):
            for rank in range(len(self._peers)):
                pushes = reduces or rank == 0
                header = Header(
                    PUSH if pushes else PULL,
                    self._op,
                    FLOAT32,
                    SUM if reduces else 0,
                    WANT if reduces else 0,
                    1,
                    0,
                    self._sequence,
                    0,
                    part,
                    total,
                    PART_NBYTES if pushes else 0,
                )
                self._frames.append((rank, header))
        self._sequence += 1

    def run(self) -> int:
        """Run the operation that was prepared to its end; returns the number of events."""
        frames = self._frames
        push, pull, folded = self._engine.push, self._engine.pull, self._engine.folded
        events = len(frames)
        for rank, header in frames:
            if header.frame == PULL:
                pull(rank, header, self._peers[rank])
                continue
            for instruction in push(rank, header, self._buffer, self._peers[rank]):
                while type(instruction) is Fold:
                    events += 1
                    following = folded(instruction.slot)
                    instruction = next((each for each in following if type(each) is Fold), None)
        return events

    def check(self) -> None:
        """Raise AssertionError if the engine still holds something."""
        assert self._engine.is_idle(), self._engine.describe()


class SchedulerWork:
    """`tasks` partitions submitted, then issued and completed within a credit of six."""

    def __init__(self, tasks: int) -> None:
        self._scheduler: Scheduler[int] = Scheduler(6 * PART_NBYTES)
        self._tasks = tasks

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def run(self) -> int:
        """Return the number of events."""
        scheduler = self._scheduler
        for task in range(self._tasks):
            scheduler.submit(self, 0, PART_NBYTES, task)
        under_way = len(scheduler.ready())
        while under_way:
            scheduler.done(PART_NBYTES)
            under_way += len(scheduler.ready()) - 1
        return 3 * self._tasks

    def check(self) -> None:
        """Raise AssertionError if something is left."""
        assert not self._scheduler.num_queued
        assert not self._scheduler.in_flight_nbytes


def measure(core: str, name: str, work: EngineWork | SchedulerWork, seconds: float) -> Row:
    """Return one row: repeat the work until the time is over, at least five times after a warm-up."""
    work.prepare()
    events = work.run()
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < deadline:
        work.prepare()
        began = time.perf_counter()
        work.run()
        samples.append((time.perf_counter() - began) / events)
    work.check()
    return {"core": core, "work": name, "events": events, **spread(samples)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parts", type=int, default=32, help="partitions of an operation")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ranks, parts = options.ranks, options.parts
    shape = f"{ranks} ranks, {parts} partitions"
    rows = [
        measure(core, name, work, options.seconds)
        for core, name, work in (
            ("server.engine", f"all_reduce, {shape}", EngineWork(ops.ALL_REDUCE, ranks, parts)),
            ("server.engine", f"broadcast, {shape}", EngineWork(ops.BROADCAST, ranks, parts)),
            ("core.scheduler", f"{parts} tasks", SchedulerWork(parts)),
            ("core.scheduler", f"{32 * parts} tasks", SchedulerWork(32 * parts)),
        )
    ]
    settings = {"ranks": ranks, "parts": parts, "seconds": options.seconds}
    result = Result("engine", "Deciding: time for each event of the pure cores", COLUMNS, rows, settings)
    result.print()
    if options.json:
        result.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
