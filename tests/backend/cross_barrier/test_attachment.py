"""What is refused, and that all is given back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.backend.cross_barrier.held import HeldGroup
from tests.backend.cross_barrier.test_overlap import INPUTS, Deep, ready, train_step
from tests.backend.cross_barrier.training import assert_same, batches, ddp_of, mlp, sgd
from torch_bps import ConfigError, UnsupportedError, cross_barrier


class MyOptimizer(torch.optim.SGD):
    pass


def with_hook(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


def with_built_in_hook(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    return ddp


class Halves(nn.Parameter):
    pass


def with_own_parameter() -> nn.Module:
    net = mlp()
    net.extra = Halves(torch.ones(2))
    return net


def compiled_in_place() -> nn.Module:
    net = mlp()
    net[0].compile()
    return net


def own(optimizer: Callable[..., Any] = sgd) -> Callable[[DistributedDataParallel], Any]:
    return lambda ddp: optimizer(ddp.parameters())


def with_replaced_step(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = sgd(ddp.parameters())
    optimizer.step = lambda: None  # type: ignore[method-assign]
    return optimizer


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], type[Exception], str]] = {
    "no DDP": (mlp, own(), ConfigError, "takes a DistributedDataParallel model, not a Sequential"),
    "no optimizer": (lambda: ddp_of(mlp()), lambda ddp: 3, ConfigError, "takes a torch.optim.Optimizer, not a int"),
    "another model's": (lambda: ddp_of(mlp()), lambda _: sgd(mlp().parameters()), ConfigError, "holds no parameter"),
    "LBFGS": (lambda: ddp_of(mlp()), own(torch.optim.LBFGS), UnsupportedError, "needs all gradients at once"),
    "sparse": (lambda: ddp_of(mlp()), own(torch.optim.SparseAdam), UnsupportedError, "SparseAdam"),
    "unknown": (lambda: ddp_of(mlp()), own(lambda p: MyOptimizer(p, lr=1.0)), UnsupportedError, "per_parameter=True"),
    "replaced step": (lambda: ddp_of(mlp()), with_replaced_step, UnsupportedError, "whose step was replaced"),
    "a hook": (lambda: with_hook(ddp_of(mlp())), own(), UnsupportedError, "leave out register_comm_hook"),
    "a built-in hook": (lambda: with_built_in_hook(ddp_of(mlp())), own(), UnsupportedError, "one hook only"),
    "sparse gradients": (
        lambda: ddp_of(nn.Sequential(nn.Embedding(3, 4, sparse=True))),
        own(),
        UnsupportedError,
        "the sparse gradients of 0",
    ),
    "own parameter": (lambda: ddp_of(with_own_parameter()), own(), UnsupportedError, "a parameter that is a Halves"),
    "compiled in place": (lambda: ddp_of(compiled_in_place()), own(), UnsupportedError, r"compiled code \(0\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(world: HeldGroup, case: str) -> None:
    make, optimizer_of, kind, message = REFUSED[case]
    model = make()
    optimizer = optimizer_of(model)
    with pytest.raises(kind, match=message):
        cross_barrier(model, optimizer)


def test_two_at_once_are_refused(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    for second in (optimizer, sgd(ddp.parameters())):
        with pytest.raises(UnsupportedError, match="or a cross-barrier"):
            cross_barrier(ddp, second)
    with pytest.raises(UnsupportedError, match="whose step was replaced"):
        cross_barrier(ddp_of(Deep()), optimizer)
    barrier.close()


def test_join_is_refused(world: HeldGroup) -> None:
    ddp, _, barrier = ready()
    ddp._join_config = ddp._join_config._replace(enable=True)
    with pytest.raises(UnsupportedError, match=r"join\(\)"):
        ddp(INPUTS)
    barrier.close()


def test_an_optimizer_that_the_user_vouches_for(world: HeldGroup) -> None:
    assert_same(optimizer_of=lambda parameters: MyOptimizer(parameters, lr=0.1, momentum=0.9), per_parameter=True)


def hooks_of(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> list[int]:
    counts = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in ddp.modules()]
    return [
        *counts,
        len(optimizer._optimizer_state_dict_pre_hooks),
        len(optimizer._optimizer_load_state_dict_pre_hooks),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_close_gives_all_back_and_the_next_one_may_come(world: HeldGroup, world_size: int) -> None:
    torch.manual_seed(1)
    ddp = ddp_of(mlp(), gradient_as_bucket_view=True)
    plain = ddp_of(copy.deepcopy(ddp.module), gradient_as_bucket_view=True)
    optimizer, plain_optimizer = sgd(ddp.parameters()), sgd(plain.parameters())
    before = hooks_of(ddp, optimizer)
    for crossing in (True, False, True):
        barrier = cross_barrier(ddp, optimizer) if crossing else None
        for inputs in batches(4):
            train_step(ddp, optimizer, inputs)
            train_step(plain, plain_optimizer, inputs)
        if barrier is not None:
            assert hooks_of(ddp, optimizer) != before
            barrier.close()
            barrier.close()
        assert hooks_of(ddp, optimizer) == before
        assert "step" not in vars(optimizer)
        assert {type(parameter) for parameter in ddp.parameters()} == {nn.Parameter}
        assert not any(parameter._backward_hooks for parameter in ddp.parameters())
        torch.testing.assert_close(ddp.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_scheduler_goes_on_after_close(world: HeldGroup) -> None:
    ddp = ddp_of(mlp())
    optimizer = sgd(ddp.parameters())
    with cross_barrier(ddp, optimizer) as barrier:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train_step(ddp, optimizer)
        scheduler.step()
    train_step(ddp, optimizer)
    scheduler.step()
    assert not barrier._arrivals
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_copies_and_pickles_of_the_model_are_free_of_it(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    train_step(ddp, optimizer)
    copied = copy.deepcopy(ddp.module)
    file = io.BytesIO()
    torch.save(ddp.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    barrier.close()
    for other in (copied, loaded):
        assert {type(parameter) for parameter in other.parameters()} == {nn.Parameter}
        torch.testing.assert_close(other.state_dict(), ddp.module.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(other(INPUTS), ddp.module(INPUTS), rtol=0, atol=0)
    copy.deepcopy(optimizer).step()


def test_a_failed_attempt_leaves_no_trace(world: HeldGroup) -> None:
    ddp = ddp_of(mlp())
    with pytest.raises(UnsupportedError):
        cross_barrier(ddp, MyOptimizer(ddp.parameters(), lr=1.0))
    assert not ddp._comm_hooks
    cross_barrier(ddp, sgd(ddp.parameters())).close()
