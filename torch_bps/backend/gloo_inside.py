"""A real gloo backend registered inside our process group.

torch 2.13 reaches a few entries only through a C++ Backend, which Python cannot be: `all_gather_into_tensor_out` and
`batch_p2p_ops` of the functional collectives, `_device_types`, `_get_backend`, `_set_pg_timeout`. They work because of
this one. It connects when it is first used, so it costs 0.4 ms, four descriptors and two idle threads; they go when
the process group object does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

log = logging.getLogger("torch_bps.backend")


_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", object)  # a torch without gloo: add_gloo says so


class GlooInside(_Gloo):  # type: ignore[misc]
    """Tells our process group when torch sets the timeout of "its backend"."""

    on_timeout: weakref.WeakMethod[Callable[[timedelta], None]] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        listener = self.on_timeout() if self.on_timeout is not None else None
        if listener is not None:
            listener(timeout)


_alive: weakref.WeakSet[GlooInside] = weakref.WeakSet()


def add_gloo(
    group: dist.ProcessGroup,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    on_timeout: Callable[[timedelta], None],
) -> GlooInside | None:
    """Register gloo inside `group`; where it cannot be made, log that and return None."""
    custom = dist.ProcessGroup.BackendType.CUSTOM
    try:
        options = _Gloo._Options()
        options._devices = [_Gloo.create_default_device(lazy_init=True)]  # one that groups share hangs
        options._threads = 1
        options._timeout = timeout
        gloo = GlooInside(store, rank, size, options)
        gloo.on_timeout = weakref.WeakMethod(on_timeout)
        group._register_backend(torch.device("cpu"), custom, gloo)
        if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            group._register_backend(torch.device("cuda"), custom, gloo)
        group._set_default_backend(custom)
    except Exception as error:
        log.warning("no gloo inside this group; all_gather_into_tensor_out and batch_p2p_ops will fail: %s", error)
        return None
    _alive.add(gloo)
    return gloo


def _keep_in_child() -> None:
    # In a forked child its threads do not exist, and its destructor would wait for them: never let it run there.
    for gloo in _alive:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))


os.register_at_fork(after_in_child=_keep_in_child)
