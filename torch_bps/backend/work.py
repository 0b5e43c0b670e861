"""What a collective returns: wait for it, or chain on its future; errors reach every kind of consumer.

Who notices an error depends on how a Work is built (torch 2.13). Only this way reaches them all: `wait` raises, and the
future is a child (`then`) whose callback raises. `Future.set_exception` would store the exception as an ordinary value:
C++ callers would take it for a result, and DistributedDataParallel crashes on it.

    PENDING ──last on_done──> DONE                      nothing to copy, nobody asked for the future
       └────last on_done──> FINISHING ──worker──> DONE      copy back, next stage or complete the future, in a worker
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.futures import Future

from torch_bps.backend.call import Call
from torch_bps.backend.completion import workers
from torch_bps.errors import BytePSError, ClosedError, OperationTimeout

if TYPE_CHECKING:
    from torch_bps.core.group import Group

Value = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]

_PENDING, _FINISHING, _DONE = range(3)
_NO_TIMEOUT: Final = timedelta(0)  # what C++ passes when the caller gave none
_SLICE_S: Final = 0.25
"""how long Ctrl-C may go unnoticed if it comes just before the latch is waited for"""
_GRACE_S: Final = 30.0
"""core enforces the deadlines of its operations; only if it does not, `wait` gives up by itself after this long"""


class WorkBytePS(dist.Work):
    """One call of a collective, under way or done.

    Thread safety: all methods from any thread; `on_done` is core's, in its IO thread.

    Args:
        facts: where this is (``rank``, ``group``), for errors.
        timeout_s: of the call's operations.
    """

    def __init__(self, facts: dict[str, Any], timeout_s: float) -> None:
        super().__init__()
        self._facts = facts
        self._timeout_s = timeout_s
        self._latch = threading.Lock()  # held until the work is done: an Event costs 2 us more
        self._latch.acquire()
        self._mutex = threading.Lock()  # guards _state, _left, _error and the making of the future
        self._state = _PENDING
        self._left = 0
        self._error: BytePSError | None = None
        self._call: Call | None = None
        self._group: Group | None = None
        self._value: Value = ()
        self._base: Future[Any] | None = None
        self._future: Future[Any] | None = None
        self._devices: list[int | str | torch.device] = []
        self._label = ""
        self._source = -1
        self._pid = os.getpid()

    def start(self, call: Call, group: Group | None, value: Value) -> WorkBytePS:
        """Send the call's operations and return self.

        Raises:
            ClosedError: the group takes no more operations; nothing was sent.
        """
        self._value = value
        if call.stage is not None:
            self._devices = [*call.stage.devices]
        if not call.operations:
            call.bring_back()
            self._complete()
            return self
        assert group is not None
        self._call = call
        self._group = group
        self._label = call.operations[0].label
        self._submit(call, group)
        return self

    def _submit(self, call: Call, group: Group) -> None:
        call.settle()
        operations = call.operations
        self._left = count = len(operations)
        for operation in operations:
            try:
                group.submit(operation)
            except BytePSError as error:
                if count == len(operations):
                    raise
                for _ in range(count):  # the first ones are under way, in memory that must not be given up yet
                    self.on_done(error.with_traceback(None))
                return
            count -= 1

    # ---- core's side

    def on_done(self, error: BytePSError | None) -> None:
        """One operation is done, or failed (Operation.on_done)."""
        with self._mutex:
            if error is not None and self._error is None:
                self._error = error
            self._left -= 1
            if self._left > 0:
                return
            call = self._call
            assert call is not None
            needs_worker = self._base is not None or (
                self._error is None and (bool(call.copy_backs) or call.next_stage is not None)
            )
            if needs_worker:
                self._state = _FINISHING
            else:
                self._set_done()
        if needs_worker:
            workers.post(self._finish)
        else:
            self._latch.release()

    def _finish(self) -> None:
        """Do what must not be done in the IO thread."""
        if self._error is None and self._deliver():
            return
        self._complete()

    def finish_local(self, error: BytePSError | None = None, source: int = -1) -> None:
        """Be done without any operation (a message to oneself)."""
        self._error = error
        self._source = source
        self._complete()

    def _complete(self) -> None:
        with self._mutex:
            base = self._base
            if base is None:
                self._set_done()
        if base is not None:
            base.set_result(None)  # before wait() returns: its caller may ask for the future's value at once
            with self._mutex:
                self._set_done()
        self._latch.release()

    def _deliver(self) -> bool:
        """Copy the results back; return whether there is another stage, which is under way now."""
        call, group = self._call, self._group
        assert call is not None
        assert group is not None
        try:
            call.bring_back()
            if call.next_stage is None:
                return False
            fill, call.next_stage = call.next_stage, None
            call.operations = []
            fill(call)
            if call.operations:
                self._submit(call, group)
                return True
        except Exception as error:
            self._error = _as_bytepserror(error, self._label)
        return False

    def _set_done(self) -> None:
        call = self._call
        if call is not None and call.operations:
            self._source = call.operations[-1].source
        self._call = self._group = None
        self._state = _DONE

    # ---- the caller's side

    def wait(self, timeout: timedelta | None = _NO_TIMEOUT) -> bool:
        """Wait until the call is done and return True. Ctrl-C gets through.

        Raises:
            OperationTimeout: `timeout` passed; the call goes on, and may be waited for again.
            BytePSError: what made the call fail.
        """
        if self._state != _DONE:
            self._block(timeout)
        if self._error is not None:
            raise self._fresh_error()
        return True

    def _block(self, timeout: timedelta | None) -> None:
        self._check_process()
        limit_s = timeout.total_seconds() if timeout and timeout > _NO_TIMEOUT else self._timeout_s + _GRACE_S
        deadline = time.monotonic() + limit_s
        left_s = limit_s
        while left_s > 0:
            if self._latch.acquire(timeout=min(left_s, _SLICE_S)):
                self._latch.release()
                return
            if self._state == _DONE:  # another waiter was interrupted while it held the latch
                return
            left_s = deadline - time.monotonic()
        raise OperationTimeout(f"{self._label}: Timed out waiting {limit_s * 1000:.0f}ms for it", **self._facts)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self._label} was begun by process {self._pid}; this is a forked child of it", **self._facts
            )

    def _fresh_error(self) -> BytePSError:
        """Return a new exception each time: one that is raised in two threads would mix their tracebacks."""
        error = self._error
        assert error is not None
        fresh = error.with_facts(**self._facts)
        fresh.__cause__ = error.__cause__
        return fresh

    def get_future(self) -> Future[Any]:
        """Return the future of the call's result, made when it is first asked for."""
        if self._state != _DONE:
            self._check_process()  # in a forked child another thread may have held the mutex for ever
        with self._mutex:
            if self._future is None:
                self._base = Future(devices=self._devices) if self._devices else Future()
                self._future = self._base.then(self._result_or_raise)
                late = self._state == _DONE
            else:
                late = False
            future, base = self._future, self._base
        if late:
            assert base is not None
            base.set_result(None)
        return future

    def _result_or_raise(self, _: object) -> Value:
        if self._error is not None:
            raise self._fresh_error()
        return self._value

    def synchronize(self) -> None:
        """Wait (torch's name for it)."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is done, or has failed."""
        return self._state == _DONE

    def is_success(self) -> bool:
        """Return whether the call is done and has not failed."""
        return self._state == _DONE and self._error is None

    def exception(self) -> BytePSError | None:
        """Return what made the call fail, if it did."""
        return self._fresh_error() if self._state == _DONE and self._error is not None else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result, once it is there."""
        self.wait()
        tensors: list[torch.Tensor] = []
        for item in self._value:
            tensors.extend([item] if isinstance(item, torch.Tensor) else item)
        return tensors

    def source_rank(self) -> int:
        """Return the rank in the group that a received message came from."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else ("pending", "finishing", "done")[self._state]
        return f"<WorkBytePS {self._label or 'local'}: {state}>"


def _as_bytepserror(error: Exception, label: str) -> BytePSError:
    if isinstance(error, BytePSError):
        return error
    wrapped = BytePSError(f"{label}: the result could not be delivered: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
