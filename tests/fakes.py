"""Fakes that several test folders use.

Hub and FakeGroup stand in for core: an in-process engine that runs the Operations of several ranks straight from the
table in torch_bps.wire.ops, with torch doing the sums. One thread calls `on_done`, as core's IO thread would.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from torch_bps.core.operation import Operation
from torch_bps.errors import BytePSError, ClosedError, MismatchError, OperationTimeout
from torch_bps.wire import dtypes, ops
from torch_bps.wire.dtypes import DTYPES, HALF_CODES

JOIN_S = 10.0


class Hub:
    """Runs the operations of a group of fake ranks.

    Args:
        size: number of ranks.
        ghosts: ranks that nobody plays: each contributes to a collective what rank 0 does.
    """

    def __init__(self, size: int, ghosts: tuple[int, ...] = ()) -> None:
        self.size = size
        self.ghosts = ghosts
        self.groups = [FakeGroup(self, rank) for rank in range(size)]
        self.submitted: list[Operation] = []
        self.fail: Callable[[int, Operation], BytePSError | None] = lambda rank, operation: None
        """called for each operation: the error that it is to end with"""
        self._lock = threading.Lock()
        self._events: deque[tuple[int, Operation] | Callable[[], None]] = deque()
        self._wake = threading.Condition(self._lock)
        self._held = False
        self._stopped = False
        self._slots: dict[tuple[int, int], dict[int, Operation]] = defaultdict(dict)
        self._mail: dict[tuple[int, int, int], deque[tuple[int, Operation]]] = defaultdict(deque)
        self._thread = threading.Thread(target=self._run, name="fake-io", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Let operations wait until `go`."""
        with self._lock:
            self._held = True

    def go(self) -> None:
        """Run the operations that wait, and later ones at once."""
        with self._wake:
            self._held = False
            self._wake.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()

    def post(self, rank: int, operation: Operation) -> None:
        with self._wake:
            self.submitted.append(operation)
            self._events.append((rank, operation))
            self._wake.notify()

    def expire(self, rank: int) -> None:
        """Fail what `rank` has under way, as if its deadline had passed."""
        self._fail_all(rank, lambda operation: OperationTimeout(f"{operation.label}: Timed out waiting 1ms"))

    def close(self, rank: int) -> None:
        self._fail_all(rank, lambda operation: ClosedError(f"{operation.label}: the group was closed"))

    def _fail_all(self, rank: int, error: Callable[[Operation], BytePSError]) -> None:
        done = threading.Event()

        def fail() -> None:
            for waiting in self._slots.values():
                if rank in waiting:
                    operation = waiting.pop(rank)
                    operation.on_done(error(operation))
            for queue in self._mail.values():
                mine = [pair for pair in queue if pair[0] == rank]
                for pair in mine:
                    queue.remove(pair)
                    pair[1].on_done(error(pair[1]))
            done.set()

        if threading.current_thread() is self._thread or self._stopped:
            fail()
            return
        with self._wake:
            held = [event for event in self._events if isinstance(event, tuple) and event[0] == rank and self._held]
            for event in held:
                self._events.remove(event)
            self._events.append(fail)
            self._wake.notify()
        assert done.wait(JOIN_S)
        for _, operation in held:
            operation.on_done(error(operation))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._stopped and not self._ready():
                    self._wake.wait()
                if self._stopped:
                    return
                event = self._next_event()
            if isinstance(event, tuple):
                self._take(*event)
            else:
                event()
            del event

    def _ready(self) -> bool:
        return bool(self._events) and (not self._held or any(callable(event) for event in self._events))

    def _next_event(self) -> tuple[int, Operation] | Callable[[], None]:
        if not self._held:
            return self._events.popleft()
        index = next(index for index, event in enumerate(self._events) if callable(event))
        event = self._events[index]
        del self._events[index]
        return event

    def _take(self, rank: int, operation: Operation) -> None:
        error = self.fail(rank, operation)
        if error is not None:
            operation.on_done(error)
        elif operation.op == ops.SEND:
            self._message(rank, operation)
        else:
            waiting = self._slots[0, operation.sequence]
            waiting[rank] = operation
            if len(waiting) == self.size - len(self.ghosts):
                del self._slots[0, operation.sequence]
                self._run_row(waiting)

    # ---- messages

    def _message(self, rank: int, operation: Operation) -> None:
        sending = bool(operation.pushes)
        dst = operation.peer if sending else rank
        queue = self._mail[dst, operation.tag, 0]
        for other_rank, other in queue:
            if bool(other.pushes) == sending:
                continue
            send, receive = (operation, other) if sending else (other, operation)
            source = rank if sending else other_rank
            if receive.peer in (source, ops.ANY_SOURCE):
                queue.remove((other_rank, other))
                self._deliver(send, receive, source)
                return
        queue.append((rank, operation))

    def _deliver(self, send: Operation, receive: Operation, source: int) -> None:
        error = None
        (_, data), (_, room) = send.pushes[0], receive.pulls[0]
        if (send.dtype, data.nbytes) != (receive.dtype, room.nbytes):
            error = MismatchError(f"{send.label} and {receive.label}")
        else:
            room[:] = data
        receive.source = source
        send.on_done(error)
        receive.on_done(error)

    # ---- collectives

    def _run_row(self, operations: dict[int, Operation]) -> None:
        error = _mismatch(operations)
        if error is None:
            if ops.ROWS[next(iter(operations.values())).op].combine == ops.REDUCE:
                self._reduce(operations)
            else:
                error = self._relay(operations)
        for operation in operations.values():
            operation.on_done(error)

    def _reduce(self, operations: dict[int, Operation]) -> None:
        first = operations[min(operations)]
        results = {}
        for block, memory in first.pushes:
            parts = [dict(operations[rank].pushes)[block] for rank in sorted(operations)]
            parts += [parts[0]] * len(self.ghosts)
            results[block] = bytes(memory) if not memory.nbytes else combine(parts, first.dtype, first.redop)
        for operation in operations.values():
            for block, room in operation.pulls:
                room[:] = results[block]

    def _relay(self, operations: dict[int, Operation]) -> BytePSError | None:
        pushed = {block: bytes(memory) for operation in operations.values() for block, memory in operation.pushes}
        ghost = bytes(next((memory for op in operations.values() for _, memory in op.pushes), b""))
        for operation in operations.values():
            for block, room in operation.pulls:
                data = pushed.get(block, ghost if self.ghosts else None)
                if data is None or len(data) != room.nbytes:
                    return MismatchError(
                        f"{operation.label}: block {block} of {room.nbytes} bytes, got {data and len(data)}"
                    )
                room[:] = data
        return None


def _mismatch(operations: dict[int, Operation]) -> BytePSError | None:
    views = {(operation.op, operation.dtype, operation.redop, operation.root) for operation in operations.values()}
    reducing = ops.ROWS[next(iter(operations.values())).op].combine == ops.REDUCE
    sizes = {tuple((block, memory.nbytes) for block, memory in op.pushes) for op in operations.values()}
    if len(views) > 1 or (reducing and len(sizes) > 1):
        labels = [f"rank {rank}: {operation.label}" for rank, operation in sorted(operations.items())]
        return MismatchError("; ".join(labels))
    return None


def combine(parts: list[memoryview], dtype: int, redop: int) -> bytes:
    """Return the reduction of `parts` in their order, as the reducer defines it."""
    torch_dtype = getattr(torch, DTYPES[dtype].name)
    tensors = [torch.frombuffer(bytearray(part), dtype=torch_dtype) for part in parts]
    wide = [tensor.float() for tensor in tensors] if dtype in HALF_CODES else tensors
    total = wide[0].clone()
    for tensor in wide[1:]:
        total = _COMBINE[redop](total, tensor).to(total.dtype)
    if redop == dtypes.AVG:
        floating = total.is_floating_point() or total.is_complex()
        total = total / len(parts) if floating else torch.div(total, len(parts), rounding_mode="trunc")
    return bytes(total.to(torch_dtype).view(torch.uint8).numpy().data)


_COMBINE = {
    dtypes.SUM: torch.add,
    dtypes.PREMUL_SUM: torch.add,
    dtypes.AVG: torch.add,
    dtypes.PRODUCT: torch.mul,
    dtypes.MIN: torch.minimum,
    dtypes.MAX: torch.maximum,
    dtypes.BAND: torch.bitwise_and,
    dtypes.BOR: torch.bitwise_or,
    dtypes.BXOR: torch.bitwise_xor,
}


class FakeGroup:
    """torch_bps.core.runtime.Group for one rank of a Hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.id = 7
        self.last_sequence = -1
        self.closed: bool | None = None
        """after close: whether it was an abort"""
        self.broken: BytePSError | None = None
        """what `submit` is to raise"""
        self._lock = threading.Lock()

    def submit(self, operation: Operation) -> None:
        with self._lock:
            if self.closed is not None:
                raise ClosedError("the group was closed")
            if self.broken is not None:
                raise self.broken.with_facts()
            if operation.op != ops.SEND:
                self.last_sequence += 1
                operation.sequence = self.last_sequence
            self.hub.post(self.rank, operation)

    def close(self, abort: bool = False) -> None:
        if self.closed is None:
            self.closed = abort
            self.hub.close(self.rank)

    def describe(self) -> str:
        return f"fake group of {self.size}"


class InstantGroup(FakeGroup):
    """Says at once that every operation is done, and does nothing: for measuring what is around it."""

    def submit(self, operation: Operation) -> None:
        operation.on_done(None)
