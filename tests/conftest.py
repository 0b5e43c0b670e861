"""What every test gets without asking: fixed seeds, no BYTEPS_* settings from outside, and a leak check.

Leak check: after each test no Python thread, child process, descriptor or mapped memfd may be left that was not there
before. A test that cannot help it is marked `@pytest.mark.may_leak("why")`.
Markers: `netns` tests are skipped where namespaces cannot be made; `processes` tests (all of tests/integration) run one
at a time under xdist. Hypothesis repeats the same examples each run; `--hypothesis-profile explore` looks for new ones.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
for _name in [name for name in os.environ if name.startswith("BYTEPS_")]:
    del os.environ[_name]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would the ranks

import numpy as np
import pytest
from hypothesis import settings

from benchmarks import netlab
from tests.integration import forks

SEED = 20190
LEAK_GRACE_S = 3.0
INTEGRATION = Path(__file__).with_name("integration")

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker("processes")
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") and (reason := netlab.why_not()):
        pytest.skip(reason)
    if item.get_closest_marker("processes"):
        forks.server()  # before the leak check looks


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """End what pytest_runtest_setup has started."""
    yield
    if forks.server.cache_info().currsize:
        forks.server().close()


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("may_leak"):
        yield
        return
    if "torch.distributed" in sys.modules:
        _open_what_torch_keeps()
    before = snapshot()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    pause = threading.Event()
    while leaked := snapshot() - before:
        if time.monotonic() > deadline:
            pytest.fail("left behind by this test:\n  " + "\n  ".join(sorted(leaked)), pytrace=False)
        gc.collect()
        pause.wait(0.01)


def snapshot() -> set[str]:
    """Return a line for each thread, child, descriptor and mapped memfd that this process has now."""
    return {*_threads(), *_children(), *_descriptors(), *_memfds()}


@functools.cache
def _open_what_torch_keeps() -> None:
    """Make the process's first TCPStore: libuv keeps a pipe of its own ever after."""
    sys.modules["torch.distributed"].TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not thread.name.startswith("pytest_timeout"):
            yield f"thread {thread.name} ({thread.native_id})"


def _children() -> Iterator[str]:
    ignored = getattr(resource_tracker._resource_tracker, "_pid", None)
    for task in _listdir("/proc/self/task"):
        for child in _read(f"/proc/self/task/{task}/children").split():
            if int(child) != ignored:
                command = _read(f"/proc/{child}/cmdline").replace("\0", " ").strip()
                yield f"child {child} {command[:100]}"


def _descriptors() -> Iterator[str]:
    ignored = str(getattr(resource_tracker._resource_tracker, "_fd", None))
    for number in _listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the directory's own descriptor, or closed meanwhile
            continue
        if number != ignored:
            yield f"descriptor {number} {target}"


def _memfds() -> Iterator[str]:
    for line in _read("/proc/self/maps").splitlines():
        if "/memfd:" in line:
            yield f"mapped {line}"


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
