"""What the integration tests run on ranks: real training with stock DDP, and pieces of it."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_bps.core import runtime


def train(rank: int, world_size: int, steps: int = 8) -> dict[str, object]:
    """Train a small model with DDP on real images; returns its parameters and how they travelled."""
    images, labels = digits()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.BatchNorm1d(128), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        rows = slice(step * 60 + rank * (60 // world_size), step * 60 + (rank + 1) * (60 // world_size))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "parameters": [parameter.detach().numpy().copy() for parameter in model.parameters()],
        "losses": losses,
        "how": describe(),
    }


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (flat) and labels that the package ships."""
    import numpy as np

    import torch_bps

    with np.load(Path(torch_bps.__file__).parent / "data" / "digits.npz") as archive:
        return torch.from_numpy(archive["images"]).flatten(1).float() / 16, torch.from_numpy(archive["labels"]).long()


def describe() -> str:
    """Return the world group's description, "" for another backend."""
    running = runtime.current()
    return next(iter(running.groups.values())).describe() if running is not None else ""


def stripe(rank: int, world_size: int, times: int) -> dict[str, object]:
    """Add over two interfaces, then lose the second one of rank 1; returns how, what each had sent, and the error."""
    tensor = torch.arange(1_000_000, dtype=torch.float32)
    for _ in range(times):
        result = tensor * (rank + 1)
        dist.all_reduce(result)
        assert torch.equal(result, tensor * (world_size * (world_size + 1) // 2))
    sent = [int(Path(f"/sys/class/net/eth{link}/statistics/tx_bytes").read_text()) for link in (0, 1)]
    dist.barrier()
    if rank == 1:
        subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
    try:
        for _ in range(times):
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        return {"how": describe(), "sent": sent, "error": str(error)}
    raise AssertionError("an interface is down and nobody noticed")


def leftovers() -> dict[str, object]:
    """Return what a destroyed group may have left in this process."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    with open("/proc/self/maps") as maps:
        memfds = [line for line in maps if "/memfd:" in line]
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        pids = children.read().split()
    return {
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("byteps")],
        "fds": sorted(fds),
        "memfds": memfds,
        "children": pids,
    }


def open_and_destroy(rank: int, world_size: int, times: int) -> list[dict[str, object]]:
    """Open, use and destroy the world group several times; returns what each left."""
    left = [leftovers()]
    for _ in range(times):
        dist.init_process_group("byteps")
        tensor = torch.full((100_000,), float(rank))
        dist.all_reduce(tensor)
        assert tensor[0] == sum(range(world_size))
        dist.destroy_process_group()
        left.append(leftovers())
    return left
