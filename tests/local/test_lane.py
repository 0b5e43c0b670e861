"""The local plane between threads of this process: every collective with chunks of a few bytes, and every failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_bps.core.operation import Operation
from torch_bps.errors import BytePSError, ClosedError, MismatchError, OperationTimeout, PeerLostError
from torch_bps.local import board, exchange, futex
from torch_bps.local.lane import Lane
from torch_bps.wire import ops
from torch_bps.wire.dtypes import AVG, DTYPE_BY_NAME, MAX, SUM

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="this machine's stores may be seen out of order")

INT32 = DTYPE_BY_NAME["int32"].code
FLOAT32 = DTYPE_BY_NAME["float32"].code
CHUNK = 512


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few hundred elements go around the ring several times."""
    monkeypatch.setattr(board, "CHUNK_NBYTES", CHUNK)
    monkeypatch.setattr(exchange, "DIRECT_NBYTES", 256)


class Ranks:
    """The lanes of a group, one a thread."""

    def __init__(self, size: int, stall_warning_s: float = 60.0) -> None:
        self.size = size
        self.broken: dict[int, BytePSError] = {}
        self.memories = [memoryview(bytearray(board.board_nbytes(size))) for _ in range(size)]
        self.lanes = [
            Lane(
                self.memories, rank, who=f"rank {rank}", name="g", stall_warning_s=stall_warning_s,
                on_broken=lambda error, rank=rank: self.broken.setdefault(rank, error),
                on_end=lambda duration_s, operation: None,
            )
            for rank in range(size)
        ]  # fmt: skip

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Call `function(rank)` in a thread for each rank and return the results; an exception is one too."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank hangs"
        for result in results:
            if isinstance(result, AssertionError):
                raise result
        return results

    def call(self, rank: int, operation: Operation, inline: bool = True) -> BytePSError | None:
        """Run an operation to its end and return its error."""
        return self.start(rank, operation, inline)()

    def start(self, rank: int, operation: Operation, inline: bool) -> Callable[[], BytePSError | None]:
        done = threading.Event()
        errors: list[BytePSError | None] = []

        def on_done(error: BytePSError | None) -> None:
            errors.append(error)
            done.set()

        operation.on_done = on_done
        if self.lanes[rank].enter(operation, inline=inline):
            self.lanes[rank].run(operation)

        def result() -> BytePSError | None:
            assert done.wait(20), f"rank {rank}: {operation.label} hangs"
            assert len(errors) == 1
            return errors[0]

        return result

    def close(self) -> None:
        self.each(lambda rank: self.lanes[rank].close(False))
        for lane in self.lanes:
            lane.release()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    group = Ranks(getattr(request, "param", 3))
    yield group
    group.close()


def view(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B") if array.nbytes else memoryview(b"")


def operation(sequence: int, op: int, pushes: Any = (), pulls: Any = (), **more: Any) -> Operation:
    fields = {"dtype": INT32, "timeout_s": 20.0, "redop": SUM, "root": 0, **more}
    made = Operation(
        op,
        on_done=lambda error: None,
        label=ops.ROWS[op].name,
        pushes=tuple((block, view(array)) for block, array in pushes),
        pulls=tuple((block, view(array)) for block, array in pulls),
        **fields,
    )
    made.sequence = sequence
    return made


def all_reduce(sequence: int, array: np.ndarray, **more: Any) -> Operation:
    return operation(sequence, ops.ALL_REDUCE, [(0, array)], [(0, array)], **more)


def ints(rank: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((rank, count, seed)).integers(-99, 99, count).astype(np.int32)


# ---- every collective

COUNTS = st.sampled_from([0, 1, 3, 63, 64, 65, 127, 128, 129, 200, 600, 1001])


class Case:
    """One collective of random sizes: makes each rank's operation, and checks what it got."""

    def __init__(self, draw: Callable[..., Any], size: int, sequence: int) -> None:
        self.size, self.sequence = size, sequence
        self.op = draw(st.sampled_from(range(ops.ALL_REDUCE, ops.SEND)))
        self.root = draw(st.integers(0, size - 1))
        self.counts = [[draw(COUNTS) for _ in range(size)] for _ in range(size)]
        self.inline = [draw(st.booleans()) for _ in range(size)]
        self.got: dict[int, list[np.ndarray]] = {}

    def part(self, rank: int, to: int, count: int | None = None) -> np.ndarray:
        return ints(rank * 100 + to, self.counts[rank][to] if count is None else count, self.sequence)

    def make(self, rank: int) -> Operation:
        op, size, root = self.op, self.size, self.root
        others = [peer for peer in range(size) if peer != rank]
        pushes: list[tuple[int, np.ndarray]] = []
        pulls: list[tuple[int, np.ndarray]] = []
        if op in (ops.ALL_REDUCE, ops.REDUCE_TO_ROOT):
            pushes = [(0, self.part(rank, 0, self.counts[0][0]))]
            pulls = pushes if op == ops.ALL_REDUCE or rank == root else []
        elif op == ops.REDUCE_SCATTER:
            pushes = [(to, self.part(rank, to, self.counts[0][to])) for to in range(size)]
            pulls = [(rank, np.zeros(self.counts[0][rank], np.int32))]
        elif op == ops.BARRIER:
            pushes = pulls = [(0, np.zeros(0, np.int32))]
        elif op == ops.BROADCAST:
            block = [(0, self.part(root, 0) if rank == root else np.zeros(self.counts[root][0], np.int32))]
            pushes, pulls = (block, []) if rank == root else ([], block)
        elif op == ops.ALL_GATHER:
            pushes = [(rank, self.part(rank, 0))]
            pulls = [(peer, np.zeros(self.counts[peer][0], np.int32)) for peer in others]
        elif op == ops.GATHER:
            pushes = [(rank, self.part(rank, 0))] if rank != root else []
            pulls = [(peer, np.zeros(self.counts[peer][0], np.int32)) for peer in others] if rank == root else []
        elif op == ops.SCATTER:
            pushes = [(to, self.part(root, to)) for to in others] if rank == root else []
            pulls = [(rank, np.zeros(self.counts[root][rank], np.int32))] if rank != root else []
        else:
            pushes = [(rank * size + to, self.part(rank, to)) for to in others]
            pulls = [(peer * size + rank, np.zeros(self.counts[peer][rank], np.int32)) for peer in others]
        self.got[rank] = [array for _, array in pulls]
        return operation(self.sequence, op, pushes, pulls, root=root)

    def check(self, rank: int) -> None:
        op, size = self.op, self.size
        others = [peer for peer in range(size) if peer != rank]
        if op in (ops.ALL_REDUCE, ops.REDUCE_TO_ROOT):
            expected = [sum(self.part(peer, 0, self.counts[0][0]) for peer in range(size))]
        elif op == ops.REDUCE_SCATTER:
            expected = [sum(self.part(peer, rank, self.counts[0][rank]) for peer in range(size))]
        elif op == ops.BARRIER:
            expected = [np.zeros(0, np.int32)]
        elif op == ops.BROADCAST:
            expected = [self.part(self.root, 0)]
        elif op in (ops.ALL_GATHER, ops.GATHER):
            expected = [self.part(peer, 0) for peer in others]
        elif op == ops.SCATTER:
            expected = [self.part(self.root, rank)]
        else:
            expected = [self.part(peer, rank) for peer in others]
        for got, wanted in zip(self.got[rank], expected, strict=False):
            np.testing.assert_array_equal(got, wanted)


@given(data=st.data())
@settings(max_examples=60)
def test_all_collectives_one_after_another(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    cases = [Case(data.draw, size, sequence) for sequence in range(data.draw(st.integers(1, 8)))]
    group = Ranks(size)

    def run(rank: int) -> None:
        waits = [group.start(rank, case.make(rank), case.inline[rank]) for case in cases]
        assert [wait() for wait in waits] == [None] * len(cases)
        for case in cases:
            case.check(rank)

    try:
        for error in group.each(run):
            assert error is None, error
    finally:
        group.close()


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("count", [5, 64, 65, 5000])
def test_the_order_of_additions_is_the_order_of_ranks(ranks: Ranks, count: int) -> None:
    parts = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) * 10**rank for rank in range(4)]

    def run(rank: int) -> np.ndarray:
        own = parts[rank].copy()
        assert ranks.call(rank, all_reduce(0, own, dtype=FLOAT32)) is None
        return own

    total = parts[0]
    for part in parts[1 : ranks.size]:
        total = total + part
    for result in ranks.each(run):
        assert result.tobytes() == total.tobytes()


def test_average_and_maximum(ranks: Ranks) -> None:
    def run(rank: int) -> tuple[float, int]:
        mean, largest = np.full(300, rank + 1, np.float32), np.full(300, rank, np.int32)
        assert ranks.call(rank, all_reduce(0, mean, dtype=FLOAT32, redop=AVG)) is None
        assert ranks.call(rank, all_reduce(1, largest, redop=MAX)) is None
        return mean[299], largest[0]

    assert ranks.each(run) == [(2.0, 2)] * 3


# ---- failures


def sums(ranks: Ranks, rank: int, *sequences: int) -> None:
    """Check that the group works."""
    for sequence in sequences:
        own = ints(rank, 400, sequence)
        assert ranks.call(rank, all_reduce(sequence, own)) is None
        np.testing.assert_array_equal(own, sum(ints(peer, 400, sequence) for peer in range(ranks.size)))


@pytest.mark.parametrize("late_s", [0.0, 0.4])
@pytest.mark.parametrize("count", [1, 700])
def test_a_disagreement_reaches_all_and_the_group_goes_on(ranks: Ranks, count: int, late_s: float) -> None:
    def run(rank: int) -> None:
        sums(ranks, rank, 0)
        time.sleep(late_s if rank == 2 else 0)
        error = ranks.call(rank, all_reduce(1, ints(rank, count + (rank == 1))))
        assert isinstance(error, MismatchError), error
        assert f"  rank 0: all_reduce SUM int32[{count}]" in error.what
        assert f"  rank 1: all_reduce SUM int32[{count + 1}]" in error.what
        sums(ranks, rank, 2, 3, 4)

    assert ranks.each(run) == [None] * 3
    assert not ranks.broken


def test_two_disagreements_before_a_late_rank_comes(ranks: Ranks) -> None:
    def run(rank: int) -> None:
        time.sleep(0.5 if rank == 2 else 0)
        for sequence in range(2):
            error = ranks.call(rank, all_reduce(sequence, ints(rank, 700 + (rank == 1)), timeout_s=3.0))
            assert isinstance(error, MismatchError), error
        sums(ranks, rank, 2, 3)

    assert ranks.each(run) == [None] * 3


@pytest.mark.parametrize("seed", range(12))
def test_disagreements_and_late_ranks_at_random(seed: int) -> None:
    plan = np.random.default_rng(seed)
    size = int(plan.integers(2, 5))
    odd = plan.integers(0, size, 10)
    agree = plan.random(10) < 0.3
    late = plan.random((10, size)) < 0.25
    counts = plan.choice([1, 60, 700, 1500], 10)
    ranks = Ranks(size)

    def run(rank: int) -> None:
        for sequence in range(10):
            time.sleep(0.08 if late[sequence, rank] else 0)
            own = ints(rank, counts[sequence] + (not agree[sequence] and rank == odd[sequence]), sequence)
            error = ranks.call(rank, all_reduce(sequence, own), inline=sequence % 2 == 0)
            assert (error is None) == agree[sequence], error
            if error is None:
                np.testing.assert_array_equal(own, sum(ints(peer, counts[sequence], sequence) for peer in range(size)))

    assert ranks.each(run) == [None] * size
    ranks.close()


def test_splits_that_do_not_fit_are_told_to_all(ranks: Ranks) -> None:
    def run(rank: int) -> None:
        others = [peer for peer in range(3) if peer != rank]
        pushes = [(rank * 3 + to, ints(rank, 4)) for to in others]
        pulls = [(peer * 3 + rank, ints(0, 5 if (peer, rank) == (2, 0) else 4)) for peer in others]
        error = ranks.call(rank, operation(0, ops.ALL_TO_ALL, pushes, pulls))
        assert isinstance(error, MismatchError), error
        assert "rank 0: all_to_all int32, gives 0+4+4 elements to each rank takes 0+4+5" in error.what
        sums(ranks, rank, 1)

    assert ranks.each(run) == [None] * 3


def test_a_late_rank_is_named_then_told_and_the_group_goes_on(ranks: Ranks) -> None:
    def run(rank: int) -> str:
        sums(ranks, rank, 0)
        if rank == 1:
            time.sleep(1.0)
        error = ranks.call(rank, all_reduce(1, ints(rank, 700), timeout_s=0.4))
        assert isinstance(error, OperationTimeout), error
        sums(ranks, rank, 2, 3, 4)
        return error.what

    first, late, other = ranks.each(run)
    assert "waiting for ranks 1" in first
    assert "gave it up" in late
    assert "all_reduce #1 Timed out after 0." in late
    assert "Timed out" in other
    assert not ranks.broken


def test_a_rank_late_for_more_than_one_operation_breaks_the_group(ranks: Ranks) -> None:
    def run(rank: int) -> list[type]:
        if rank == 1:
            time.sleep(1.5)
        return [type(ranks.call(rank, all_reduce(number, ints(rank, 9), timeout_s=0.2))) for number in range(4)]

    for kinds in ranks.each(run):
        assert set(kinds) == {OperationTimeout}
    assert set(ranks.broken) == {0, 1, 2}


def test_who_leaves_is_named(ranks: Ranks) -> None:
    def run(rank: int) -> BytePSError | None:
        sums(ranks, rank, 0)
        if rank == 2:
            ranks.lanes[2].close(False)
            return None
        return ranks.call(rank, all_reduce(1, ints(rank, 700)))

    first, second, _ = ranks.each(run)
    for error in (first, second):
        assert isinstance(error, PeerLostError)
        assert "rank 2 left the group" in error.what


def test_what_a_rank_wrote_before_it_left_is_read(ranks: Ranks) -> None:
    def run(rank: int) -> None:
        time.sleep(0.2 * rank)
        array = ints(0, 20) if rank == 0 else np.zeros(20, np.int32)
        block = [(0, array)]
        made = operation(0, ops.BROADCAST, block, []) if rank == 0 else operation(0, ops.BROADCAST, [], block)
        assert ranks.call(rank, made) is None
        ranks.lanes[rank].close(False)
        np.testing.assert_array_equal(array, ints(0, 20))

    assert ranks.each(run) == [None] * 3


def test_a_lost_rank_fails_what_runs_and_what_is_queued(ranks: Ranks) -> None:
    def run(rank: int) -> list[BytePSError | None]:
        if rank == 2:
            time.sleep(0.3)
            for other in (0, 1):
                ranks.lanes[other].fail(PeerLostError("rank 2 is lost"))
            return []
        waits = [ranks.start(rank, all_reduce(number, ints(rank, 700)), False) for number in range(3)]
        return [wait() for wait in waits]

    for errors in ranks.each(run)[:2]:
        assert [isinstance(error, PeerLostError) and "rank 2 is lost" in error.what for error in errors] == [True] * 3


def test_an_abort_ends_a_wait_and_is_told(ranks: Ranks) -> None:
    def run(rank: int) -> BytePSError | None:
        if rank == 0:
            waiting = ranks.start(rank, all_reduce(0, ints(rank, 700)), False)
            time.sleep(0.2)
            ranks.lanes[rank].close(True)
            return waiting()
        return ranks.call(rank, all_reduce(0, ints(rank, 700))) if rank == 1 else None

    own, other, _ = ranks.each(run)
    assert isinstance(own, ClosedError)
    assert isinstance(other, (PeerLostError, ClosedError))
    assert "rank 0" in other.what


def test_ctrl_c_breaks_the_group_and_is_raised(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = futex.wait

    def interrupt(address: int, seen: int) -> None:
        if threading.current_thread().name == "interrupted":
            raise KeyboardInterrupt
        sleep(address, seen)

    monkeypatch.setattr(futex, "wait", interrupt)

    def run(rank: int) -> Any:
        if rank == 0:
            threading.current_thread().name = "interrupted"
        else:
            time.sleep(0.2)
        return ranks.call(rank, all_reduce(0, ints(rank, 700)))

    first, *others = ranks.each(run)
    assert isinstance(first, KeyboardInterrupt)
    for error in others:
        assert isinstance(error, PeerLostError)
        assert "rank 0" in error.what
        assert "interrupted" in error.what


@pytest.mark.parametrize("inline", [True, False])
def test_ctrl_c_between_an_operations_number_and_its_run_breaks_the_group(ranks: Ranks, inline: bool) -> None:
    """Its number is lost; who reads the statement of the next one as its own would add other data."""

    def run(rank: int) -> list[BytePSError | None]:
        errors = [ranks.call(rank, all_reduce(sequence, ints(rank, 700))) for sequence in range(2)]
        if rank == 0:
            assert ranks.lanes[0].enter(all_reduce(2, ints(0, 700)), inline=True)  # and never `run`
        else:
            errors.append(ranks.call(rank, all_reduce(2, ints(rank, 700))))
        errors.append(ranks.call(rank, all_reduce(3, ints(rank, 700)), inline))
        return errors

    own, *others = ranks.each(run)
    assert own[:2] == [None, None]
    assert isinstance(own[2], PeerLostError)
    assert "was interrupted in an earlier operation, #2" in own[2].what
    for errors in others:
        assert all(isinstance(error, PeerLostError) for error in errors[2:])
        assert "rank 0" in errors[2].what


def test_ctrl_c_before_an_operation_is_run_does_not_keep_a_lane_open(ranks: Ranks) -> None:
    def run(rank: int) -> None:
        if rank == 0:
            assert ranks.lanes[0].enter(all_reduce(0, ints(0, 700)), inline=True)
        ranks.lanes[rank].close(False)
        assert not ranks.lanes[rank]._busy
        assert ranks.lanes[rank].broken is None  # not given up after a wait

    assert ranks.each(run) == [None] * ranks.size


def test_a_stall_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, stall_warning_s=0.1)

    def run(rank: int) -> None:
        time.sleep(0.5 * rank)
        sums(ranks, rank, 0)

    assert ranks.each(run) == [None] * 2
    ranks.close()
    assert "rank 0: all_reduce has been waiting for 0 s, waiting for ranks 1" in caplog.text
