"""Takes out of torch.distributed.monitored_barrier the test that the backend is gloo, and nothing else.

Imported by torch_suite (--import), to see what the tests in forbidden_by_torch.txt say of a backend that torch lets in.
"""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch.distributed import distributed_c10d

GATE = "if get_backend(group) != Backend.GLOO:"

_source = inspect.getsource(distributed_c10d.monitored_barrier)
assert _source.count(GATE) == 1, "torch has changed: is the gate gone?"
exec(_source.replace(GATE, "if False:"), vars(distributed_c10d))
dist.monitored_barrier = distributed_c10d.monitored_barrier
