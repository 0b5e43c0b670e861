"""The weights are those of plain DDP, bit for bit, whatever optimizer, model and loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from tests.backend.cross_barrier import nets
from tests.backend.cross_barrier.held import HeldGroup
from tests.backend.cross_barrier.training import assert_same, batches, loss_of, mlp, plain_loop
from torch_bps import CrossBarrier

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9, dampening=0.1, maximize=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
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
def test_optimizers(world: HeldGroup, optimizer: str) -> None:
    assert_same(optimizer_of=OPTIMIZERS[optimizer])


# ---- models


def adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied": (nets.Tied, {}),
    "bare": (nets.Bare, {}),
    "parametrized": (nets.Parametrized, {}),
    "functional": (nets.Functional, {}),
    "recurrent": (nets.Recurrent, {}),
    "attention": (nets.Attention, {}),
    "normed": (nets.Normed, {}),
    "channels last": (nets.ChannelsLast, {}),
    "checkpointed": (nets.Checkpointed, {}),
    "skipping": (nets.Skipping, {"find_unused_parameters": True}),
    "partly used": (nets.PartlyUsed, {"find_unused_parameters": True}),
    "static": (mlp, {"static_graph": True}),
    "static, partly used": (nets.PartlyUsed, {"static_graph": True}),
}


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_models(world: HeldGroup, model: str, gradient_as_bucket_view: bool) -> None:
    make, options = MODELS[model]
    assert_same(make, adamw, **options, gradient_as_bucket_view=gradient_as_bucket_view)


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_layers_that_only_other_ranks_use(world: HeldGroup, gradient_as_bucket_view: bool) -> None:
    world.others_use_all = True
    assert_same(
        nets.Skipping,
        adamw,
        find_unused_parameters=True,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


# ---- loops: what users do in between

Change = Callable[[DistributedDataParallel, Optimizer], None]


def loop(
    *,
    scheduler_of: Callable[[Optimizer], LRScheduler] | None = None,
    before_step: Change | None = None,
    after_step: Change | None = None,
    zero_grad: Callable[[DistributedDataParallel, Optimizer], None] = lambda ddp, optimizer: optimizer.zero_grad(),
    zero_first: bool = True,
) -> Callable[[DistributedDataParallel, Optimizer, CrossBarrier | None], list[float]]:
    """Return a training loop that does these things."""

    def run(ddp: DistributedDataParallel, optimizer: Optimizer, barrier: CrossBarrier | None) -> list[float]:
        losses = []
        scheduler = scheduler_of(optimizer) if scheduler_of else None
        for inputs in batches():
            if zero_first:
                zero_grad(ddp, optimizer)
            loss = loss_of(ddp, inputs)
            if not zero_first:
                zero_grad(ddp, optimizer)
            loss.backward()
            if before_step:
                before_step(ddp, optimizer)
            optimizer.step()
            if scheduler:
                scheduler.step()
            if after_step:
                after_step(ddp, optimizer)
            losses.append(loss.item())
        return losses

    return run


def accumulating(ddp: DistributedDataParallel, optimizer: Optimizer, barrier: CrossBarrier | None) -> list[float]:
    losses = []
    for number, inputs in enumerate(batches(9)):
        if number % 3 < 2:
            with ddp.no_sync():
                loss = loss_of(ddp, inputs)
                loss.backward()
        else:
            loss = loss_of(ddp, inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stepping_every_other_time(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    losses = []
    for number, inputs in enumerate(batches(8)):
        loss = loss_of(ddp, inputs)
        loss.backward()  # a sum each time, of what has come together since the last step
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_closures(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    losses = []
    for inputs in batches():

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(ddp, inputs)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def with_a_scaler(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    losses = []
    for number, inputs in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_of(ddp, inputs)
        scaler.scale(loss * float("inf") if number == 3 else loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def evaluating(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    losses = []
    for number, inputs in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(ddp.train(), inputs).backward()
        optimizer.step()
        ddp.eval()
        model = (ddp, ddp.module)[number % 2]
        with torch.no_grad() if number % 3 else torch.inference_mode():  # the first update creates the state
            losses.append(loss_of(model, inputs).item())
    return losses


def under_autocast(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    losses = []
    for inputs in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ddp, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saving_and_loading(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    losses = []
    saved = None
    for number, inputs in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_of(ddp, inputs)
        loss.backward()
        optimizer.step()
        if number == 2:
            saved = copy.deepcopy([ddp.state_dict(), optimizer.state_dict()])
        if number == 4:
            assert saved is not None
            optimizer.load_state_dict(saved[1])
            ddp.load_state_dict(saved[0])
        losses.append(loss.item())
    return losses


def averaging(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    average = torch.optim.swa_utils.AveragedModel(ddp.module)
    losses = []
    for inputs in batches():
        optimizer.zero_grad()
        loss_of(ddp, inputs).backward()
        optimizer.step()
        average.update_parameters(ddp.module)
        copied = copy.deepcopy(ddp.module)
        assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        losses += [loss_of(average, inputs).item(), loss_of(copied, inputs).item()]
    return losses


def reading_gradients(ddp: DistributedDataParallel, optimizer: Optimizer, _: object) -> list[float]:
    losses = []
    for number, inputs in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(ddp, inputs).backward()
        if number % 2:
            optimizer.step()
        losses += [parameter.grad.sum().item() for parameter in [*ddp.parameters()][::3] if parameter.grad is not None]
        if number % 2 == 0:
            optimizer.step()
        losses += [parameter.norm().item() for parameter in [*ddp.parameters()][1::3]]
    return losses


def perturbing(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    """Give up a gradient, replace one, and change one in place."""
    replacing(ddp, optimizer)
    _, _, third, *_ = ddp.parameters()
    assert third.grad is not None
    third.grad.mul_(0.5)


def replacing(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    """Give up a gradient, and replace one, of two layers."""
    first, _, _, other, *_ = ddp.parameters()
    first.grad = None
    other.grad = torch.ones_like(other)


def stepping_again(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    optimizer.step()


def by_halves(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def zero_in_place(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def nothing(*_: object) -> None:
    pass


LOOPS = {
    "plain": plain_loop,
    "scheduled": loop(scheduler_of=by_halves),
    "one cycle": loop(scheduler_of=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6)),
    "zero in place": loop(zero_grad=zero_in_place),
    "zero in place after forward": loop(zero_grad=zero_in_place, zero_first=False),
    "zero after forward": loop(zero_first=False),
    "zero by the model": loop(zero_grad=lambda ddp, optimizer: ddp.zero_grad()),
    "zero never": loop(zero_grad=nothing),
    "zero at once": loop(after_step=lambda ddp, optimizer: optimizer.zero_grad()),
    "zero at once in place": loop(after_step=zero_in_place),
    "clipped norm": loop(before_step=lambda ddp, _: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)),
    "clipped value": loop(before_step=lambda ddp, _: torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)),
    "replaced": loop(before_step=replacing),
    "perturbed": loop(before_step=perturbing),
    "stepping again": loop(after_step=stepping_again),
    "accumulating": accumulating,
    "stepping every other time": stepping_every_other_time,
    "closures": with_closures,
    "scaler": with_a_scaler,
    "evaluating": evaluating,
    "autocast": under_autocast,
    "saving and loading": saving_and_loading,
    "averaging": averaging,
    "reading": reading_gradients,
}


def two_groups(parameters: Iterator[nn.Parameter]) -> Optimizer:
    every = [*parameters]
    biases = [parameter for parameter in every if parameter.ndim == 1]
    others = [parameter for parameter in every if parameter.ndim > 1]
    foreign = nn.Parameter(torch.ones(2))  # not of the model; updated as ever
    foreign.grad = torch.ones(2)
    return torch.optim.SGD(
        [{"params": others, "weight_decay": 0.05}, {"params": biases, "lr": 0.2}, {"params": [foreign]}],
        lr=0.1,
        momentum=0.9,
    )


def adam_with_tensor_lr(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.01))


@pytest.mark.parametrize("optimizer_of", [two_groups, adam_with_tensor_lr])
@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_loops(
    world: HeldGroup, name: str, gradient_as_bucket_view: bool, optimizer_of: Callable[[Any], Optimizer]
) -> None:
    assert_same(optimizer_of=optimizer_of, loop=LOOPS[name], gradient_as_bucket_view=gradient_as_bucket_view)


def test_buckets_that_a_static_graph_moves(world: HeldGroup) -> None:
    assert_same(loop=LOOPS["zero never"], static_graph=True, gradient_as_bucket_view=True)


def test_updates_within_autocast(world: HeldGroup) -> None:
    """Adafactor multiplies matrices, which autocast would do in half precision."""
    assert_same(optimizer_of=OPTIMIZERS["Adafactor"], loop=under_autocast)


def test_a_scheduler_made_before(world: HeldGroup) -> None:
    """The cross-barrier then wraps what the scheduler wrapped."""
    schedulers: list[LRScheduler] = []

    def with_scheduler(parameters: Iterator[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        schedulers.append(by_halves(optimizer))
        return optimizer

    assert_same(optimizer_of=with_scheduler, loop=loop(after_step=lambda *_: schedulers[-1].step()))


def test_step_hooks_see_all_gradients_before_and_all_weights_after(world: HeldGroup) -> None:
    seen: list[list[torch.Tensor]] = []

    def hooked(parameters: Iterator[nn.Parameter]) -> Optimizer:
        every = [*parameters]
        optimizer = torch.optim.SGD(every, lr=0.1)
        seen.append([])
        note = seen[-1]
        optimizer.register_step_pre_hook(lambda *_: note.append(torch.stack([p.grad.sum() for p in every])))
        optimizer.register_step_post_hook(lambda *_: note.append(torch.stack([p.sum().detach() for p in every])))
        return optimizer

    assert_same(optimizer_of=hooked)
    assert len(seen[0]) == 12
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
