"""The process group: the methods that torch.distributed calls, in Python and in C++.

Each collective makes a Call, lets collectives fill it, and starts its Work. What is measured here: the Python time of a
blocking all_reduce, without core, is tests/backend/test_process_group.py's `test_cost`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torch_bps.backend import collectives, dynamo, point_to_point, priority
from torch_bps.backend.arguments import as_list, as_nested, only, options, seconds
from torch_bps.backend.call import Call
from torch_bps.backend.completion import workers
from torch_bps.backend.gloo_inside import GlooInside, add_gloo
from torch_bps.backend.monitored_barrier import monitored_barrier
from torch_bps.backend.sparse import SparseReduce
from torch_bps.backend.work import Value, WorkBytePS
from torch_bps.errors import ClosedError
from torch_bps.wire import ops

if TYPE_CHECKING:
    from torch_bps.core.group import Group

Tensors = Sequence[torch.Tensor]
Fill = Callable[[Call], None]

_DEFAULT_TIMEOUT: Final = timedelta(milliseconds=-1)  # as torch writes "not given"


_Base: Any = dist.ProcessGroup  # torch's stub lists overloads that no Python subclass can match


class ProcessGroupBytePS(_Base):  # type: ignore[misc]
    """A torch.distributed process group on core's Group.

    Thread safety: all methods from any thread. Collectives are matched by the order of their calls, as in any backend.

    Args:
        group: core's; None for a group of one rank, which sends nothing.
        store: of the group, for those who ask for it, and for the gloo inside.
        timeout: of operations that state none.
        name: for messages, until torch sets one.
        usual_priority: of calls that state none.
    """

    def __init__(
        self,
        group: Group | None,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str = "",
        usual_priority: int = 0,
    ) -> None:
        super().__init__(rank, size)  # torch 2.13 refuses the store, its usual first argument, from a subclass
        self._group = group
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout.total_seconds()
        self._name = name
        self._usual_priority = usual_priority
        self._desc = ""
        self._facts: dict[str, Any] = {"rank": rank, "group": name}
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._num_local = 0
        self._num_tagged = 0
        self._to_self = point_to_point.SelfMail(rank)
        workers.acquire()
        # core's id is new each time: the store may hold addresses from before a restart
        gloo_store = c10d.PrefixStore(f"gloo/{group.id if group else 0}", store)
        self._gloo: GlooInside | None = add_gloo(self, gloo_store, rank, size, timeout, self.set_timeout)
        _open.add(self)

    # ---- identity: C++ asks for these

    def getBackendName(self) -> str:  # noqa: N802
        return "byteps"

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name
        self._facts = {"rank": self._rank, "group": name}

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def get_group_store(self) -> c10d.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations that state none."""
        self._timeout_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ranks agree on the numbers from the start."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives were called."""
        return self._num_local if self._group is None else self._group.last_sequence + 1

    # ---- the end

    def shutdown(self) -> None:
        """Close the group and wait for its threads; harmless when that is done, and in a forked child."""
        self._close(abort=False)

    def abort(self) -> None:
        """As shutdown, without waiting for operations under way; they fail."""
        self._close(abort=True)

    def _close(self, abort: bool) -> None:
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        _open.discard(self)
        try:
            if self._group is not None:
                self._group.close(abort=abort)
        finally:
            self._to_self.close(ClosedError(f"process group {self._name!r} was destroyed", **self._facts))
            workers.release()

    # ---- how each call goes

    def _begin(
        self, timeout: timedelta = _DEFAULT_TIMEOUT, blocking: bool = False, kind_priority: int = 0
    ) -> tuple[WorkBytePS, Call]:
        if self._closed:
            raise ClosedError(f"process group {self._name!r} was destroyed", **self._facts)
        if os.getpid() != self._pid:
            raise ClosedError(
                f"process group {self._name!r} belongs to process {self._pid}; this is a forked child of it",
                hint="open a process group in the child, or start it with the spawn method",
                **self._facts,
            )
        timeout_s = seconds(timeout, self._timeout_s)
        work = WorkBytePS(self._facts, timeout_s)
        number = priority.chosen(self._usual_priority + kind_priority)
        return work, Call(self._rank, self._size, timeout_s, number, blocking, work.on_done)

    def _start(self, work: WorkBytePS, call: Call, value: Value) -> WorkBytePS:
        self._num_local += 1
        return work.start(call, self._group, value)

    # ---- reductions

    def allreduce(self, tensors: Any, opts: object = None, *rest: object, **named: object) -> WorkBytePS:
        tensors = as_list(tensors)
        opts = options(c10d.AllreduceOptions, opts, ("op", "timeout"), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        op = opts.reduceOp
        for tensor in tensors:
            if tensor.layout is torch.strided:
                collectives.all_reduce(call, tensor, op)
            else:
                SparseReduce(call, only("all_reduce", tensors), op, self._new_tag(point_to_point.SPARSE_TAG))
        return self._start(work, call, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: object = None) -> WorkBytePS:
        opts = options(c10d.AllreduceCoalescedOptions, opts, (), (), {})
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        for tensor in tensors:
            collectives.all_reduce(call, tensor, opts.reduceOp)
        return self._start(work, call, tensors)

    def reduce(self, tensors: Any, opts: object = None, *rest: object, **named: object) -> WorkBytePS:
        tensors = as_list(tensors)
        opts = options(c10d.ReduceOptions, opts, ("root", "op", "timeout"), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        for tensor in tensors:
            collectives.reduce(call, tensor, opts.reduceOp, opts.rootRank)
        return self._start(work, call, tensors)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: object = None, *rest: object, **named: object
    ) -> WorkBytePS:
        outputs, inputs = as_list(outputs), as_nested(inputs)
        opts = options(c10d.ReduceScatterOptions, opts, ("op", "timeout"), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        output, blocks = only("reduce_scatter", outputs), only("reduce_scatter", inputs)
        collectives.reduce_scatter(call, output, blocks, opts.reduceOp)
        return self._start(work, call, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: object = None) -> WorkBytePS:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> WorkBytePS:
        opts = options(c10d.ReduceScatterOptions, opts, (), (), {})
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        for output, input in zip(outputs, inputs, strict=True):
            collectives.reduce_scatter_single(call, output, input, opts.reduceOp)
        return self._start(work, call, outputs)

    # ---- copies

    def broadcast(self, tensors: Any, opts: object = None, *rest: object, **named: object) -> WorkBytePS:
        tensors = as_list(tensors)
        opts = options(c10d.BroadcastOptions, opts, ("root", "timeout"), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        for tensor in tensors:
            collectives.broadcast(call, tensor, opts.rootRank)
        return self._start(work, call, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: object = None, *rest: object, **named: object) -> WorkBytePS:
        outputs, inputs = as_nested(outputs), as_list(inputs)
        opts = options(c10d.AllgatherOptions, opts, ("timeout",), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp, priority.ALL_GATHER)
        collectives.all_gather(call, only("all_gather", outputs), only("all_gather", inputs))
        return self._start(work, call, outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: object = None) -> WorkBytePS:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> WorkBytePS:
        opts = options(c10d.AllgatherOptions, opts, (), (), {})
        work, call = self._begin(opts.timeout, not opts.asyncOp, priority.ALL_GATHER)
        for output, input in zip(outputs, inputs, strict=True):
            collectives.all_gather_single(call, output, input)
        return self._start(work, call, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None) -> WorkBytePS:
        opts = options(c10d.AllgatherOptions, opts, (), (), {})
        work, call = self._begin(opts.timeout, not opts.asyncOp, priority.ALL_GATHER)
        for number, input in enumerate(inputs):  # outputs[rank][number]
            collectives.all_gather(call, [tensors[number] for tensors in outputs], input)
        return self._start(work, call, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: object = None, *rest: object, **named: object) -> WorkBytePS:
        outputs, inputs = as_nested(outputs), as_list(inputs)
        opts = options(c10d.GatherOptions, opts, ("root", "timeout"), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        collected = only("gather", outputs) if self._rank == opts.rootRank else ()
        collectives.gather(call, collected, only("gather", inputs), opts.rootRank)
        return self._start(work, call, outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: object = None, *rest: object, **named: object) -> WorkBytePS:
        outputs, inputs = as_list(outputs), as_nested(inputs)
        opts = options(c10d.ScatterOptions, opts, ("root", "timeout"), rest, named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        spread = only("scatter", inputs) if self._rank == opts.rootRank else ()
        collectives.scatter(call, only("scatter", outputs), spread, opts.rootRank)
        return self._start(work, call, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None, **named: object) -> WorkBytePS:
        opts = options(c10d.AllToAllOptions, opts, ("timeout",), (), named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        collectives.all_to_all(call, outputs, inputs)
        return self._start(work, call, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: object = None,
        **named: object,
    ) -> WorkBytePS:
        opts = options(c10d.AllToAllOptions, opts, ("timeout",), (), named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        collectives.all_to_all_single(call, output, input, output_splits, input_splits)
        return self._start(work, call, [output])

    # ---- barriers

    def barrier(self, opts: object = None, **named: object) -> WorkBytePS:
        opts = options(c10d.BarrierOptions, opts, ("timeout",), (), named)
        work, call = self._begin(opts.timeout, not opts.asyncOp)
        collectives.barrier(call)
        return self._start(work, call, ())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and report those that did not come (dist.monitored_barrier takes only gloo groups)."""
        tag = self._new_tag(point_to_point.MONITORED_BARRIER_TAG)
        monitored_barrier(
            self._rank,
            self._size,
            timedelta(seconds=self._timeout_s) if timeout is None else timeout,
            wait_all_ranks,
            lambda tensor, rank: self.send([tensor], rank, tag),
            lambda tensor, rank: self.recv([tensor], rank, tag),
        )

    # ---- messages

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> WorkBytePS:
        work, call = self._begin()
        tensor = only("send", tensors)
        if dst == self._rank:  # torch allows it for isend
            self._to_self.send(tensor, tag, work)
            return work
        point_to_point.send(call, tensor, dst, tag)
        return work.start(call, self._group, tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> WorkBytePS:
        work, call = self._begin()
        tensor = only("recv", tensors)
        if src == self._rank or self._size == 1:
            self._to_self.recv(tensor, tag, work)
            return work
        point_to_point.recv(call, tensor, src, tag)
        return work.start(call, self._group, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> WorkBytePS:
        """Receive from whoever sends, except from oneself."""
        return self.recv(tensors, ops.ANY_SOURCE, tag)

    def _new_tag(self, base: int) -> int:
        self._num_tagged += 1
        return base + self._num_tagged % point_to_point.NUM_TAGS

    # the names that torch used to have for them, and in places still uses
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


dynamo.skip(ProcessGroupBytePS, WorkBytePS)

_open: weakref.WeakSet[ProcessGroupBytePS] = weakref.WeakSet()
