"""Tensors that finish themselves when they are used: how nobody sees a gradient or a parameter before its time.

While a bucket is under way, its gradients, and after the optimizer's step its parameters, are of the two classes made
here. Any use that goes through torch's Python functions, wherever in the user's program, comes by `__torch_function__`,
which has the tensor finished first; then its class is the usual one again, and the function runs as always.

    Tensor    ──backward──> UnfinishedGradient    ──used, or its bucket is finished──> Tensor
    Parameter ──step()────> UnfinishedParameter   ──used, or its bucket is finished──> Parameter

What uses a tensor without asking Python (a C++ extension called with a bare weight) is not seen: see barrier.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

_T: Any = torch.Tensor
_HARMLESS: Final = frozenset(
    {
        *(_T.grad.__get__, _T.grad.__set__, _T.grad.__delete__),  # a gradient looks after itself
        *(_T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.requires_grad.__get__, _T.is_leaf.__get__),
        *(_T.size, _T.stride, _T.numel, _T.dim),
    }
)
"""what may be asked of an unfinished tensor: nothing of it depends on its elements"""


def unfinished_types(
    finish_gradients: Callable[[], None], finish_parameter: Callable[[nn.Parameter], None]
) -> tuple[type[torch.Tensor], type[nn.Parameter]]:
    """Return the two classes for one model.

    Args:
        finish_gradients: called when a gradient is used; leaves no tensor of the first class that is still alive.
        finish_parameter: called with a parameter that is used; gives it its usual class back.
    """

    class UnfinishedGradient(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func not in _HARMLESS:
                finish_gradients()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    class UnfinishedParameter(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in _HARMLESS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            for parameter in [*_instances_in((args, kwargs), cls)]:
                finish_parameter(parameter)
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            finish_parameter(self)  # torch's own would ask for the class before it asks for the elements
            return copy.deepcopy(self, memo)

    return UnfinishedGradient, UnfinishedParameter


def _instances_in(value: object, kind: type[nn.Parameter]) -> Iterator[nn.Parameter]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _instances_in(item, kind)
    elif isinstance(value, dict):
        yield from _instances_in([*value.values()], kind)
    elif type(value) is kind:
        yield value
