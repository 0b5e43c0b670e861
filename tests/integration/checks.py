"""Checks of what is built on torch.distributed: each runs on byteps and on gloo, and both must return the same.

    def average(rank: int, world_size: int) -> torch.Tensor: ...     # at a test module's top level; the world is open

    SUITE = Suite(average, ...)

    @SUITE.cases("shm", "server")
    def test_ddp(check: Check, mode: str) -> None:
        SUITE.compare(check, mode)

All checks of a suite share one job on byteps and one on gloo (a job takes seconds to start), yet each is a case of its
own. Results are compared bit for bit unless the check is marked otherwise.
"""

from __future__ import annotations

import importlib
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.integration.jobs import describe
from tests.integration.rig import run_ranks

Check = Callable[[int, int], Any]

SEED = 20190
MODES: dict[str, dict[str, str]] = {
    "shm": {},
    "server": {"BYTEPS_FORCE_DISTRIBUTED": "1"},
    "debug": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},  # gloo, always compared in mode "shm", segfaults in DDP with it
}
HOW = {"shm": "without a server", "server": "1 co-located server", "debug": "without a server"}
"""what a group of each mode says of itself"""


class Outcome(NamedTuple):
    """What one check came to on one rank: its value, or the traceback of its error."""

    value: Any
    error: str = ""


def not_on_gloo(why: str) -> Callable[[Check], Check]:
    """Mark a check that gloo fails, so it has to know by itself what is right."""
    assert why

    def mark(check: Check) -> Check:
        check.not_on_gloo = why  # type: ignore[attr-defined]
        return check

    return mark


def closely(rtol: float, atol: float) -> Callable[[Check], Check]:
    """Mark a check whose sums are added in another order than gloo's."""

    def mark(check: Check) -> Check:
        check.tolerance = rtol, atol  # type: ignore[attr-defined]
        return check

    return mark


class Suite:
    """Checks that share a job.

    Args:
        checks: top-level functions of one module.
        world_size: number of ranks.
        timeout_s: for the whole job.
        env: more settings.
    """

    def __init__(
        self, *checks: Check, world_size: int = 2, timeout_s: float = 50.0, env: Mapping[str, str] | None = None
    ) -> None:
        self.checks = checks
        self.env = dict(env or {})
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._jobs: dict[tuple[str, str], list[dict[str, Outcome]] | str] = {}

    def cases(self, *modes: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return the decorator that makes each check, in each mode, a case of a test."""

        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            names = [check.__name__ for check in self.checks]
            test = pytest.mark.parametrize("check", self.checks, ids=names)(test)
            return pytest.mark.parametrize("mode", modes)(test)  # outermost: it varies slowest

        return decorate

    def compare(self, check: Check, mode: str) -> None:
        """Fail unless the check passed on byteps in this mode, and returned what it returns on gloo."""
        ours = self._values(check, "byteps", mode)
        if not hasattr(check, "not_on_gloo"):
            rtol, atol = getattr(check, "tolerance", (0.0, 0.0))
            for rank, (our, their) in enumerate(zip(ours, self._values(check, "gloo", "shm"), strict=True)):
                same(our, their, rtol, atol, f"rank {rank}")

    def _values(self, check: Check, backend: str, mode: str) -> list[Any]:
        if (backend, mode) not in self._jobs:
            self._jobs[backend, mode] = self._run(backend, mode)
        job = self._jobs[backend, mode]
        if isinstance(job, str):
            pytest.fail(job, pytrace=False)
        outcomes = [outcomes[check.__name__] for outcomes in job]
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                pytest.fail(f"{check.__name__} on {backend} ({mode}), rank {rank}:\n{outcome.error}", pytrace=False)
        return [outcome.value for outcome in outcomes]

    def _run(self, backend: str, mode: str) -> list[dict[str, Outcome]] | str:
        checks = [check for check in self.checks if backend == "byteps" or not hasattr(check, "not_on_gloo")]
        names = [check.__name__ for check in checks]
        try:
            results = run_ranks(
                run,
                self.world_size,
                checks[0].__module__,
                names,
                HOW[mode] if backend == "byteps" else "",
                backend=backend,
                env={**self.env, **MODES[mode]},
                timeout_s=self.timeout_s,
                check=backend == "byteps",  # gloo aborts now and then at exit
            )
        except AssertionError as failure:
            return str(failure)
        failures = [f"{backend}: {result} {result.output[-2000:]}" for result in results if result.value is None]
        return "\n".join(failures) or [result.value for result in results]


def run(rank: int, world_size: int, module: str, names: Sequence[str], how: str) -> dict[str, Outcome]:
    """Run checks of a module; what each rank of a job does. `how` is in the description of the group."""
    assert how in describe(), describe()
    warnings.simplefilter("ignore")
    checks = importlib.import_module(module)
    outcomes = {name: Outcome(None, "not reached: see the check before") for name in names}
    for name in names:
        outcomes[name] = _outcome(getattr(checks, name), rank, world_size)
        if not _all_agree(name, rank, world_size, not outcomes[name].error):
            break  # the ranks are no longer at the same collective
    return outcomes


def _outcome(check: Check, rank: int, world_size: int) -> Outcome:
    random.seed(SEED)
    torch.manual_seed(SEED)
    try:
        return Outcome(check(rank, world_size))
    except Exception:
        return Outcome(None, traceback.format_exc())
    finally:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()


def _all_agree(name: str, rank: int, world_size: int, passed: bool) -> bool:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{rank}", str(passed))
    return len({store.get(f"{name}/{other}") for other in range(world_size)}) == 1


def same(ours: Any, theirs: Any, rtol: float, atol: float, where: str) -> None:
    """Fail, saying where, unless two nested structures of tensors are the same."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(theirs, Mapping):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            same(ours[key], theirs[key], rtol, atol, f"{where}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            same(our, their, rtol, atol, f"{where}[{index}]")
    else:
        assert ours == theirs, where
