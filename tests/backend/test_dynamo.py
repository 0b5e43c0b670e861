"""torch.compile around us, and that nothing of it is imported without it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def test_all_reduce_does_not_import_dynamo():
    """It takes 1.3 s. Here only what we do ourselves: torch's own DistributedDataParallel imports it."""
    code = """
import sys, datetime, torch, torch.distributed as dist
from tests.fakes import Hub
from torch_bps.backend.process_group import ProcessGroupBytePS
hub = Hub(2, ghosts=(1,))
group = ProcessGroupBytePS(hub.groups[0], dist.HashStore(), 0, 2, datetime.timedelta(seconds=5))
work = group.allreduce([torch.ones(2)])
assert work.get_future().wait()[0].tolist() == [2, 2]
assert "torch._dynamo" not in sys.modules
group.shutdown()
"""
    env = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.may_leak("torch.compile keeps descriptors")
@pytest.mark.filterwarnings("ignore")
def test_compiled_ddp_equals_eager_ddp(job):
    """Dynamo would compile our frames when DDP's C++ calls them, and fails at it."""

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        model = DistributedDataParallel(layers)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


@pytest.mark.slow
@pytest.mark.may_leak("torch.compile keeps descriptors")
@pytest.mark.filterwarnings("ignore")
def test_collectives_in_a_compiled_function(job):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(2 * y.numel())
        dist.all_gather_into_tensor(out, y)
        return out + 1

    assert run(torch.ones(2)).tolist() == [5, 5, 5, 5]
