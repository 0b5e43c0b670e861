"""The entry point that `import torch` runs in every process of the machine: costs next to nothing and never raises.

Everything else of the backend is imported when the first group is made. So a missing or broken dependency shows at
`init_process_group`, in the job that asked for byteps, and nowhere else.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from torch_bps.errors import BytePSError

NAME: Final = "byteps"
DEVICES: Final = ("cpu", "cuda")
_PACKAGES: Final = {"zmq": "pyzmq", "torch_bps": "torch_bps"}
"""what to install for a module, where the names differ"""


def register() -> None:
    """Register the backend with torch.distributed; does nothing when that is done already, or cannot be."""
    try:
        backend = sys.modules["torch.distributed"].Backend
        if NAME.upper() not in backend._plugins:
            backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
    except Exception as error:  # an exception here would break `import torch` for everybody
        import logging

        logging.getLogger("torch_bps").debug("backend %r not registered: %r", NAME, error)


def _create(options: _DistributedBackendOptions, pg_options: object = None) -> dist.ProcessGroup:
    """Make the process group (torch calls this from init_process_group and new_group)."""
    try:
        from torch_bps.backend.create import create
    except Exception as error:  # not ImportError alone: a broken extension module raises what it likes
        raise _broken(error) from error
    try:
        return create(options, pg_options)
    except ImportError as error:
        raise _broken(error) from error


def _broken(error: Exception) -> BytePSError:
    from torch_bps.errors import BytePSError

    module = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and module and module != "torch_bps":
        package = _PACKAGES.get(module, module)
        return BytePSError(
            f"backend {NAME!r} cannot start: the Python package {package!r} is missing", hint=f"pip install {package}"
        )
    package = _PACKAGES.get(module, module) or "torch_bps"
    return BytePSError(
        f"backend {NAME!r} cannot start: {type(error).__name__}: {error}",
        hint=f"pip install --force-reinstall {package}",
    )
