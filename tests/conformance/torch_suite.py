"""PyTorch's own tests of torch.distributed, DistributedTest (285 of them), for any backend with CPU tensors.

    python -m tests.conformance.torch_suite --backend byteps --world-size 2
    python -m tests.conformance.torch_suite --backend byteps --world-size 3 --small-world --admit "Only MPI supports"
    python -m tests.conformance.torch_suite --backend gloo -k monitored_barrier        # the same, to compare

Run it in the root of the checkout. It exits with 1 unless every test that ran passed or skipped itself.

Gates. Most decorators of the suite compare its global BACKEND, read from the environment when it is imported, with
names such as "gloo". It is imported as "gloo", so they decide as they do for gloo; then the global is set to the
backend under test, which is what the tests hand to init_process_group and new_group. `--admit` and `--small-world` open
more.

Processes. torch and the suite are imported once; each test forks its ranks from here, so it costs a second, not ten.
One test: torch_suite_ranks.

test_torch_suite.py uses `run_suite`, which starts this as a process of its own: the suite changes environment, seeds
and warnings of whoever imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.conformance.torch_suite_ranks import LOG_LENGTH, NOT_RUN, SKIPPED, Outcome, run_test
from tests.integration.process import Process

LANES: Final = 2


@dataclass(frozen=True)
class Options:
    """What to run, and how; the fields are the command's options."""

    backend: str = "byteps"
    imports: tuple[str, ...] = ()
    """modules to import first, for a backend that is not known by itself"""
    world_size: int = 2
    small_world: bool = False
    """run tests that ask for 8 ranks or more also with fewer (they pass with 3)"""
    admit: str = ""
    """regular expression of reasons not to skip for"""
    timeout_s: float = 60.0
    """of one test"""
    budget_s: float = 1500.0
    """of all; tests that would start later are `not run`"""
    pattern: str = ""
    """regular expression of names"""
    only: str = ""
    """file of names; no other tests are run"""
    delays: int | None = None
    """seed of random delays of frames (tests.conformance.delays)"""


def read_names(path: Path | str) -> list[str]:
    """Return the names in a file, one a line; # begins a comment."""
    lines = (line.partition("#")[0].strip() for line in Path(path).read_text().splitlines())
    return [line for line in lines if line]


def run_suite(options: Options, names: Sequence[str], env: Mapping[str, str], folder: Path) -> dict[str, Outcome]:
    """Run these tests in LANES processes side by side - a test mostly waits - and return the outcome of each.

    Args:
        env: added to the environment, for the ranks.
        folder: for files of names and results.

    Raises:
        AssertionError: a process did not end in time or by itself, or left others behind.
    """
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        lanes = []
        for lane in range(LANES):
            only, results = folder / f"names{lane}.txt", folder / f"results{lane}.json"
            only.write_text("\n".join(names[lane::LANES]))
            command = [*command_line(replace(options, only=str(only))), "--json", str(results)]
            lanes.append((stack.enter_context(Process(command, env=env, name=f"torch's suite, lane {lane}")), results))
        deadline_s = time.monotonic() + options.budget_s + options.timeout_s
        for process, results in lanes:
            code = process.wait(deadline_s)
            orphans = process.orphans(5.0)
            said = process.output[-LOG_LENGTH:]
            assert code in (0, 1), f"{process.name} ended with {code}:\n{said}"
            assert not orphans, f"{process.name} left behind: {orphans}\n{said}"
            for name, fields in json.loads(results.read_text())["outcomes"].items():
                outcomes[name] = Outcome(**{**fields, "exit_codes": tuple(fields["exit_codes"])})
    return outcomes


# ---- the suite


class _Backend(str):
    """The backend under test; equal to "gloo" as well, for tests that look at BACKEND while they run."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load_suite(options: Options, folder: str) -> Any:
    """Import torch's suite with its gates opened, and return the class that has the tests. Once a process."""
    os.environ.update(
        BACKEND="gloo",
        INIT_METHOD="file://",  # opens the tests of barrier's timeout
        MASTER_ADDR="127.0.0.1",
        TEMP_DIR=folder,
        WORLD_SIZE=str(options.world_size),
    )
    common = importlib.import_module("torch.testing._internal.common_utils")
    for module in options.imports:
        importlib.import_module(module)
    if options.admit:
        common.skip_but_pass_in_sandcastle_if = _admitting(options.admit, common.skip_but_pass_in_sandcastle_if)
    suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    suite.BACKEND = _Backend(options.backend)
    os.environ["BACKEND"] = "mpi" if options.small_world else options.backend  # what skip_if_small_worldsize looks at
    return type("Suite", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


def _admitting(pattern: str, skip_if: Callable[..., Any]) -> Callable[..., Any]:
    def gate(condition: bool, reason: str) -> Any:
        return (lambda test: test) if condition and re.search(pattern, reason) else skip_if(condition, reason)

    return gate


def names_in(suite: Any) -> list[str]:
    """Return the names of all tests."""
    return sorted(name for name in dir(suite) if name.startswith("test_") and callable(getattr(suite, name)))


def decided_at_import(suite: Any, name: str) -> Outcome | None:
    """Return the outcome of a test that a decorator skips."""
    test = getattr(suite, name)
    return Outcome(SKIPPED, test.__unittest_skip_why__) if getattr(test, "__unittest_skip__", False) else None


# ---- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", default=Options.backend)
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help="import it first")
    add("--world-size", type=int, default=Options.world_size)
    add("--small-world", action="store_true", help="run tests that ask for 8 ranks also with fewer (3 are enough)")
    add("--admit", default="", metavar="REGEX", help="do not skip for reasons that match")
    add("--timeout", dest="timeout_s", type=float, default=Options.timeout_s, help="seconds for one test")
    add("--budget", dest="budget_s", type=float, default=Options.budget_s, help="seconds for all")
    add("-k", dest="pattern", default="", metavar="REGEX", help="run tests whose name matches")
    add("--only", default="", metavar="FILE", help="run the tests that a file names, one a line")
    add("--delays", type=int, metavar="SEED", help="delay frames at random, in order on each channel (byteps only)")
    add("--json", type=Path, metavar="FILE", help="write the outcomes")
    add("--list", action="store_true", help="say which tests would run; run none")
    return parser


def command_line(options: Options) -> list[str]:
    """Return the command that has these options."""
    arguments = [sys.executable, "-m", __name__, *(["--small-world"] if options.small_world else [])]
    for action in _parser()._actions:
        value = getattr(options, action.dest, None)
        if value is None or value == action.default or isinstance(value, bool):
            continue
        for one in value if isinstance(value, tuple) else [value]:
            arguments += [action.option_strings[0], str(one)]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = vars(_parser().parse_args(argv))
    json_path, only_list = args.pop("json"), args.pop("list")
    options = Options(**{name: tuple(value) if isinstance(value, list) else value for name, value in args.items()})
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        outcomes = run_all(load_suite(options, folder), options, only_list)
    wall_s = time.monotonic() - began_s
    skipped = Counter(outcome.reason for outcome in outcomes.values() if outcome.status == SKIPPED)
    print(*(f"skipped {count:3}: {reason}" for reason, count in skipped.most_common()), sep="\n")
    print(describe({name: outcome for name, outcome in outcomes.items() if not outcome.ok and outcome.exit_codes}))
    counts = Counter(outcome.status for outcome in outcomes.values())
    print(f"{options}\n{', '.join(f'{count} {status}' for status, count in counts.items())} in {wall_s:.0f} s")
    if json_path is not None:
        found = {"options": asdict(options), "wall_s": wall_s, "outcomes": {n: asdict(o) for n, o in outcomes.items()}}
        json_path.write_text(json.dumps(found, indent=1))
    return 0 if only_list or all(outcome.ok for outcome in outcomes.values()) else 1


def run_all(suite: Any, options: Options, only_list: bool) -> dict[str, Outcome]:
    """Run what the options select, or only say what that is; a line for each test that is not skipped."""
    began_s = time.monotonic()
    names = [name for name in names_in(suite) if re.search(options.pattern, name)]
    if options.only:
        wanted = set(read_names(options.only))
        names = [name for name in names if name in wanted]
    outcomes: dict[str, Outcome] = {}
    for number, name in enumerate(names, 1):
        outcome = decided_at_import(suite, name)
        if outcome is None and only_list:
            outcome = Outcome(NOT_RUN, "listed only")
        elif outcome is None and time.monotonic() - began_s > options.budget_s:
            outcome = Outcome(NOT_RUN, f"the budget of {options.budget_s:g} s is used up")
        elif outcome is None:
            outcome = run_test(suite, name, options.world_size, options.timeout_s, options.delays)
        outcomes[name] = outcome
        if outcome.status != SKIPPED:
            what = f"{outcome.status:9} {outcome.seconds:5.1f} s  {name}  {outcome.reason}"
            print(f"[{number:3}/{len(names)}] {what}", flush=True)
    return outcomes


def describe(outcomes: Mapping[str, Outcome]) -> str:
    """Return name, reason and the end of the log of each."""
    return "".join(f"\n{name}: {outcome.status}: {outcome.reason}\n{outcome.log}" for name, outcome in outcomes.items())


if __name__ == "__main__":
    sys.exit(main())
