"""One test of torch's suite, on all ranks: forks them, waits, and says what became of it.

Called by torch_suite in the process that imported the suite. PyTorch's own CI looks at rank 0's exit code alone; here
those of all ranks count, so one that crashes while it leaves is a failure.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

PASSED, SKIPPED, FAILED, CRASHED, TIMED_OUT, NOT_RUN = "passed", "skipped", "failed", "crashed", "timed out", "not run"
LOG_LENGTH: Final = 4000
"""characters of a log that are shown"""

_TEST_ERROR: Final = 10  # MultiProcessTestCase.TEST_ERROR_EXIT_CODE: the test's body raised
_OUTSIDE_ERROR: Final = 11  # ours: init_process_group, the last barrier or destroy_process_group raised
_PEERS_GRACE_S: Final = 3.0  # after a rank has failed, the others may hang
_DUMP_S: Final = 0.5  # for faulthandler to write where a rank hangs
_NOISE: Final = ("Exception raised", "frame #", "To execute", "This message", "    ", "C++ CapturedTraceback", "#")
_LOG_PREFIX: Final = re.compile(r"^\[rank\d+\]:[A-Z]\d+ \S+ \d+ \S+\] ", re.MULTILINE)
_ERROR_LINE: Final = re.compile(r"^[\w.]*(Error|Exception|Exit|OperationTimeout)\b")


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Args:
        exit_codes: of the ranks; None for one that was still running, negative for a signal.
        log: the end of what the ranks printed, if it did not pass.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    exit_codes: tuple[int | None, ...] = ()
    log: str = ""

    @property
    def ok(self) -> bool:
        return self.status in (PASSED, SKIPPED)


class _Rank:
    """One rank of one test: a forked process, what it raised, what it printed."""

    def __init__(self, suite: Any, name: str, rank: int, folder: str, delays: int | None) -> None:
        self.rank = rank
        self.error = ""
        self._log = Path(folder, f"log{rank}")
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (suite, name, rank, folder, theirs, self._log, delays)
        self.process = multiprocessing.get_context("fork").Process(target=_be_rank, args=arguments)
        self.process.start()
        theirs.close()

    def listen(self) -> None:
        """Take what it raised, if it has sent that."""
        try:
            while not self.error and self._pipe.poll():
                self.error = str(self._pipe.recv())
        except (EOFError, OSError):
            pass

    def dump(self) -> None:
        """Let it write into its log where it hangs, if it still runs."""
        assert self.process.pid is not None
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.listen()
        self._pipe.close()

    def log(self) -> str:
        """Return the end of what it printed."""
        try:
            return _LOG_PREFIX.sub("", self._log.read_text(errors="replace"))[-LOG_LENGTH:]
        except OSError:
            return ""


def _be_rank(suite: Any, name: str, rank: int, folder: str, pipe: Any, log: Path, delays: int | None) -> None:
    """Run one test as one rank; the forked process ends with this."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, name_of in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        setattr(sys, name_of, os.fdopen(number, "w", buffering=1, closefd=False))
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ["TEMP_DIR"] = folder
    module = sys.modules[suite.__mro__[1].__module__]
    module.INIT_METHOD = f"file://{folder}/init_dir/shared_init_file"  # for tests that make a second world
    importlib.import_module("torch").set_num_threads(1)
    if delays is not None:
        importlib.import_module("tests.conformance.delays").install(f"{delays}/{name}/{rank}")
    try:
        suite._run(rank, name, f"{folder}/store", pipe)
    except SystemExit:
        raise
    except BaseException:
        error = f"[outside the test's body]\n{traceback.format_exc()}"
        print(error, file=sys.stderr, flush=True)
        try:
            pipe.send(error)
        except OSError:
            pass  # the suite closes it after the test's body; the log has it
        os._exit(_OUTSIDE_ERROR)


def run_test(suite: Any, name: str, world_size: int, timeout_s: float, delays: int | None) -> Outcome:
    """Run one test on all ranks.

    Args:
        suite: torch_suite.load_suite's.
        delays: seed of random delays of frames; None for none.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{name[:40]}_", ignore_cleanup_errors=True) as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        ranks = [_Rank(suite, name, rank, folder, delays) for rank in range(world_size)]
        try:
            in_time = _wait(ranks, began_s + timeout_s)
            codes = tuple(rank.process.exitcode for rank in ranks)
            if not in_time:
                for rank in ranks:
                    rank.dump()
                ranks[0].process.join(_DUMP_S)
        finally:
            for rank in ranks:
                rank.end()
        outcome = _judge(ranks, codes) if in_time else Outcome(TIMED_OUT, f"after {timeout_s:g} s")
        logs = (f"--- rank {rank.rank}, exit code {codes[rank.rank]}\n{rank.log()}\n" for rank in ranks)
        log = "" if outcome.ok else "".join(logs)
    return replace(outcome, seconds=round(time.monotonic() - began_s, 2), exit_codes=codes, log=log)


def _wait(ranks: Sequence[_Rank], deadline_s: float) -> bool:
    """Wait until all ranks are gone, or one has failed and the others had their grace; False at the deadline."""
    failed_s: float | None = None
    while running := [rank.process.sentinel for rank in ranks if rank.process.exitcode is None]:
        connection.wait(running, 0.05)
        for rank in ranks:
            rank.listen()
        now_s = time.monotonic()
        if failed_s is None and any(rank.process.exitcode not in (None, 0, *_skips()) for rank in ranks):
            failed_s = now_s
        if failed_s is not None and now_s > failed_s + _PEERS_GRACE_S:
            return True
        if now_s > deadline_s:
            return False
    return True


def _judge(ranks: Sequence[_Rank], codes: Sequence[int | None]) -> Outcome:
    for rank, code in zip(ranks, codes, strict=True):
        if code in (_TEST_ERROR, _OUTSIDE_ERROR):
            return Outcome(FAILED, f"rank {rank.rank}: {_key_line(rank.error or rank.log())}")
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return Outcome(CRASHED, f"rank {rank}: signal {signal.Signals(-code).name}")
    if all(code in _skips() for code in codes):
        return Outcome(SKIPPED, _skips()[codes[0]])
    return Outcome(PASSED) if all(code == 0 for code in codes) else Outcome(FAILED, f"exit codes {codes}")


@functools.cache
def _skips() -> dict[int | None, str]:
    common = importlib.import_module("torch.testing._internal.common_distributed")
    return {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}


def _key_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return next((line for line in reversed(lines) if _ERROR_LINE.match(line)), (lines or ["?"])[-1])[:300]
