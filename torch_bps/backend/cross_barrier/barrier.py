"""The cross-barrier: lets the next forward pass begin while gradients of the last backward pass are still under way.

    backward   DDP's comm hook starts each bucket's sum, and tells DDP that it is done: backward() returns
    step()     notes the hyperparameters; parameters whose bucket is under way are put off (unfinished.py)
    forward    each module first finishes the buckets of its own parameters: waits for the sum, and has the optimizer
               update them. While it waits, buckets that are back are updated
    its end    finishes the rest: nothing is ever under way in a backward pass

Parameters that are used in another way than by their own module's forward finish their bucket when they are used, as do
gradients. What uses a parameter behind Python's back, not in its own module, has seen an old value: that parameter gets
a gradient without having been seen, and the next backward pass raises.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_bps.backend.cross_barrier import attachment, guards, unfinished
from torch_bps.backend.cross_barrier import update as updates
from torch_bps.backend.cross_barrier.arrival import Arrival, BucketPlan
from torch_bps.backend.cross_barrier.division import Division
from torch_bps.backend.priority import priority
from torch_bps.errors import BytePSError


class CrossBarrier:
    """What `cross_barrier` returns. A context manager: leaving it is `close`, without waiting if by an exception.

    Thread safety: none; all of it runs in the thread that trains (the comm hook in the one that autograd runs it in).

    Args:
        ddp: the model.
        optimizer: of its parameters.
    """

    def __init__(self, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
        self._ddp = ddp
        self._optimizer = optimizer
        self._slot = attachment.HookSlot.of(ddp)
        self._division = Division(ddp)
        self._plans: dict[int, BucketPlan] = {}
        self._arrivals: list[Arrival] = []  # in the order they were started in
        self._awaited: dict[nn.Parameter, Arrival] = {}
        self._unseen: dict[
            nn.Parameter, None
        ] = {}  # finished by the end of a forward pass that did not seem to use them
        self._order: dict[nn.Parameter, int] = {}  # of use in the first forward pass
        self._learning = True
        self._steps = 0  # that put updates off
        self._failure: Exception | None = None
        self._gradient_type, self._parameter_type = unfinished.unfinished_types(
            self.synchronize, self._finish_parameter
        )
        self._original_step: Callable[..., Any] = optimizer.step
        self._undo = self._attach()

    # ---- the user's side

    def synchronize(self) -> None:
        """Wait until all gradients are here, and all parameters updated that `step` was called for.

        Raises:
            BytePSError: an earlier bucket failed.
            RuntimeError: a bucket's sum failed (of whatever kind the backend raises); the parameters are of no use now.
        """
        self._check()
        while self._arrivals:
            self._complete(self._arrivals[0])

    def close(self) -> None:
        """Finish, and give model and optimizer back as they were; harmless when repeated.

        DDP keeps its comm hook, which from now on does what DDP does without one. After a failure nothing is waited
        for, and parameters not yet updated stay as they are.
        """
        try:
            if self._failure is None:
                self.synchronize()
        finally:
            self._detach()

    def __enter__(self) -> CrossBarrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._detach()

    # ---- backward

    def _on_bucket(self, bucket: GradBucket) -> Future[torch.Tensor]:
        self._check()
        plan = self._plan_of(bucket)
        if plan.busy:
            raise BytePSError(
                "gradients came while those of the last backward pass were under way in the same memory",
                hint="call model(...), not model.forward(...)",
            )
        self._check_seen(plan)
        self._division.divide(plan)
        try:
            with priority(plan.priority):
                work = dist.all_reduce(plan.buffer, group=self._ddp.process_group, async_op=True)
        except Exception as error:
            raise self._fail(error) from None
        self._arrivals.append(Arrival(plan, work, self._ddp.gradient_as_bucket_view, self._gradient_type))
        device = plan.buffer.device
        done: Future[torch.Tensor] = Future(devices=[] if device.type == "cpu" else [device])
        done.set_result(plan.buffer)
        return done

    def _plan_of(self, bucket: GradBucket) -> BucketPlan:
        plan = self._plans.get(bucket.index())
        buffer = bucket.buffer()
        if plan is None or plan.buffer.data_ptr() != buffer.data_ptr():  # the first pass, or DDP rebuilt its buckets
            if plan is not None:
                self._plans.clear()
            parameters: list[Any] = bucket.parameters()
            soonest = min(self._order.get(parameter, 0) for parameter in parameters)
            plan = self._plans[bucket.index()] = BucketPlan(buffer, parameters, soonest)
        return plan

    def _check_seen(self, plan: BucketPlan) -> None:
        if not self._unseen or self._ddp.find_unused_parameters or self._ddp.static_graph:
            return
        for parameter in plan.parameters:
            if parameter in self._unseen:
                name = next(name for name, other in self._ddp.module.named_parameters() if other is parameter)
                raise self._fail(
                    BytePSError(
                        "a parameter was used before its update, by code that Python does not see",
                        hint="call synchronize() of the cross-barrier before each forward pass, or use the parameter "
                        "in the forward of the module that it belongs to",
                        parameter=name,
                    )
                )

    # ---- step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._finish_put_off()
        if updates.has_step_hooks(self._optimizer):  # they are promised all gradients before, and all weights after
            self.synchronize()
            return self._original_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        self._put_off()
        return loss

    def _put_off(self) -> None:
        """Put off the update of the parameters whose gradients are under way, and update the others."""
        self._forget_unseen()
        self._steps += bool(self._arrivals)
        said = updates.hyperparameters(self._optimizer)
        places = updates.places_of(self._optimizer)
        for arrival in self._arrivals:
            arrival.put_off = True
            arrival.updates = [found for found in arrival.own_gradients() if found[0] in places]
            arrival.groups = updates.groups_of([parameter for parameter, _ in arrival.updates], places, said)
            for parameter, _ in arrival.updates:
                parameter.__class__ = self._parameter_type
                self._awaited[parameter] = arrival
        at_once = [parameter for parameter in places if parameter not in self._awaited]
        if at_once:
            updates.step_only(self._optimizer, updates.groups_of(at_once, places, said))

    # ---- forward

    def _before_model(self, *_: object) -> None:
        guards.check_join(self._ddp)
        self._check()
        self._forget_unseen()
        # DDP moves its buckets, and gradients with them, at the start of the second pass (static_graph: the third)
        rebuilding = self._steps <= (2 if self._ddp.static_graph else 1)
        if rebuilding or not torch.is_grad_enabled():
            self.synchronize()

    def _before_module(self, module: nn.Module, *_: object) -> None:
        if self._learning:
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._order.setdefault(parameter, len(self._order))
        if self._awaited or self._unseen:
            for parameter in module._parameters.values():
                if type(parameter) is self._parameter_type:
                    self._finish_parameter(parameter)

    def _after_model(self, *_: object) -> None:
        self._learning = self._learning and not torch.is_grad_enabled()
        unseen = [*self._awaited]
        self.synchronize()
        for parameter in unseen:
            parameter.__class__ = self._parameter_type
            self._unseen[parameter] = None

    # ---- finishing

    def _finish_parameter(self, parameter: nn.Parameter) -> None:
        """Have the parameter updated, if its update was put off."""
        self._check()
        arrival = self._awaited.get(parameter)
        if arrival is None:
            self._unseen.pop(parameter, None)
            parameter.__class__ = nn.Parameter
            return
        while not arrival.is_back() and (other := self._put_off_and_back()):
            self._complete(other)
        self._complete(arrival)

    def _put_off_and_back(self) -> Arrival | None:
        return next((arrival for arrival in self._arrivals if arrival.put_off and arrival.is_back()), None)

    def _finish_put_off(self) -> None:
        if self._awaited:
            self.synchronize()

    def _complete(self, arrival: Arrival) -> None:
        try:
            arrival.wait()
            self._arrivals.remove(arrival)
            for parameter, _ in arrival.updates:
                parameter.__class__ = nn.Parameter
                del self._awaited[parameter]
            if arrival.updates:
                updates.update(self._optimizer, arrival.groups, arrival.updates)
        except Exception as error:
            raise self._fail(error) from None

    def _fail(self, error: Exception) -> Exception:
        self._failure = error
        return error

    def _check(self) -> None:
        if self._failure is not None:
            raise BytePSError(
                f"an earlier step of this model failed: {self._failure}",
                hint="its parameters are of no use now: load a checkpoint; close() gives model and optimizer back",
            ) from self._failure

    def _forget_unseen(self) -> None:
        for parameter in self._unseen:
            parameter.__class__ = nn.Parameter
        self._unseen.clear()

    # ---- attaching

    def _attach(self) -> list[Callable[[], None]]:
        ddp, optimizer, hook = self._ddp, self._optimizer, attachment.ModuleHook
        handles: list[Any] = [
            ddp.register_forward_pre_hook(hook(self._before_model), prepend=True),
            ddp.module.register_forward_pre_hook(hook(self._before_model), prepend=True),
            ddp.register_forward_hook(hook(self._after_model)),
            optimizer.register_state_dict_pre_hook(hook(self._before_optimizer_state)),
            optimizer.register_load_state_dict_pre_hook(hook(self._before_optimizer_state)),
        ]
        owners = [module for module in ddp.module.modules() if module._parameters]
        handles += [module.register_forward_pre_hook(hook(self._before_module)) for module in owners]
        self._slot.on_bucket = self._on_bucket
        return [*(handle.remove for handle in handles), attachment.replace_step(optimizer, self._step)]

    def _before_optimizer_state(self, *_: object) -> None:
        self.synchronize()

    def _detach(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._slot.on_bucket = None
        self._division.close()
        self._forget_unseen()
        for arrival in self._arrivals:
            arrival.give_classes_back()
        for parameter in self._awaited:
            parameter.__class__ = nn.Parameter
        self._arrivals.clear()
        self._awaited.clear()
