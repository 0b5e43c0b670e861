"""How the bytes of a tensor get from device memory to host memory, where core works, and back.

For a dense CPU tensor there is nothing to do: its own memory is used. Anything else (strided, conjugated, on a GPU)
goes through a dense host copy. A Stage belongs to one device.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final, Protocol

import torch

from torch_bps.errors import UnsupportedError

_EMPTY: Final = memoryview(bytearray())
_WRITABLE: Final = 0x200  # PyBUF_WRITE
_memoryview = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview.restype = ctypes.py_object
_memoryview.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def memory_of(host: torch.Tensor) -> memoryview:
    """Return the memory of a dense host tensor. It does not keep the tensor alive.

    Cost: 0.6 us; numpy would not know bfloat16, and a ctypes array type for each size costs 10 us.
    """
    nbytes = host.nbytes
    if nbytes == 0:
        return _EMPTY
    view: memoryview = _memoryview(host.data_ptr(), nbytes, _WRITABLE)
    return view


class Stage(Protocol):
    """Moves tensors of one device. Thread safety: `bring_back` from any thread, the rest from the caller's."""

    devices: list[torch.device]
    """what a torch Future whose value is on this device must be told"""

    def outbound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense host tensor with the values of `tensor`: itself where it is one, else a copy.

        On a GPU the copy is only under way: call `settle` before the bytes are used.
        """

    def inbound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense host tensor to receive a result in: `tensor` itself where it is one, else new memory.

        Raises:
            UnsupportedError: elements of `tensor` share memory, so it cannot hold a result.
        """

    def settle(self) -> None:
        """Wait until the copies of `outbound`, and whatever still used the tensors of `inbound`, are done."""

    def bring_back(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a result into `tensor`; blocks until it is there."""


def check_layout(tensor: torch.Tensor) -> None:
    """Raise UnsupportedError unless `tensor` is an ordinary, strided one."""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} is not supported here",
            hint="only all_reduce takes sparse tensors, in COO format; use tensor.to_dense() elsewhere",
        )


def check_no_overlap(tensor: torch.Tensor) -> None:
    """Raise UnsupportedError if elements of `tensor` are known to share memory (it was made by `expand`)."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise UnsupportedError(
            f"a tensor of shape {list(tensor.shape)} and stride {tensor.stride()} cannot hold a result: "
            "several of its elements share memory",
            hint="pass tensor.contiguous() and copy the result",
        )


class CpuStage:
    """Tensors in host memory."""

    devices: list[torch.device] = []

    def outbound(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return tensor.detach().contiguous().resolve_conj().resolve_neg()

    def inbound(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        check_no_overlap(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def settle(self) -> None:
        pass

    def bring_back(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.detach().copy_(host)


class CudaStage:
    """Tensors on one GPU, copied through pinned host memory: the plain way, one copy each way, not overlapped.

    It has not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.devices = [device]
        self._device = device
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def outbound(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        return host

    def inbound(self, tensor: torch.Tensor) -> torch.Tensor:
        check_no_overlap(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def settle(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()

    def bring_back(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._back):
            tensor.detach().copy_(host, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._back)
        event.synchronize()


_CPU: Final = CpuStage()


def stage_for(tensor: torch.Tensor) -> Stage:
    """Return the stage of the device that `tensor` is on.

    Raises:
        UnsupportedError: neither cpu nor cuda.
    """
    return _CPU if tensor.is_cpu else _device_stage(tensor.device)


@cache
def _device_stage(device: torch.device) -> Stage:
    if device.type == "cuda":
        return CudaStage(device)
    raise UnsupportedError(f"tensors on device {device} are not supported", hint="byteps serves cpu and cuda tensors")
