"""Process groups of mixed specs, such as "cpu:gloo,cuda:byteps": a call goes to the backend of its tensors' device.

torch 2.13 gives the whole group to the one backend that is a Python ProcessGroup, whatever else the spec names, and
does not tell it the spec: so the other backends are made here, when a tensor of their device first comes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from torch_bps.backend import dynamo
from torch_bps.backend.process_group import ProcessGroupBytePS
from torch_bps.errors import UnsupportedError

_DEVICES: Final = ("cpu", "cuda")
_METHODS: Final = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)


def device_of(store: c10d.Store) -> str:
    """Return the device for which torch asks for a backend: it is only told in the prefix of the store's keys."""
    inner = getattr(store, "underlying_store", None)
    if inner is None:
        return _DEVICES[0]
    key = f"byteps/device/{uuid.uuid4().hex}"
    store.set(key, "")
    try:
        return next((device for device in _DEVICES if inner.check([f"{device}//{key}"])), _DEVICES[0])
    finally:
        store.delete_key(key)


def class_for(device: str) -> type[ProcessGroupBytePS]:
    """Return the class of a group that torch asks for as `device`: tensors of others can come where there are any."""
    return RoutedProcessGroup if device != "cpu" or torch.cuda.is_available() else ProcessGroupBytePS


class RoutedProcessGroup(ProcessGroupBytePS):
    """A process group that may share its tensors with other backends.

    Tried with gloo for CPU tensors. NCCL has not run: no GPU was there.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._others: dict[str, dist.ProcessGroup | None] = {}
        """device type -> the group that serves it, None for this one"""

    def _other(self, args: Iterable[object]) -> dist.ProcessGroup | None:
        tensor = _first_tensor(args)
        if tensor is None:
            return None
        device = tensor.device.type
        if device not in self._others:
            self._others[device] = self._make(device)
        return self._others[device]

    def _make(self, device: str) -> dist.ProcessGroup | None:
        spec = distributed_c10d._world.pg_backend_config.get(self)
        if spec is None:
            return None
        name = dist.BackendConfig(dist.Backend(spec)).get_device_backend_map().get(device)
        if name in (None, self.getBackendName()):
            return None
        backend: Any = None
        if name == dist.Backend.GLOO:
            backend, kind = self._gloo, dist.ProcessGroup.BackendType.GLOO
        elif name == dist.Backend.NCCL:
            backend, kind = self._nccl(), dist.ProcessGroup.BackendType.NCCL
        if backend is None:
            raise UnsupportedError(
                f"tensors on {device} belong to backend {name!r} by the spec {spec!r}, which byteps cannot call",
                hint=f"use gloo or nccl beside byteps, or make a group of its own with backend={name!r}",
            )
        other = dist.ProcessGroup(self._store, self._rank, self._size)
        other._set_default_backend(kind)
        other._register_backend(torch.device(device), kind, backend)
        other._set_group_name(distributed_c10d.GroupName(self.getGroupName()))
        return other

    def _nccl(self) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        store = c10d.PrefixStore("nccl", self._store)
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    def _close(self, abort: bool) -> None:
        others, self._others = list(self._others.values()), {}
        try:
            for other in others:
                if other is not None and os.getpid() == self._pid:
                    other.abort() if abort else other.shutdown()
        finally:
            super()._close(abort)


def _first_tensor(args: Iterable[object]) -> torch.Tensor | None:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None


def _routed(name: str) -> Callable[..., Any]:
    own = getattr(ProcessGroupBytePS, name)

    def method(self: RoutedProcessGroup, *args: Any, **named: Any) -> Any:
        other = self._other((*args, *named.values()))
        return own(self, *args, **named) if other is None else getattr(other, name)(*args, **named)

    method.__name__ = name
    return method


for _name in _METHODS:
    setattr(RoutedProcessGroup, _name, _routed(_name))
dynamo.skip(RoutedProcessGroup)
