"""How a process ends: with and without destroy, with an exception, in a forked child; always with the right code."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREAMBLE = """
import os, sys, threading
from types import ModuleType
import torch, torch.distributed as dist
from tests.fakes import Hub
hub = Hub(2, ghosts=(1,))
runtime = ModuleType("torch_bps.core.runtime")
runtime.open_group = lambda *args, **rest: hub.groups[0]
sys.modules["torch_bps.core.runtime"] = runtime
import torch_bps.core
torch_bps.core.runtime = runtime
import torch_bps
dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2)

def busy(done):
    "What may be going on in a worker at the end: a torch operation, with the interpreter's lock released."
    x = torch.ones(300, 300)
    for _ in range(200):
        x = (x @ x).clamp(0, 1)
    return x

def start_busy():
    hub.hold()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future().then(busy)
    hub.go()
    work.wait()
    return future
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PREAMBLE + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("start_busy(); dist.destroy_process_group()", 0),
        ("start_busy()", 0),
        ("start_busy(); sys.exit(3)", 3),
        ("start_busy(); raise ValueError('in the script')", 1),
        ("hub.hold(); work = dist.all_reduce(torch.ones(4), async_op=True)", 0),
    ],
    ids=["destroyed", "forgotten", "exit code", "exception", "work under way"],
)
def test_the_process_ends_with_its_own_code(code, status):
    done = run(code)
    assert done.returncode == status, done.stderr
    if status == 0:
        assert done.stderr == ""


def test_forked_child():
    """Everything is refused there, nothing hangs, and the parent goes on."""
    done = run(
        """
dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda done: done).wait()
start_busy()  # so the child inherits a pool with a thread in it that does not exist there
hub.hold()
pending = dist.all_reduce(torch.ones(4), async_op=True)
parent = os.getpid()
child = os.fork()
if child == 0:
    def refused(call):
        try:
            call()
        except torch_bps.ClosedError as error:
            assert f"process {parent}" in str(error) and "forked child" in str(error), error
        else:
            raise AssertionError("not refused")
    try:
        refused(lambda: dist.all_reduce(torch.ones(4)))
        refused(lambda: dist.barrier())
        refused(pending.wait)
        refused(pending.get_future)
        pending = None
        dist.destroy_process_group()
        hub.groups[0].hub = Hub(2, ghosts=(1,))  # a child may have groups of its own
        dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2)
        tensor = torch.ones(2)
        assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0].tolist() == [2, 2]
        dist.destroy_process_group()
    except BaseException as error:
        print("child:", repr(error), file=sys.stderr)
        os._exit(7)
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
hub.go()
pending.wait()
dist.destroy_process_group()
assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("byteps-")]
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
