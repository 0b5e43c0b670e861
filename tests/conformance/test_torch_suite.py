"""PyTorch's own suite on byteps: every test that gloo passes passes here, on every path that the data can take.

A run is one process that forks the ranks of one test after the other (torch_suite.py); it takes a minute or two, so
these are marked `conformance`: `make test ARGS='-m "not conformance"'` leaves them out. To repeat one test by hand:

    BYTEPS_FORCE_DISTRIBUTED=1 .venv/bin/python -m tests.conformance.torch_suite --world-size 2 -k test_gather_object

    gloo_passes_2_ranks.txt, gloo_passes_3_ranks.txt    must pass here, but for
    forbidden_by_torch.txt                              what torch itself refuses to any backend but gloo; it passes
                                                        where that refusal is taken out (past_gate.py)
    gloo_fails_3_ranks.txt                              must pass here all the same
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.torch_suite import Options, command_line, describe, read_names, run_suite
from tests.conformance.torch_suite_ranks import FAILED, NOT_RUN, PASSED, Outcome

HERE = Path(__file__).parent
FORBIDDEN = HERE / "forbidden_by_torch.txt"
GATE = "ValueError: monitored_barrier is only implemented for GLOO backend."
WORLDS = {
    2: (Options(world_size=2), ["gloo_passes_2_ranks.txt"]),
    3: (
        Options(world_size=3, small_world=True, admit="Only MPI supports"),
        ["gloo_passes_3_ranks.txt", "gloo_fails_3_ranks.txt"],
    ),
}
SHARED_MEMORY: dict[str, str] = {}
SERVER = {"BYTEPS_FORCE_DISTRIBUTED": "1"}
SERVER_OVER_TCP = {"BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_TRANSPORT": "tcp"}
SEED = 20190
BUDGET_S = 400.0

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(BUDGET_S + 80),
]


@pytest.mark.parametrize(
    ("world_size", "env"),
    [(2, SHARED_MEMORY), (2, SERVER), (3, SHARED_MEMORY), (3, SERVER_OVER_TCP)],
    ids=["2_ranks_shared_memory", "2_ranks_server", "3_ranks_shared_memory", "3_ranks_server_over_tcp"],
)
def test_what_gloo_passes(world_size: int, env: Mapping[str, str], tmp_path: Path) -> None:
    must_pass(world_size, env, tmp_path)


def test_with_frames_delayed_at_random(tmp_path: Path) -> None:
    must_pass(2, SERVER_OVER_TCP, tmp_path, delays=SEED)


def test_torch_still_forbids_what_we_say_it_does(tmp_path: Path) -> None:
    names = read_names(FORBIDDEN)
    outcomes = run_suite(WORLDS[3][0], names, SHARED_MEMORY, tmp_path)
    other = {name: o for name, o in outcomes.items() if o.status != FAILED or GATE not in o.reason}
    if other or sorted(outcomes) != sorted(names):
        pytest.fail(f"take these out of {FORBIDDEN.name}?{describe(other)}", pytrace=False)


def test_what_torch_forbids_passes_where_it_does_not(tmp_path: Path) -> None:
    options = replace(WORLDS[3][0], imports=("tests.conformance.past_gate",))
    outcomes = run_suite(options, read_names(FORBIDDEN), SERVER, tmp_path)
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome.status != PASSED}
    if wrong:
        pytest.fail(describe(wrong), pytrace=False)


def must_pass(world_size: int, env: Mapping[str, str], folder: Path, delays: int | None = None) -> None:
    """Run what must pass with so many ranks, and fail with the name, reason and log of each test that does not."""
    options, files = WORLDS[world_size]
    names = sorted({name for file in files for name in read_names(HERE / file)} - set(read_names(FORBIDDEN)))
    options = replace(options, budget_s=BUDGET_S, delays=delays)
    outcomes = run_suite(options, names, env, folder)
    missing = Outcome(NOT_RUN, "torch has no test of this name")
    wrong = {name: outcomes.get(name, missing) for name in names}
    wrong = {name: outcome for name, outcome in wrong.items() if outcome.status != PASSED}
    if wrong:
        settings = [f"{name}={value}" for name, value in env.items()]
        repeat = shlex.join(["env", *settings, *command_line(replace(options, pattern=f"^{next(iter(wrong))}$"))])
        what = f"{len(wrong)} of {len(names)} tests did not pass (seed of delays: {delays}); to repeat the first:"
        pytest.fail(f"{what}\n  {repeat}\n{describe(wrong)}", pytrace=False)
