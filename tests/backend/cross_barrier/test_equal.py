"""The weights are those of plain DDP, bit for bit, whatever optimizer, model and loop."""

from __future__ import annotations

import pytest
import torch

from tests.backend.cross_barrier.training import assert_same

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9, dampening=0.1, maximize=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(world, optimizer: str) -> None:
    assert_same(optimizer_of=OPTIMIZERS[optimizer])
