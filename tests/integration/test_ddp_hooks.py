"""DDP's communication hooks, model averaging, and optimizers that run within the backward pass.

Not here: quantization_perchannel_hook, batched_powerSGD_hook and _apply_optimizer_in_backward, which fail in torch
itself on CPU.
Annotations are not postponed in this file: DDP compares those of a hook with types.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.integration.checks import Check, Suite, not_on_gloo
from tests.integration.models import batches, fit, mlp, sgd, weights

Weights = dict[str, torch.Tensor]
SMALL_BUCKETS_MB = 0.001


def ddp_of(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def hooked(rank: int, hook: Any, state: object = None, count: int = 4) -> Weights:
    ddp = ddp_of(mlp())
    ddp.register_comm_hook(state, hook)
    fit(ddp, sgd(ddp), rank, count)
    return weights(ddp)


def allreduce_hook(rank: int, world_size: int) -> Weights:
    return hooked(rank, default_hooks.allreduce_hook)


def fp16_compress_hook(rank: int, world_size: int) -> Weights:
    return hooked(rank, default_hooks.fp16_compress_hook)


def bf16_compression(rank: int, world_size: int) -> list[Weights]:
    """Torch takes these hooks for CUDA alone, by their names; another name gets them past it."""

    def plain(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(None, bucket)

    def wrapped(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(None, bucket)

    return [hooked(rank, plain), hooked(rank, wrapped)]


def fp16_compress_wrapper(rank: int, world_size: int) -> Weights:
    return hooked(rank, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def power_sgd_state(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, **options)


def power_sgd(rank: int, world_size: int) -> Weights:
    """Its callbacks block in further sums."""
    return hooked(rank, powerSGD_hook.powerSGD_hook, power_sgd_state(min_compression_rate=0.5), 6)


def power_sgd_without_error_feedback(rank: int, world_size: int) -> Weights:
    state = power_sgd_state(min_compression_rate=0.5, use_error_feedback=False, warm_start=False)
    return hooked(rank, powerSGD_hook.powerSGD_hook, state, 6)


def power_sgd_in_half_precision(rank: int, world_size: int) -> Weights:
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return hooked(rank, hook, power_sgd_state(min_compression_rate=0.5, orthogonalization_epsilon=1e-3), 6)


def hook_that_gathers(rank: int, world_size: int) -> Weights:
    """A hook of the user's own on another collective, with a callback in two stages."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gathered = [torch.empty_like(bucket.buffer()) for _ in range(world_size)]
        future = dist.all_gather(gathered, bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: torch.stack(gathered)).then(lambda done: done.value().mean(0))

    return hooked(rank, hook)


def quantized_by_hand(
    hook: Any, rank: int, world_size: int, expected: Weights, largest_error: float
) -> tuple[float, float]:
    """Train with a hook that rounds gradients to 8 bits; it must stay near plain DDP, and not be it."""
    actual = hooked(rank, hook)
    worst = max((actual[name] - expected[name]).abs().max().item() for name in expected)
    assert 0 < worst < largest_error, worst
    mine = torch.cat([value.flatten() for value in actual.values()])
    others = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)
    return worst, largest_error


@not_on_gloo("its futures hold a flat list, the hook reads a nested one as of NCCL")
def quantization_per_tensor(rank: int, world_size: int) -> tuple[float, float]:
    expected = hooked(rank, default_hooks.allreduce_hook)
    return quantized_by_hand(quantization_hooks.quantization_pertensor_hook, rank, world_size, expected, 0.02)


def post_local_sgd(rank: int, world_size: int) -> Weights:
    """Gradients are averaged in a subgroup (here this rank alone) after two steps, weights every second step."""
    groups = [dist.new_group([other]) for other in range(world_size)]
    ddp = ddp_of(mlp())
    state = post_localSGD_hook.PostLocalSGDState(None, groups[rank], start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    fit(ddp, PostLocalSGDOptimizer(sgd(ddp), averager), rank, 7)
    return weights(ddp)


def hierarchical_averager(rank: int, world_size: int) -> Weights:
    from collections import OrderedDict

    averager = hierarchical_model_averager.HierarchicalModelAverager(OrderedDict([(2, world_size)]))
    model = mlp()
    optimizer = sgd(model)
    for inputs, labels in batches(rank, 5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return weights(model)


def with_zero_step(rank: int, make_hook: Any, **options: Any) -> None:
    """Train with an optimizer that steps during the backward pass; the weights must be plain DDP's."""
    from_hook, from_plain = ddp_of(mlp(), gradient_as_bucket_view=True), ddp_of(mlp(), gradient_as_bucket_view=True)
    zero = ZeroRedundancyOptimizer(from_hook.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    from_hook.register_comm_hook(None, make_hook(default_hooks.allreduce_hook, from_hook, zero, **options))
    optimizer = torch.optim.SGD(from_plain.parameters(), lr=0.1)
    skipped = 2  # the hook needs the final buckets first, and does not step until it has them
    for step, (inputs, labels) in enumerate(batches(rank, 7)):
        for model in (from_hook, from_plain):
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
        zero.step()
        if step >= skipped:
            optimizer.step()
    assert not torch.equal(next(from_plain.parameters()), next(mlp().parameters()))
    torch.testing.assert_close(weights(from_hook), weights(from_plain), rtol=0, atol=0)


@not_on_gloo("torch refuses it: 'Gloo may hang'")
def zero_step_after_backward(rank: int, world_size: int) -> None:
    with_zero_step(rank, ddp_zero_hook.hook_with_zero_step)


@not_on_gloo("torch refuses it: 'Gloo may hang'")
def zero_step_of_shared_buckets(rank: int, world_size: int) -> None:
    with_zero_step(rank, ddp_zero_hook.hook_with_zero_step, shard_buckets=True)


@not_on_gloo("torch refuses it: 'Gloo may hang'")
def zero_step_between_buckets(rank: int, world_size: int) -> None:
    with_zero_step(rank, ddp_zero_hook.hook_with_zero_step_interleaved)


def optimizer_within_a_hook(rank: int, world_size: int) -> Weights:
    ddp = ddp_of(mlp())
    state = optimizer_overlap_hooks._OptimizerHookState(
        torch.distributed.optim.functional_sgd._FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
    )
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    ddp.register_comm_hook(None, hook)
    for inputs, labels in batches(rank):
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
    return weights(ddp)


SUITE = Suite(
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
    bf16_compression,
    power_sgd,
    power_sgd_without_error_feedback,
    power_sgd_in_half_precision,
    hook_that_gathers,
    quantization_per_tensor,
    post_local_sgd,
    hierarchical_averager,
    zero_step_after_backward,
    zero_step_of_shared_buckets,
    zero_step_between_buckets,
    optimizer_within_a_hook,
)


@SUITE.cases("shm", "server")
def test_ddp_hooks(check: Check, mode: str) -> None:
    SUITE.compare(check, mode)
