"""From torch's call of the backend to a process group, and the end of the groups that nobody destroys."""

from __future__ import annotations

import atexit
import importlib
from typing import TYPE_CHECKING

from torch_bps.backend import process_group
from torch_bps.backend.completion import workers
from torch_bps.backend.options import config_from
from torch_bps.backend.process_group import ProcessGroupBytePS
from torch_bps.backend.routed import class_for, device_of
from torch_bps.core import runtime

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions


def create(options: _DistributedBackendOptions, pg_options: object = None) -> ProcessGroupBytePS:
    """Make the process group of one rank; blocks until all ranks of it are here.

    Raises:
        BytePSError: a setting is wrong, or the group could not be opened before its timeout.
    """
    # Its functions take `group=group.WORLD` as a default, so whatever group exists when it is imported lives for ever,
    # with the threads and sockets of the gloo inside. DistributedDataParallel imports it: be earlier (25 ms).
    importlib.import_module("torch.distributed.nn.functional")
    config = config_from(pg_options)
    rank, size, name = options.group_rank, options.group_size, options.group_id
    group = None
    if size > 1:
        group = runtime.open_group(
            options.store, rank, size, timeout_s=options.timeout.total_seconds(), name=name, config=config
        )
    process_group_class = class_for(device_of(options.store))
    return process_group_class(group, options.store, rank, size, options.timeout, name, config.priority)


def _close_all() -> None:
    """Close what a script forgot to: a thread of ours inside a torch operation would abort the exiting process."""
    for group in list(process_group._open):
        group.shutdown()
    workers.stop()


atexit.register(_close_all)
