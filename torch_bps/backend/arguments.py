"""The two styles of a ProcessGroup's methods: `pg.reduce([t], ReduceOptions)` and `pg.reduce(t, root=0, op=SUM)`.

torch.distributed and C++ use the first; the second is for those who hold a process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch

OptionsT = TypeVar("OptionsT")

_FIELDS: Final = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_NO_TIMEOUT: Final = timedelta(0)


def options(kind: type[OptionsT], first: object, names: Sequence[str], rest: Sequence[object], named: Any) -> OptionsT:
    """Return a `kind` of options from whatever the caller gave after the tensors.

    Args:
        first: an options object, or the first of the plain arguments.
        names: of the plain arguments in order ("root", "op", "timeout").
        rest: the plain arguments after the first.
        named: those given by name.
    """
    if isinstance(first, kind):
        return first
    result = kind()
    given = () if first is None and not rest else (first, *rest)
    values = dict(zip(names, given, strict=False)) | named
    if len(given) > len(names) or not values.keys() <= set(names):
        raise TypeError(f"unexpected arguments {given} {named}; expected {kind.__name__}, or plain {', '.join(names)}")
    for name, value in values.items():
        if value is not None:
            setattr(result, _FIELDS[name], value)
    return result


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a list of tensors where one may be given alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def as_nested(tensors: Sequence[Any]) -> Sequence[Sequence[torch.Tensor]]:
    """Return a list of lists of tensors where a plain list may be given."""
    return [tensors] if tensors and isinstance(tensors[0], torch.Tensor) else tensors


def only(name: str, items: Sequence[Any]) -> Any:
    """Return the single item of a list that could have one for each of a process's GPUs, in torch's old days."""
    if len(items) != 1:
        raise ValueError(f"{name}: expected one tensor, or list of tensors, for this process; got {len(items)}")
    return items[0]


def seconds(timeout: timedelta, default_s: float) -> float:
    """Return a call's timeout in seconds; unset ones are negative."""
    return timeout.total_seconds() if timeout > _NO_TIMEOUT else default_s
