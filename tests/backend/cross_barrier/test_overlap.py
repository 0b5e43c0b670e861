"""What waits for what: sums are held, and waiting for one that is held fails the test."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.backend.cross_barrier.held import HeldGroup, HeldWork
from tests.backend.cross_barrier.training import WIDTH, batches, ddp_of, loss_of, sgd
from torch_bps import BytePSError, CrossBarrier, cross_barrier

LAYERS = 4
INPUTS = torch.ones(2, WIDTH)


class Deep(nn.Module):
    """Layers that count how many have been passed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.passed = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            self.passed = number
            inputs = layer(inputs).tanh()
        self.passed = LAYERS
        return inputs


class Reversed(Deep):
    """Uses its layers in another order than it registers them in."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


class Stealthy(Deep):
    """Uses a parameter as a C++ extension would that is given the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.Module()  # whose forward never runs
        self.holder.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            inputs = inputs + self.holder.offset
        return super().forward(inputs)


def ready(
    net: nn.Module | None = None, count: int = 2, **options: object
) -> tuple[DistributedDataParallel, Optimizer, CrossBarrier]:
    """Return a model with a cross-barrier whose first two steps, which wait for all, are done."""
    ddp = ddp_of(net or Deep(), **options)
    optimizer = sgd(ddp.parameters())
    barrier = cross_barrier(ddp, optimizer)
    for inputs in batches(count):
        train_step(ddp, optimizer, inputs)
    return ddp, optimizer, barrier


def train_step(ddp: DistributedDataParallel, optimizer: Optimizer, inputs: torch.Tensor = INPUTS) -> None:
    optimizer.zero_grad()
    loss_of(ddp, inputs).backward()
    optimizer.step()


def held_step(world: HeldGroup, ddp: DistributedDataParallel, optimizer: Optimizer) -> list[HeldWork]:
    """Train a step whose sums are held: backward and step return all the same. Returns the sums, first layer first."""
    world.sums.clear()
    world.hold = True
    train_step(ddp, optimizer)
    world.hold = False
    assert len(world.sums) == LAYERS, "a bucket a layer"
    return world.sums[::-1]


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_a_layer_waits_for_its_own_bucket_only(world: HeldGroup, gradient_as_bucket_view: bool) -> None:
    ddp, optimizer, barrier = ready(gradient_as_bucket_view=gradient_as_bucket_view)
    before = [layer.weight.detach().clone() for layer in ddp.module.layers]
    sums = held_step(world, ddp, optimizer)
    optimizer.zero_grad()
    for number in range(LAYERS):
        with pytest.raises(AssertionError, match="held"):
            ddp(INPUTS)
        assert ddp.module.passed == number
        with torch._C.DisableTorchFunctionSubclass():
            updated = [
                not torch.equal(layer.weight, weight) for layer, weight in zip(ddp.module.layers, before, strict=True)
            ]
        assert updated == [other < number for other in range(LAYERS)]
        barrier._failure = None  # the test's own assertion, not a lost peer
        sums[number].held = False
    ddp(INPUTS)
    assert ddp.module.passed == LAYERS


def test_buckets_that_are_back_are_updated_while_another_is_waited_for(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    first, second, third, last = held_step(world, ddp, optimizer)
    for work in (third, last):
        work.held = False
        work.release()
    with pytest.raises(AssertionError, match="held"):
        ddp(INPUTS)
    assert [work.waits for work in (first, second, third, last)] == [1, 0, 1, 1]
    barrier._failure = None


def test_what_is_here_already_is_not_waited_for_again(world: HeldGroup) -> None:
    ddp, optimizer, _ = ready()
    sums = held_step(world, ddp, optimizer)
    for work in sums:
        work.held = False
    ddp(INPUTS)
    ddp(INPUTS)
    assert [work.waits for work in sums] == [1] * LAYERS


@pytest.mark.parametrize("net", [Deep, Reversed])
def test_priorities_follow_the_first_forward_pass(world: HeldGroup, net: type[Deep]) -> None:
    ddp, _, _ = ready(net())
    used = [*ddp.module.layers] if net is Deep else [*reversed(ddp.module.layers)]
    last_pass = world.sums[-LAYERS:]
    assert len({work.priority for work in last_pass}) == LAYERS
    by_priority = sorted(last_pass, key=lambda work: work.priority)
    firsts = [layer.weight for layer in used]
    barrier_plans = {plan.priority: plan for plan in ready_plans(ddp)}
    for work, weight in zip(by_priority, firsts, strict=True):
        assert any(parameter is weight for parameter in barrier_plans[work.priority].parameters)


def ready_plans(ddp: DistributedDataParallel):
    return ddp._comm_hooks[0][1].on_bucket.__self__._plans.values()


USES = {
    "an operation": lambda layer: layer.weight.norm(),
    "data": lambda layer: layer.weight.data,
    "in place": lambda layer: nn.init.zeros_(layer.weight),
    "a list of tensors": lambda layer: torch.cat([layer.weight, layer.weight]),
    "vector": lambda layer: nn.utils.parameters_to_vector(layer.parameters()),
    "keyword": lambda layer: torch.mul(input=layer.bias, other=2),
    "address": lambda layer: layer.weight.data_ptr(),
    "copying": lambda layer: pickle.dumps(layer.weight),
    "repr": lambda layer: repr(layer.weight),
    "state_dict": lambda layer: layer.state_dict(),
    "state_dict, loaded": lambda layer: layer.load_state_dict(Deep().layers[0].state_dict()),
    "its forward": lambda layer: layer(INPUTS),
    "its gradient": lambda layer: layer.weight.grad.norm(),
    "its gradient, cleared": lambda layer: layer.weight.grad.zero_(),
    "its gradient, clipped": lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
}


@pytest.mark.parametrize("use", USES)
def test_what_uses_a_parameter_or_gradient_waits_for_it(world: HeldGroup, use: str) -> None:
    ddp, optimizer, barrier = ready()
    sums = held_step(world, ddp, optimizer)
    with pytest.raises(AssertionError, match="held"):
        USES[use](ddp.module.layers[2])
    barrier._failure = None
    if "gradient" in use:
        for work in sums:
            work.held = False
    sums[2].held = False
    USES[use](ddp.module.layers[2])
    assert sums[2].is_completed()


def test_asking_for_shapes_and_gradients_waits_for_nothing(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    sums = held_step(world, ddp, optimizer)
    for parameter in ddp.parameters():
        assert parameter.shape == parameter.size()
        assert (parameter.dtype, parameter.device.type, parameter.requires_grad) == (torch.float32, "cpu", True)
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert isinstance(parameter, nn.Parameter)
    optimizer.zero_grad()
    ddp.zero_grad()
    ddp.train()
    assert [work.waits for work in sums] == [0] * LAYERS
    assert barrier._arrivals


def test_optimizer_state_waits_for_all(world: HeldGroup) -> None:
    ddp, optimizer, _ = ready()
    sums = held_step(world, ddp, optimizer)
    for work in sums:
        work.held = False
    optimizer.state_dict()
    assert [work.waits for work in sums] == [1] * LAYERS


def test_evaluation_waits_for_all(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready()
    held_step(world, ddp, optimizer)
    with pytest.raises(AssertionError, match="held"), torch.no_grad():
        ddp.module(INPUTS)
    assert ddp.module.passed == LAYERS  # of the pass before
    barrier._failure = None


def test_all_is_finished_when_a_forward_pass_has_ended(world: HeldGroup) -> None:
    class Early(Deep):
        stop = False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers[0](inputs) if self.stop else super().forward(inputs)

    ddp, optimizer, barrier = ready(Early(), find_unused_parameters=True)
    sums = held_step(world, ddp, optimizer)
    for work in sums:
        work.held = False
    ddp.module.stop = True
    ddp(INPUTS)
    assert [work.waits for work in sums] == [1] * LAYERS
    assert {type(parameter) for parameter in ddp.parameters()} == {nn.Parameter, barrier._parameter_type}
    ddp.module.layers[1].weight.norm()
    assert type(ddp.module.layers[1].weight) is nn.Parameter


def test_a_use_that_python_does_not_see_is_an_error(world: HeldGroup) -> None:
    ddp, optimizer, _ = ready(Stealthy())  # all is here before the first passes
    optimizer.zero_grad()
    with pytest.raises(BytePSError, match=r"parameter: holder\.offset\nhint: call synchronize"):
        loss_of(ddp, INPUTS).backward()
    with pytest.raises(BytePSError, match="failed: a parameter was used before its update"):
        optimizer.step()


def test_a_use_that_python_does_not_see_after_synchronize(world: HeldGroup) -> None:
    ddp, optimizer, barrier = ready(Stealthy())
    for inputs in batches(3):
        barrier.synchronize()
        train_step(ddp, optimizer, inputs)


def test_a_forward_pass_without_hooks_is_an_error(world: HeldGroup) -> None:
    ddp, _, _ = ready(Stealthy())
    with pytest.raises(BytePSError, match=r"not model\.forward"):
        ddp.forward(INPUTS).sum().backward()
