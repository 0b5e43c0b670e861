"""Training scripts of the frameworks above PyTorch, as their users write them: `torchrun frameworks.py NAME BACKEND`.

Run by test_frameworks. Each rank prints a digest of its final weights, and the backend they travelled by, as a line of
JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.jobs import digits


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 10))


def data() -> DataLoader[Any]:
    images, labels = digits()
    return DataLoader(TensorDataset(images[:256], labels[:256]), batch_size=32)


def with_accelerate(backend: str) -> nn.Module:
    """On CPU accelerate itself asks for gloo and takes no other name, so the group is opened before it."""
    import accelerate

    dist.init_process_group(backend)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model()
    net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data())
    for _ in range(2):
        for images, labels in batches:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.gather(loss.detach()).shape == (dist.get_world_size(),)
    assert accelerator.reduce(torch.ones(2), "sum").tolist() == [dist.get_world_size()] * 2
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(net)


def with_lightning(backend: str) -> nn.Module:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend=backend),
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, data())
    return module.net


def with_fabric(backend: str) -> nn.Module:
    import lightning
    from lightning.fabric.strategies import DDPStrategy

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    net = model()
    wrapped, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for images, labels in fabric.setup_dataloaders(data()):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(wrapped(images), labels))
        optimizer.step()
    assert fabric.all_gather(torch.ones(3)).shape == (dist.get_world_size(), 3)
    fabric.barrier()
    return net


def main(name: str, backend: str) -> None:
    warnings.simplefilter("ignore")
    net = {"accelerate": with_accelerate, "lightning": with_lightning, "fabric": with_fabric}[name](backend)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()
    print(json.dumps({"rank": dist.get_rank(), "backend": dist.get_backend(), "weights": digest}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
