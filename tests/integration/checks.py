"""Checks of what is built on torch.distributed: each runs on byteps and on gloo, and both must return the same.

    def average(rank: int, world_size: int) -> torch.Tensor: ...     # at a test module's top level; the world is open

    SUITE = Suite(average, ...)

    @SUITE.cases("shm", "server")
    def test_ddp(check: Check, mode: str) -> None:
        SUITE.compare(check, mode)

All checks of a suite share one job (a job takes seconds to start), first on byteps and then, in the same processes, on
gloo; yet each is a case of its own. Results are compared bit for bit unless the check is marked otherwise.
"""

from __future__ import annotations

import importlib
import os
import random
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.integration.rig import run_ranks

Check = Callable[[int, int], Any]

SEED = 20190
GROUP_TIMEOUT = timedelta(seconds=20)
MODES: dict[str, dict[str, str]] = {"shm": {}, "server": {"BYTEPS_FORCE_DISTRIBUTED": "1"}}


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
    """

    def __init__(self, *checks: Check, world_size: int = 2, timeout_s: float = 50.0) -> None:
        self.checks = checks
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._outcomes: dict[tuple[str, str], list[dict[str, Outcome]] | str] = {}

    def cases(self, *modes: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return the decorator that makes each check, in each mode, a case of a test."""

        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            names = [check.__name__ for check in self.checks]
            test = pytest.mark.parametrize("check", self.checks, ids=names)(test)
            return pytest.mark.parametrize("mode", modes)(test)  # outermost: it varies slowest

        return decorate

    def compare(self, check: Check, mode: str) -> None:
        """Fail unless the check passed on byteps in this mode, and returned what it returns on gloo."""
        ours = self._of(check, "byteps", mode)
        if not hasattr(check, "not_on_gloo"):
            rtol, atol = getattr(check, "tolerance", (0.0, 0.0))
            for rank, (our, their) in enumerate(zip(ours, self._of(check, "gloo", "shm"), strict=True)):
                same(our, their, rtol, atol, f"rank {rank}")

    def _of(self, check: Check, backend: str, mode: str) -> list[Any]:
        if (backend, mode) not in self._outcomes:
            self._run(mode)
        outcomes = self._outcomes[backend, mode]
        if isinstance(outcomes, str):
            pytest.fail(outcomes, pytrace=False)
        values = []
        for rank, outcome in enumerate(rank_outcomes[check.__name__] for rank_outcomes in outcomes):
            if outcome.error:
                pytest.fail(f"{check.__name__} on {backend} ({mode}), rank {rank}:\n{outcome.error}", pytrace=False)
            values.append(outcome.value)
        return values

    def _run(self, mode: str) -> None:
        backends = ("byteps", "gloo") if mode == "shm" else ("byteps",)
        names = [(check.__name__, not hasattr(check, "not_on_gloo")) for check in self.checks]
        try:
            results = run_ranks(
                run,
                self.world_size,
                self.checks[0].__module__,
                names,
                backends,
                env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **MODES[mode]},
                timeout_s=self.timeout_s,
            )
        except AssertionError as failure:
            self._outcomes.update({(backend, mode): str(failure) for backend in backends})
            return
        for backend in backends:
            self._outcomes[backend, mode] = [result.value[backend] for result in results]


def run(
    rank: int, world_size: int, module: str, names: Sequence[tuple[str, bool]], backends: Sequence[str]
) -> dict[str, dict[str, Outcome]]:
    """Run the checks of a module on each backend; what the job's ranks do."""
    warnings.simplefilter("ignore")
    checks = importlib.import_module(module)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for backend in backends:
        outcomes[backend] = {name: Outcome(None, "not reached: see the check before") for name, _ in names}
        dist.init_process_group(
            backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        for name, on_gloo in names:
            if backend == "gloo" and not on_gloo:
                continue
            outcome = outcomes[backend][name] = _outcome(getattr(checks, name), rank, world_size)
            if not _all_agree(dist.PrefixStore(f"{backend}/{name}", store), rank, world_size, not outcome.error):
                break  # the ranks are no longer at the same collective
        dist.destroy_process_group()
    return outcomes


def _outcome(check: Check, rank: int, world_size: int) -> Outcome:
    random.seed(SEED)
    torch.manual_seed(SEED)
    try:
        return Outcome(check(rank, world_size))
    except Exception:
        return Outcome(None, traceback.format_exc())
    finally:
        if "torch._dynamo" in __import__("sys").modules:
            torch._dynamo.reset()


def _all_agree(store: dist.Store, rank: int, world_size: int, passed: bool) -> bool:
    store.set(str(rank), str(passed))
    return len({store.get(str(other)) for other in range(world_size)}) == 1


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
