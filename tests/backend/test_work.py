"""Errors reach every consumer; futures may chain collectives; waits can be interrupted."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.backend.conftest import World
from tests.fakes import Hub
from torch_bps.errors import BytePSError, ClosedError, OperationTimeout, PeerLostError
from torch_bps.wire import ops

LOST = PeerLostError("rank 1 is lost", host="b", operation="all_reduce #3")


def fail(hub: Hub, *codes: int) -> None:
    """Let operations fail, those of `codes` where given."""
    hub.fail = lambda rank, operation: LOST if not codes or operation.op in codes else None


# ---- each kind of consumer


def test_blocking_call_raises(job):
    fail(job)
    with pytest.raises(PeerLostError, match="rank 1 is lost") as caught:
        dist.all_reduce(torch.ones(2))
    assert isinstance(caught.value, dist.DistBackendError)
    assert caught.value.facts == {"rank": 0, "group": "0", "host": "b", "operation": "all_reduce #3"}


def test_wait_raises_each_time_a_fresh_one(job):
    fail(job)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    errors = []
    for _ in range(2):
        with pytest.raises(PeerLostError) as caught:
            work.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLostError)
    with pytest.raises(PeerLostError):
        work.result()
    with pytest.raises(PeerLostError):
        work.synchronize()


@pytest.mark.parametrize("late", [False, True])
def test_future_raises(job, late):
    fail(job)
    job.hold()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    future = None if late else work.get_future()
    job.go()
    with pytest.raises(PeerLostError):
        work.wait()
    future = future or work.get_future()
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        future.then(lambda done: done.value()).wait()


def test_functional_wait_raises(job):
    fail(job)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))


def test_ddp_constructor_raises(job):
    fail(job, ops.ALL_GATHER)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        DistributedDataParallel(torch.nn.Linear(2, 2))


def test_ddp_constructor_raises_in_broadcast(job):
    fail(job, ops.BROADCAST)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        DistributedDataParallel(torch.nn.Linear(2, 2))


def test_ddp_backward_raises(job):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    fail(job, ops.ALL_REDUCE)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        model(torch.ones(1, 2)).sum().backward()


def test_error_while_the_result_is_copied_back(world: World, monkeypatch):
    def broken(host, tensor):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("torch_bps.backend.staging._CPU.bring_back", broken)
    works = [group.allreduce([torch.ones(2, 3).t()]) for group in world.groups]
    for work in works:
        with pytest.raises(BytePSError, match="could not be delivered: RuntimeError: the device is gone") as caught:
            work.wait()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_memory_is_kept_until_every_operation_ended(world: World):
    """One of several operations fails at once; the work fails only when the others no longer use the memory."""
    world.hub.fail = lambda rank, operation: LOST if operation.sequence == 0 else None
    tensors = [torch.ones(2), torch.ones(3)]
    first = world.groups[0].allreduce_coalesced(tensors)
    watched = weakref.ref(tensors[1])
    del tensors
    world.groups[1].barrier()  # number 0 there: fails too, and tells that the hub has seen number 0 of rank 0
    assert not first.is_completed()
    assert watched() is not None
    world.groups[1].allreduce([torch.ones(3)])
    with pytest.raises(PeerLostError):
        first.wait()


def test_submit_that_fails_at_once(world: World):
    group = world.groups[0]
    world.hub.groups[0].broken = PeerLostError("rank 1 is lost")
    with pytest.raises(PeerLostError):
        group.allreduce([torch.ones(2)])


def test_submit_that_fails_half_way(world: World):
    fake = world.hub.groups[0]
    submit = fake.submit
    count = 0

    def second_fails(operation):
        nonlocal count
        count += 1
        if count == 2:
            fake.broken = PeerLostError("rank 1 is lost")
        submit(operation)

    fake.submit = second_fails
    work = world.groups[0].allreduce_coalesced([torch.ones(2) for _ in range(3)])
    assert not work.is_completed()  # the first is under way, in memory of ours
    world.groups[1].allreduce([torch.ones(2)])
    with pytest.raises(PeerLostError):
        work.wait()
    assert count == 2


# ---- futures


def test_future_holds_the_callers_tensors(world: World):
    tensors = [torch.ones(2, 3).t() for _ in range(2)]
    works = world.run(lambda group, rank: group.allreduce([tensors[rank]]))
    assert works[0].get_future() is works[0].get_future()
    assert works[0].get_future().value()[0] is tensors[0]
    assert works[0].result()[0] is tensors[0]
    outs = [[torch.zeros(1), torch.zeros(1)] for _ in range(2)]
    works = world.run(lambda group, rank: group.allgather([outs[rank]], [torch.full((1,), float(rank))]))
    assert [t.item() for t in works[1].result()] == [0.0, 1.0]
    assert works[1].get_future().value()[0][1] is outs[1][1]


def test_future_is_done_when_wait_returns(world: World):
    for _ in range(50):
        world.hub.hold()
        works = [group.allreduce([torch.ones(1)]) for group in world.groups]
        futures = [work.get_future() for work in works]
        world.hub.go()
        for work, future in zip(works, futures, strict=True):
            work.wait()
            assert future.done()
            assert future.value()[0].item() == 2


def test_callbacks_may_block_in_further_collectives(world: World):
    """PowerSGD does so. As many at once as there are buckets: no bounded pool, and not the IO thread, would do."""
    depth, width = 3, 20
    threads = set()

    def chain(group, tensor: torch.Tensor, left: int) -> Future:
        def go_on(done: Future) -> torch.Tensor:
            threads.add(threading.current_thread().name)
            value = done.value()[0]
            if left == 0:
                return value
            inner = value.clone()
            group.allreduce([inner]).wait()
            return inner

        return group.allreduce([tensor]).get_future().then(go_on)

    world.hub.hold()
    futures = [[chain(group, torch.ones(1), depth) for _ in range(width)] for group in world.groups]
    world.hub.go()
    for future in [*futures[0], *futures[1]]:
        assert future.wait().item() == 4
    assert all(name.startswith("byteps-work-") for name in threads)


def test_callback_that_raises_does_not_hurt(world: World, caplog):
    world.hub.hold()
    works = [group.allreduce([torch.ones(1)]) for group in world.groups]
    child = works[0].get_future().then(lambda done: 1 / 0)
    world.hub.go()
    for work in works:
        work.wait()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        child.wait()


def test_blocking_call_makes_no_future_and_no_thread(world: World):
    before = threading.active_count()
    works = world.run(lambda group, rank: group.allreduce([torch.ones(4)]))
    assert threading.active_count() == before
    assert all(work._base is None for work in works)


def test_done_work_lets_go_of_memory(world: World):
    sources = [torch.ones(2, 3).t() for _ in range(2)]
    outs = [torch.zeros(2) for _ in range(2)]
    works = world.run(lambda group, rank: group.broadcast([sources[rank]], 0))
    assert all(work._call is None for work in works)
    refs = [weakref.ref(work) for work in works]
    del works, outs
    world.hub.submitted.clear()
    barrier = [group.barrier() for group in world.groups]  # the hub's thread lets go of the last operation
    for work in barrier:
        work.wait()
    assert [ref() for ref in refs] == [None, None]  # no reference cycle: gone without a garbage collection


# ---- waiting


def test_wait_with_a_timeout_that_passes(world: World):
    world.hub.hold()
    works = [group.allreduce([torch.ones(1)]) for group in world.groups]
    with pytest.raises(OperationTimeout, match=r" Timed out waiting 20ms") as caught:
        works[0].wait(timedelta(milliseconds=20))
    assert "all_reduce SUM float32[1]" in str(caught.value)
    assert not works[0].is_completed()
    world.hub.go()
    for work in works:
        assert work.wait(timedelta(seconds=10))


@pytest.mark.parametrize("timeout", [timedelta(0), None])
def test_no_timeout_is_the_groups(world: World, timeout):
    works = [group.allreduce([torch.ones(1)]) for group in world.groups]
    for work in works:
        assert work.wait(timeout)


def test_timeout_of_the_operation(world: World):
    group = world.groups[0]
    group.set_timeout(timedelta(seconds=7))
    opts = dist.AllreduceOptions()
    group.allreduce([torch.ones(1)], opts)
    opts.timeout = timedelta(seconds=3)
    group.allreduce([torch.ones(1)], opts)
    assert [operation.timeout_s for operation in world.hub.submitted] == [7.0, 3.0]


def test_many_threads_wait_for_one_work(world: World):
    world.hub.hold()
    works = [group.allreduce([torch.ones(1)]) for group in world.groups]
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(works[0].wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    world.hub.go()
    for thread in threads:
        thread.join(10)
    assert seen == [True] * 8


def test_ctrl_c_gets_through(world: World):
    work = world.groups[0].allreduce([torch.ones(1)])
    main = threading.main_thread().ident
    assert main is not None
    waiting = threading.Event()
    latch = work._latch

    class Latch:
        def acquire(self, timeout: float) -> bool:
            waiting.set()
            return latch.acquire(timeout=timeout)

    def press() -> None:
        if waiting.wait(10):
            signal.pthread_kill(main, signal.SIGINT)

    work._latch = Latch()
    user = threading.Thread(target=press)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    user.join()
    work._latch = latch
    world.groups[1].allreduce([torch.ones(1)])
    assert work.wait()


def test_closing_fails_what_is_under_way(world: World):
    work = world.groups[0].allreduce([torch.ones(1)])
    future = work.get_future()
    world.groups[0].abort()
    with pytest.raises(ClosedError):
        work.wait()
    with pytest.raises(RuntimeError, match="ClosedError"):
        future.wait()
    with pytest.raises(ClosedError, match="was destroyed"):
        world.groups[0].allreduce([torch.ones(1)])
    del work, future
    gc.collect()
