"""torch_bps: a torch.distributed backend that sums gradients through summation servers or shared memory.

A training script needs no import of ours: `torch.distributed.init_process_group(backend="byteps")`.

General layout, in the order a byte goes through it (each part imports only those below it):

    _autoload     registers the backend when torch is imported
    backend/      torch.distributed's side: process group, collectives, work
    core/         partitions, scheduling, rendezvous; knows no framework
    server/       the summation server (imports neither backend nor core, starts without torch)
    transport/    moves frames between two peers: tcp, zmq, shared memory
    wire/         the frames' bytes
    config, errors

This module imports neither torch nor anything of ours until a name of it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_bps.backend.cross_barrier import CrossBarrier, cross_barrier
    from torch_bps.backend.options import Options
    from torch_bps.backend.priority import priority
    from torch_bps.errors import (
        BytePSError,
        ClosedError,
        ConfigError,
        MismatchError,
        OperationTimeout,
        PeerLostError,
        ProtocolError,
        UnsupportedError,
        VersionError,
    )

__version__ = "0.1.0"

__all__ = [
    "BytePSError",
    "ClosedError",
    "ConfigError",
    "CrossBarrier",
    "MismatchError",
    "OperationTimeout",
    "Options",
    "PeerLostError",
    "ProtocolError",
    "UnsupportedError",
    "VersionError",
    "__version__",
    "cross_barrier",
    "priority",
    "register",
]
_HOMES = {
    "CrossBarrier": "torch_bps.backend.cross_barrier",
    "cross_barrier": "torch_bps.backend.cross_barrier",
    "Options": "torch_bps.backend.options",
    "priority": "torch_bps.backend.priority",
}
"""where names are; those of the errors are not listed"""


def register() -> None:
    """Make "byteps" known to torch.distributed. Only needed with TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    import torch.distributed  # noqa: F401 # it is what the backend is registered with

    from torch_bps import _autoload

    _autoload.register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch.distributed  # noqa: F401 # first, so that the errors are DistBackendErrors

    module = import_module(_HOMES.get(name, "torch_bps.errors"))
    value = globals()[name] = getattr(module, name)
    return value


if "torch.distributed" in sys.modules:
    from torch_bps import _autoload

    _autoload.register()
