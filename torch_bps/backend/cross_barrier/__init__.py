"""Cross-barrier: DDP whose next forward pass does not wait for the gradients of layers that it does not need yet.

    unfinished    gradients and parameters that finish themselves when they are used
    arrival       a bucket's sum in one step
    division      by the number of ranks, rounded as DDP does
    update        some parameters at a time, by the user's own optimizer
    guards        what is refused
    attachment    hooks, and how they are given back
    barrier       the whole

Nothing in here knows the backend, but for the priorities that only "byteps" heeds.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_bps.backend.cross_barrier import guards
from torch_bps.backend.cross_barrier.barrier import CrossBarrier

__all__ = ["CrossBarrier", "cross_barrier"]


def cross_barrier(
    ddp_model: DistributedDataParallel, optimizer: Optimizer, *, per_parameter: bool = False
) -> CrossBarrier:
    """Let the next forward pass begin while gradients are still under way; the weights stay those of plain DDP.

        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        torch_bps.cross_barrier(model, optimizer)       # that is all; the training loop stays as it is

    backward() and step() return at once. Each bucket's parameters are updated when it is back and needed: a module
    waits for its own, whatever else uses a gradient or a parameter waits for that. Sums go out in the order in which
    the first forward pass used the layers.

    Args:
        ddp_model: without a comm hook; its buckets are summed as always.
        optimizer: of the model's parameters; others that it holds are updated at once.
        per_parameter: the optimizer is not one of torch's, yet updates each parameter from that one's own gradient and
            state, and keeps nothing that changes in its param groups.

    Raises:
        ConfigError: the arguments are not such a model and its optimizer.
        UnsupportedError: they use something that cannot be served; the message says what to do.
    """
    guards.check_model(ddp_model)
    guards.check_optimizer(optimizer, ddp_model, per_parameter)
    return CrossBarrier(ddp_model, optimizer)
