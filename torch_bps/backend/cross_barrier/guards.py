"""What a cross-barrier cannot serve, refused when it is made: each with one message that says what to do.

Called by barrier.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_bps.errors import BytePSError, ConfigError, UnsupportedError

PER_PARAMETER: Final = frozenset(
    {
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD"),
    }
)
"""torch's optimizers that update a parameter from its own gradient and state alone"""
_NEVER: Final = {
    "LBFGS": "it needs all gradients at once",
    "SparseAdam": "it is for sparse gradients",
}


def check_model(ddp: DistributedDataParallel) -> None:
    """Raise unless the model is DDP as this works with it.

    Raises:
        ConfigError: it is no DistributedDataParallel.
        UnsupportedError: it uses something of DDP that needs the sums by the end of the backward pass.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"cross_barrier takes a DistributedDataParallel model, not a {type(ddp).__name__}",
            hint="model = DistributedDataParallel(net), then cross_barrier(model, optimizer)",
        )
    if any(not getattr(state, "is_free", False) for _, state in ddp._comm_hooks):
        raise taken_slot()
    if ddp.mixed_precision is not None:
        raise _unsupported("DDP's own mixed precision", "use torch.autocast")
    if ddp._delay_all_reduce_params:
        raise _unsupported("delay_all_reduce_named_params", "leave it out")
    if ddp._use_python_reducer:
        raise _unsupported("compiled autograd's Python reducer", "leave torch._dynamo.config.optimize_ddp as it is")
    for parameter in ddp.module.parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise _unsupported(
                "an optimizer that runs in the backward pass", "give cross_barrier the optimizer instead"
            )
        if parameter.requires_grad and type(parameter) is not nn.Parameter:
            raise _unsupported(f"a parameter that is a {type(parameter).__name__}", "train the model without it")
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise _unsupported(f"the sparse gradients of {name or 'the model'}", "make it with sparse=False")
        if isinstance(module, torch.jit.ScriptModule) or _is_compiled(module):
            raise _unsupported(f"compiled code ({name or 'the model'})", "leave out torch.compile and torch.jit")


def check_optimizer(optimizer: Optimizer, ddp: DistributedDataParallel, per_parameter: bool) -> None:
    """Raise unless the optimizer can update some parameters now and some later.

    Raises:
        ConfigError: it is no optimizer, or not of this model.
        UnsupportedError: it may need all gradients at once, or somebody has changed it.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"cross_barrier takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    kind = type(optimizer)
    ours = getattr(torch.optim, kind.__name__, None) is kind
    if ours and kind.__name__ in _NEVER:
        raise _unsupported(kind.__name__, f"{_NEVER[kind.__name__]}; train without cross_barrier")
    if not per_parameter and not (ours and kind.__name__ in PER_PARAMETER):
        raise _unsupported(
            f"an optimizer that it does not know ({kind.__qualname__})",
            "say cross_barrier(..., per_parameter=True) if it updates each parameter from that one's gradient and "
            "state alone, and keeps nothing that changes in its param groups",
        )
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise _unsupported("an optimizer whose step was replaced", "make the cross-barrier first")
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(ddp.module.parameters()):
        raise ConfigError("the optimizer holds no parameter of the model")


def check_join(ddp: DistributedDataParallel) -> None:
    """Raise while the model's `join` is in use: there other ranks may divide by another number.

    Raises:
        UnsupportedError: it is.
    """
    if ddp._join_config.enable:
        raise _unsupported("join()", "give all ranks as many batches, or close the cross-barrier before")


def taken_slot() -> BytePSError:
    """Return the error for a model that has a comm hook."""
    return _unsupported(
        "a model that has a communication hook, or a cross-barrier",
        "DDP takes one hook only: leave out register_comm_hook, or close the cross-barrier before the next one",
    )


def _is_compiled(module: nn.Module) -> bool:
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return module._compiled_call_impl is not None or (frame is not None and isinstance(module, frame.OptimizedModule))


def _unsupported(what: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"cross_barrier does not work with {what}", hint=hint)
