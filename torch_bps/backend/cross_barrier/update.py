"""Let the user's own optimizer update some of its parameters, with the hyperparameters of an earlier moment.

Torch's optimizers step what their `param_groups` list. So these are swapped for groups of a few parameters while `step`
runs; the state of each parameter stays where it always is. Called by barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

Group = dict[str, Any]


def hyperparameters(optimizer: Optimizer) -> list[Group]:
    """Return what each param group says now, but for its parameters."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value  # schedulers fill such an lr in place
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def groups_of(
    parameters: Collection[nn.Parameter], places: dict[nn.Parameter, int], said: Sequence[Group]
) -> list[Group]:
    """Return param groups of these parameters alone.

    Args:
        parameters: all of them the optimizer's.
        places: parameter -> number of its group.
        said: what each group says (`hyperparameters`).
    """
    chosen: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        chosen.setdefault(places[parameter], []).append(parameter)
    return [{**said[place], "params": members} for place, members in sorted(chosen.items())]


def places_of(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the number of each parameter's group."""
    return {parameter: place for place, group in enumerate(optimizer.param_groups) for parameter in group["params"]}


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether somebody asked to be called before or after its steps."""
    hooks: Any = torch_optimizer
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or hooks._global_optimizer_pre_hooks
        or hooks._global_optimizer_post_hooks
    )


def step_only(optimizer: Optimizer, groups: list[Group]) -> None:
    """Step these param groups, without step hooks."""
    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    whole = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = whole


def update(optimizer: Optimizer, groups: list[Group], gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Step these groups from these gradients, whatever the parameters' `grad` are; they are left as they were."""
    before = [parameter.grad for parameter, _ in gradients]
    with outside_the_forward(gradients[0][0].device.type):
        try:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            step_only(optimizer, groups)
        finally:
            for (parameter, _), gradient_before in zip(gradients, before, strict=True):
                parameter.grad = gradient_before


@contextmanager
def outside_the_forward(device_type: str) -> Iterator[None]:
    """Undo for a moment what a forward pass may run under: gradients, inference mode, autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
