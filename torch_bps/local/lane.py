"""The operations of one group of one host, in the order of their numbers: who runs them, and how they fail.

    enter ── nothing under way, the caller waits anyhow ──> run here, now
       └──── else ──> the lane's thread, which exists from the first such operation on

    run    write the first piece, stamp the statement ── all ranks' statements are there and agree ──> move the data
             │ disagreement, deadline, a rank has left or gave it up: this operation fails, the next ones work
             └ after that point, or when a rank is lost: the group is broken

A rank that gives an operation up says so on its board; it passes over what late ranks still write about it later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from torch_bps.errors import BY_NAME, BytePSError, ClosedError, MismatchError, OperationTimeout, PeerLostError, told
from torch_bps.local import exchange, futex
from torch_bps.local.board import BELL, BROKEN, FINISHED, GAVE_UP, LEFT, STAMPED, Board
from torch_bps.local.statement import disagreement, statement_of, unpack
from torch_bps.local.streams import Streams
from torch_bps.server.statements import MISMATCH_HINT

if TYPE_CHECKING:
    from torch_bps.core.operation import Operation

log = logging.getLogger("torch_bps.local")

_DRAIN_S: Final = 10.0
_FAIL_S: Final = 2.0


class _GivenUp(Exception):
    """Another rank gave up the operation, for the reason in `error`."""

    def __init__(self, error: BytePSError) -> None:
        self.error = error


class Lane:
    """One rank's side of a group's local plane.

    Thread safety: any thread; `enter` in the order of the operations' numbers.

    Args:
        memories: every rank's board, in the order of ranks; this rank's own is writable and zero.
        who: this rank, for messages.
        stall_warning_s: say what an operation waits for after this long.
        on_broken: called once, in the thread that noticed it, when the group can go on no more.
        on_end: called with the seconds that an operation took, before its on_done.
    """

    def __init__(
        self,
        memories: Sequence[memoryview],
        rank: int,
        *,
        who: str,
        name: str,
        stall_warning_s: float,
        on_broken: Callable[[BytePSError], None],
        on_end: Callable[[float, Operation], None],
    ) -> None:
        self.rank = rank
        self.size = len(memories)
        self._who = who
        self._name = name
        self._stall_warning_s = stall_warning_s
        self._on_broken = on_broken
        self._on_end = on_end
        self._boards = [Board(memory, self.size) for memory in memories]
        self._own = self._boards[rank]
        self._others = [peer for peer in range(self.size) if peer != rank]
        self._streams = Streams(self._boards, rank, self._sleep)
        self._passed = [0] * self.size
        """how many operations of each rank's stream are behind this rank"""
        self._lock = threading.Lock()  # guards the next five
        self._queue: deque[tuple[Operation, float]] = deque()
        self._busy = False
        self._inline = 0
        """ident of a caller that runs an operation: the lane's thread must not"""
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wakeup = threading.Condition(self._lock)
        self.broken: BytePSError | None = None
        # of the operation that runs
        self._operation: Operation | None = None
        self._started_s = 0.0
        self._deadline_s = 0.0
        self._warn_s = 0.0
        self._agreed = False
        self._stamped = False

    def enter(self, operation: Operation, *, inline: bool) -> bool:
        """Queue an operation, or let the caller `run` it.

        Args:
            inline: the caller waits for it anyhow: it may run it if nothing else is under way.
        """
        caller = threading.get_ident()
        with self._lock:
            if self._inline == caller:  # it was interrupted on its way into or out of `run`
                self._hand_on()
            if inline and not self._busy and not self._closing:
                self._inline, self._busy = caller, True
                return True
            self._queue.append((operation, time.monotonic()))
            if not self._busy:
                self._busy = True
                self._start_thread()
            return False

    def run(self, operation: Operation) -> None:
        """Run an operation that `enter` left to the caller; its on_done is called before this returns.

        Raises:
            KeyboardInterrupt, or what else a signal handler raises; the group is broken then.
        """
        try:
            self._run(operation, time.monotonic())
        finally:
            with self._lock:
                self._hand_on()

    def fail(self, error: BytePSError) -> None:
        """Break the group: a rank is lost, or this one aborts. What runs and what is queued fails."""
        if self.broken is None:
            self.broken = error

    def close(self, abort: bool) -> None:
        """Leave; blocks until what is queued is done, unless `abort`."""
        destroyed = ClosedError(f"the process group {self._name!r} was destroyed here", rank=self._who)
        if abort:
            self.fail(destroyed)
        with self._lock:
            if self._inline == threading.get_ident():
                self._hand_on()
            self._closing = True
            self._wakeup.notify_all()
            if not self._wakeup.wait_for(lambda: not self._busy, _DRAIN_S):
                self.fail(destroyed)
                self._wakeup.wait_for(lambda: not self._busy, _FAIL_S)
            thread = self._thread
        if thread is not None:
            thread.join(_FAIL_S)
        if abort:
            self._own.tell(BROKEN, f"PeerLostError|{self._who} aborted")
        self._own.words[LEFT] = 1
        self._own.ring_bell()

    def release(self) -> None:
        """Let go of all boards, after close."""
        for board in self._boards:
            board.release()
        self._boards.clear()

    # ---- the thread

    def _hand_on(self) -> None:
        """A caller's operation is over. May be done again from the beginning, since Ctrl-C may end it anywhere."""
        if self._queue:
            self._start_thread()
        else:
            self._rest()
        self._inline = 0

    def _rest(self) -> None:
        self._busy = False
        if self._closing:
            self._wakeup.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"byteps-lane-{self._name}", daemon=True)
            self._thread.start()
        else:
            self._wakeup.notify()

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._inline or not self._queue:
                    if self._closing and not self._queue:
                        return
                    self._wakeup.wait()
                operation, submitted_s = self._queue.popleft()
            self._run(operation, submitted_s)
            with self._lock:
                if not self._queue:
                    self._rest()

    # ---- an operation

    def _run(self, operation: Operation, submitted_s: float) -> None:
        self._operation = operation
        self._started_s = self._warn_s = submitted_s
        self._deadline_s = submitted_s + operation.timeout_s if operation.timeout_s > 0 else float("inf")
        self._agreed = self._stamped = False
        error: BytePSError | None = None
        try:
            if self.broken is not None:
                raise self.broken.with_facts()
            self._perform(operation)
        except _GivenUp as given_up:
            error = given_up.error
            self._pass_over(operation.sequence)
        except BytePSError as failure:
            error = self._failed(operation, failure)
        except BaseException as failure:  # Ctrl-C, or a bug of ours
            error = PeerLostError(f"{self._who} was interrupted in {operation.label}: {type(failure).__name__}")
            error.__cause__ = failure if isinstance(failure, Exception) else None
            self._break(error)
            if not isinstance(failure, Exception):
                operation.on_done(self._named(error, operation))
                raise
            log.exception("%s: %s", self._who, operation.label)
        self._operation = None
        if error is None:
            self._on_end(time.monotonic() - submitted_s, operation)
            operation.on_done(None)
        else:
            operation.on_done(self._named(error, operation))

    def _perform(self, operation: Operation) -> None:
        rank, size, sequence = self.rank, self.size, operation.sequence
        if self._passed[rank] < sequence:
            raise PeerLostError(f"{self._who} was interrupted in an earlier operation, #{self._passed[rank]}")
        boards, streams, own = self._boards, self._streams, self._own
        statement = statement_of(operation, rank, size)
        packed = statement.pack()
        for peer in self._others:  # its cell is about to be used again
            if boards[peer].words[FINISHED] < sequence - 1:
                self._sleep(peer, FINISHED, sequence - 1)
        exchange.eager(streams, statement, operation, size)
        streams.show()
        own.stamp(sequence, packed)
        self._stamped = True
        own.ring_bell()
        said = [statement] * size
        same = True
        for peer in self._others:
            board = boards[peer]
            if board.words[STAMPED] <= sequence:
                self._sleep(peer, STAMPED, sequence + 1)
            if self._passed[peer] < sequence:
                self._catch_up(peer, sequence)
            theirs = board.statement(sequence)
            if theirs != packed:
                same = False
                said[peer] = unpack(theirs)
        self._check_given_up(sequence)
        if not same and (text := disagreement(dict(enumerate(said)), size)):
            raise MismatchError(text, hint=MISMATCH_HINT)
        self._agreed = True
        if exchange.is_small(statement):
            exchange.all_reduce_small(streams, operation, size)
        elif exchange.is_shared_out(statement, size):
            exchange.all_reduce(streams, operation, size)
        else:
            exchange.exchange(streams, said, operation)
        self._passed = [sequence + 1] * size
        own.words[FINISHED] = sequence + 1

    def _catch_up_all(self) -> None:
        """Pass over what has come meanwhile about operations that this rank gave up."""
        assert self._operation is not None
        for peer in self._others:
            sequence = min(self._boards[peer].words[STAMPED], self._operation.sequence)
            if self._passed[peer] < sequence:
                self._catch_up(peer, sequence)

    def _catch_up(self, peer: int, sequence: int) -> None:
        """Pass over the operations before `sequence` that this rank gave up before the peer came to them."""
        for earlier in range(self._passed[peer], sequence):
            said = unpack(self._boards[peer].statement(earlier))
            exchange.skip_eager(self._streams, said, peer, self.size)
        self._passed[peer] = sequence
        self._own.words[FINISHED] = min(self._passed[other] for other in self._others)
        self._streams.give_up_all()
        self._own.ring_bell()

    # ---- failures

    def _failed(self, operation: Operation, failure: BytePSError) -> BytePSError:
        """Leave the operation so that the next one works, or break the group; returns the error to report."""
        sequence = operation.sequence
        if self.broken is None and self._stamped and not self._agreed:
            self._tell(GAVE_UP + (sequence & 1), failure)
            futex.fence()
            # Who has not come yet will see that it was given up before it agrees to anything; and so will those who
            # wait for it. If all have come, some may have agreed just now, unless nobody can.
            if isinstance(failure, MismatchError) or self._missing(sequence):
                self._pass_over(sequence)
                return failure
        self._break(failure)
        return failure

    def _pass_over(self, sequence: int) -> None:
        """Be through with an operation that failed, as far as the others have come to it."""
        self._passed[self.rank] = sequence + 1
        for peer in self._others:
            if self._boards[peer].words[STAMPED] > sequence and self._passed[peer] <= sequence:
                self._catch_up(peer, sequence + 1)

    def _break(self, error: BytePSError) -> None:
        if self.broken is None:
            self.broken = error
        self._tell(BROKEN, error)
        self._on_broken(error)

    def _tell(self, word: int, error: BytePSError) -> None:
        self._own.tell(word, "|".join(told(error)))

    def _named(self, error: BytePSError, operation: Operation) -> BytePSError:
        label = f"{operation.label} #{operation.sequence}"
        named = error.with_facts(rank=self._who, group=self._name, operation=label)
        named.__cause__ = error.__cause__
        return named

    # ---- waiting

    def _sleep(self, peer: int, word: int, value: int) -> None:
        """Return when a word of a peer's board is at least `value`; raise what makes that impossible."""
        board = self._boards[peer]
        words = board.words
        if self.size <= futex.NUM_CORES and futex.look(words, word, value):
            return
        while True:
            bell, left = words[BELL], words[LEFT]
            if words[word] >= value:
                return
            self._catch_up_all()  # others may wait for just that
            self._look(peer if left else -1)
            futex.wait(board.bell_address, bell)

    def _look(self, left: int) -> None:
        """Raise if there is a reason not to wait on; tell people once in a while."""
        operation = self._operation
        assert operation is not None
        if self.broken is not None:
            raise self.broken.with_facts()
        sequence = operation.sequence
        for peer in self._others:
            board = self._boards[peer]
            if board.words[BROKEN]:
                raise self._told(peer, "broke the group")
        self._check_given_up(sequence)
        if left >= 0:
            raise PeerLostError(
                f"rank {left} left the group (it ended or destroyed it) before {operation.label} #{sequence}",
                hint="look at that rank's own output for the first error",
            )
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            raise OperationTimeout(
                f"{operation.label} #{sequence} Timed out after {now_s - self._started_s:.1f} s{self._missing_text()}",
                hint="see whether that rank is stuck or slow; the limit is the `timeout` of the process group",
            )
        if now_s - self._warn_s >= self._stall_warning_s:
            self._warn_s = now_s
            waited_s, missing = now_s - self._started_s, self._missing_text()
            log.warning("%s: %s has been waiting for %.0f s%s", self._who, operation.label, waited_s, missing)
        if self._stamped and not self._agreed and now_s - self._started_s > futex.SLICE_S:
            self._check_those_here(sequence)

    def _check_given_up(self, sequence: int) -> None:
        cell = GAVE_UP + (sequence & 1)
        for peer in self._others:
            words = self._boards[peer].words
            if words[STAMPED] > sequence and words[cell]:
                raise _GivenUp(self._told(peer, "gave it up"))

    def _told(self, peer: int, what: str) -> BytePSError:
        name, _, text = self._boards[peer].told().partition("|")
        kind = BY_NAME.get(name, BytePSError)
        hint = MISMATCH_HINT if kind is MismatchError else "look at that rank's own output for the first error"
        return kind(text if kind is MismatchError else f"rank {peer} {what}: {text}", hint=hint)

    def _check_those_here(self, sequence: int) -> None:
        """Raise MismatchError if ranks disagree already: the others may never come."""
        said = {self.rank: unpack(self._own.statement(sequence))}
        for peer in self._others:
            if self._boards[peer].words[STAMPED] > sequence:
                said[peer] = unpack(self._boards[peer].statement(sequence))
        if len(said) < self.size and (text := disagreement(said, self.size)):
            raise MismatchError(text, hint=MISMATCH_HINT)

    def _missing_text(self) -> str:
        assert self._operation is not None
        missing = self._missing(self._operation.sequence)
        return f", waiting for ranks {', '.join(map(str, missing))}" if missing else ""

    def _missing(self, sequence: int) -> list[int]:
        """Return the ranks that have not come to an operation."""
        return [peer for peer in self._others if self._boards[peer].words[STAMPED] <= sequence]
