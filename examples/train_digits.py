"""Train a small CNN on handwritten digits with stock DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py
    torchrun --standalone --nproc-per-node 2 examples/train_digits.py --backend gloo
    BYTEPS_FORCE_DISTRIBUTED=1 torchrun --standalone --nproc-per-node 2 examples/train_digits.py

Several machines, on each (i = 0, 1, ..):

    torchrun --nnodes 2 --node-rank i --master-addr HOST0 --nproc-per-node 2 examples/train_digits.py

The backend's name is all that this script knows of torch_bps: `import torch` makes it known.
"""

import argparse
import importlib.util
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DATA = Path(importlib.util.find_spec("torch_bps").origin).with_name("data") / "digits.npz"
BATCH = 60  # of all ranks together, so that any number of ranks trains alike
NUM_TEST = 360


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, split alike on every rank and for every seed."""
    with np.load(DATA) as archive:
        images = torch.from_numpy(archive["images"]).unsqueeze(1).float() / 16
        labels = torch.from_numpy(archive["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Return a CNN of 0.3 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of the test set that is recognised; each rank looks at its own part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (tensor[rank::world_size] for tensor in test.tensors)
    correct = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--backend", default="byteps")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the trained parameters to this file")
    args = parser.parse_args()

    dist.init_process_group(args.backend, timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train, test = load_digits()
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=max(BATCH // world_size, 1), sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / (len(loader) * world_size)
        right, seconds = accuracy(model.module, test), time.perf_counter() - started
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}, test accuracy {right:.2%}, {seconds:.2f} s", flush=True)
    if rank == 0 and args.save:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()  # wait for rank 0; and gloo aborts (SIGABRT) if Python ends while its thread still holds a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
