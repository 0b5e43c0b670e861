"""What a process group is besides its collectives: identity, messages, barriers, its end, its cost."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d

from tests.backend.conftest import World
from tests.fakes import Hub, InstantGroup
from torch_bps.backend.process_group import ProcessGroupBytePS
from torch_bps.errors import BytePSError, ClosedError, MismatchError, OperationTimeout, UnsupportedError

LIMIT_S = 10.0


# ---- identity


def test_identity(job):
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroupBytePS)
    assert dist.get_backend() == "byteps"
    assert (group.rank(), group.size(), group.name()) == (0, 2, "byteps")
    assert group._get_backend_name() == "byteps"
    assert (group.group_name, group.group_desc) == ("0", "default_pg")
    assert _resolve_process_group("0") is group
    group.get_group_store().set("key", "value")
    assert group.get_group_store().get("key") == b"value"


def test_gloo_inside(job):
    group = dist.group.WORLD
    assert torch.device("cpu") in group._device_types
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    group.set_timeout(timedelta(seconds=3))
    assert group._timeout_s == 3
    distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    assert group._timeout_s == 4


def test_gloo_cannot_be_made(monkeypatch, caplog):
    monkeypatch.setattr("torch_bps.backend.gloo_inside._Gloo", None)
    group = ProcessGroupBytePS(None, dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert "no gloo inside" in caplog.text
    group.allreduce([torch.ones(1)]).wait()
    group.shutdown()


def test_sequence_number(world):
    group = world.groups[0]
    assert group._get_sequence_number_for_group() == 0
    world.run(lambda group, rank: group.allreduce([torch.ones(1)]))
    world.run(lambda group, rank: group.send([torch.ones(1)], 1) if rank == 0 else group.recv([torch.ones(1)], 0))
    assert group._get_sequence_number_for_group() == 1
    group._set_sequence_number_for_group()


def test_both_styles_of_arguments(world):
    tensors = [torch.ones(2), torch.ones(2)]
    world.run(lambda group, rank: group.allreduce(tensors[rank], dist.ReduceOp.MAX))
    assert tensors[0].tolist() == [1, 1]
    world.run(lambda group, rank: group.allreduce(tensors[rank], op=dist.ReduceOp.SUM, timeout=timedelta(seconds=3)))
    assert tensors[0].tolist() == [2, 2]
    assert world.hub.submitted[-1].timeout_s == 3
    world.run(lambda group, rank: group.broadcast(tensors[rank].fill_(rank), 1))
    assert tensors[0].tolist() == [1, 1]
    world.run(lambda group, rank: group.reduce(tensors[rank], root=1))
    assert tensors[1].tolist() == [2, 2]
    outs = [torch.zeros(2), torch.zeros(2)]
    for rank, group in enumerate(world.groups):
        group.allgather(outs if rank == 0 else [torch.zeros(2), torch.zeros(2)], tensors[rank])
    world.run(lambda group, rank: group.barrier(timeout=timedelta(seconds=2)))
    assert outs[1].tolist() == [2, 2]
    world.run(lambda group, rank: group.gather(outs if rank == 0 else [], tensors[rank], 0))
    world.run(lambda group, rank: group.scatter(tensors[rank], outs if rank == 0 else [], 0))
    world.run(lambda group, rank: group.reduce_scatter(tensors[rank], [torch.ones(2), torch.ones(2)]))
    assert tensors[1].tolist() == [2, 2]
    for wrong in ({"root": 1}, {"timeouts": 3}):
        with pytest.raises(TypeError, match="expected AllreduceOptions"):
            world.groups[0].allreduce(tensors[0], **wrong)


# ---- messages


def test_send_and_recv(world):
    a, b = world.groups
    room = torch.zeros(3)
    sent = a.send([torch.arange(3.0)], 1, 7)
    received = b.recv([room], 0, 7)
    assert sent.wait()
    assert received.wait()
    assert room.tolist() == [0, 1, 2]
    assert received._source_rank() == received.source_rank() == 0


def test_messages_keep_to_their_tag_and_order(world):
    a, b = world.groups
    rooms = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    works = [b.recv([rooms[k]], 0, k % 2) for k in range(4)]
    works += [a.send([torch.tensor([k])], 1, k % 2) for k in (0, 2, 1, 3)]
    for work in works:
        work.wait()
    assert [int(room) for room in rooms] == [0, 1, 2, 3]


def test_strided_messages(world):
    a, b = world.groups
    room = torch.zeros(3, 2)
    b_work = b.recv([room.t()], 0)
    a.send([torch.arange(6.0).reshape(3, 2).t()], 1)
    b_work.wait()
    assert room.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_from_anyone(make_world):
    groups = make_world(3).groups
    room = torch.zeros(1)
    work = groups[0].recv_anysource([room], 5)
    groups[2].send([torch.ones(1)], 0, 5).wait()
    work.wait()
    assert work._source_rank() == 2


def test_messages_to_oneself(world):
    group = world.groups[0]
    rooms = [torch.zeros(2, 2), torch.zeros(2, 2)]
    early = group.recv([rooms[0].t()], 0, 3)
    assert not early.is_completed()
    source = torch.arange(4.0).reshape(2, 2)
    group.send([source], 0, 3).wait()
    assert early.wait()
    assert early._source_rank() == 0
    assert rooms[0].t().tolist() == source.tolist()
    group.send([source], 0, 3)
    source.zero_()
    group.recv([rooms[1]], 0, 3).wait()
    assert rooms[1].tolist() == [[0, 1], [2, 3]]
    group.send([torch.ones(3)], 0)
    with pytest.raises(MismatchError, match=r"sent itself float32\[3\] and receives float32\[2, 2\]"):
        group.recv([rooms[0]], 0).wait()
    never = group.recv([rooms[0]], 0)
    group.shutdown()
    with pytest.raises(ClosedError):
        never.wait()
    assert not world.hub.submitted


def test_batch_isend_irecv(job):
    ops = [dist.P2POp(dist.isend, torch.ones(1), group_peer=0), dist.P2POp(dist.irecv, torch.ones(1), group_peer=0)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# ---- a group of one


def test_a_group_of_one_sends_nothing(make_world):
    world = make_world(1)
    (group,) = world.groups
    assert group.barrier().wait()
    group.monitored_barrier(timedelta(seconds=1))
    tensor = torch.ones(2)
    work = group.allreduce([tensor])
    assert work.is_completed()
    assert work.get_future().value()[0] is tensor
    assert group._get_sequence_number_for_group() == 2
    any_source = group.recv_anysource([tensor], 1)
    group.send([torch.zeros(2)], 0, 1)
    any_source.wait()
    assert tensor.tolist() == [0, 0]
    assert world.hub.submitted == []


# ---- monitored barrier


def monitored(world: World, ranks: list[int], timeout_s: float, wait_all_ranks: bool = False) -> dict[int, object]:
    """Let `ranks` come to a monitored barrier, each in a thread; return what each got (None: passed)."""
    results: dict[int, object] = {}

    def come(rank: int) -> None:
        try:
            world.groups[rank].monitored_barrier(timedelta(seconds=timeout_s), wait_all_ranks=wait_all_ranks)
            results[rank] = None
        except BytePSError as error:
            results[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


def test_monitored_barrier_passes(make_world):
    world = make_world(3)
    for wait_all_ranks in (False, True):
        assert monitored(world, [0, 1, 2], LIMIT_S, wait_all_ranks) == {0: None, 1: None, 2: None}


def test_monitored_barrier_names_the_first_missing_rank(make_world):
    world = make_world(4)
    results = monitored(world, [0, 1], 0.05)
    assert isinstance(results[0], OperationTimeout)
    assert "Rank 2 failed to pass monitoredBarrier in 50 ms" in str(results[0])
    assert "Rank 1 successfully reached monitoredBarrier, but received errors" in str(results[1])
    late = monitored(world, [2], LIMIT_S)
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in str(late[2])


def test_monitored_barrier_names_all_missing_ranks(make_world):
    world = make_world(4)
    results = monitored(world, [0, 2], 0.05, wait_all_ranks=True)
    assert "Ranks 1, 3 failed to pass monitoredBarrier in 50 ms" in str(results[0])


def test_monitored_barrier_without_time(world):
    with pytest.raises(OperationTimeout, match="Rank 0 timed out in monitoredBarrier"):
        world.groups[0].monitored_barrier(timedelta(0))


# ---- the end


def test_closing_twice(world):
    group = world.groups[0]
    group.shutdown()
    group.shutdown()
    group.abort()
    assert world.hub.groups[0].closed is False
    other = world.groups[1]
    other.abort()
    assert world.hub.groups[1].closed is True
    with pytest.raises(ClosedError, match="process group 'w' was destroyed"):
        group.barrier()


def test_destroy(runtime):
    dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2)
    extra = dist.new_group([0, 1], backend="byteps")
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    future.then(lambda done: done).wait()
    gone = [weakref.ref(dist.group.WORLD), weakref.ref(extra)]
    fakes = [hub.groups[0] for hub in runtime.hubs]
    del future
    dist.destroy_process_group()
    del extra
    gc.collect()
    assert [fake.closed for fake in fakes] == [False, False]
    assert [ref() for ref in gone] == [None, None]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("byteps-")]


def test_abort_process_group(runtime):
    dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2)
    fake = runtime.hubs[0].groups[0]
    distributed_c10d._abort_process_group()
    assert fake.closed is True


# ---- with other backends


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:byteps", "cpu:byteps,cuda:byteps", "cuda:byteps", "BYTEPS"])
def test_maps_of_devices(runtime, backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert isinstance(dist.group.WORLD, ProcessGroupBytePS)
    assert tensor.tolist() == [1, 1]
    objects = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]
    dist.barrier()
    dist.destroy_process_group()


def test_beside_a_gloo_world(runtime):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="byteps")
    assert dist.get_backend(group) == "byteps"
    assert dist.get_backend() == "gloo"
    dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def test_cuda_tensors_where_there_is_no_gpu():
    from torch_bps.backend import staging

    with pytest.raises(UnsupportedError, match="device xpu:0"):
        staging._device_stage(torch.device("xpu:0"))


# ---- cost


def test_cost():
    """CPU time of a blocking all_reduce in this layer: about 10 us on an idle core; the bound is for busy ones."""
    hub = Hub(2)
    group = ProcessGroupBytePS(InstantGroup(hub, 0), dist.HashStore(), 0, 2, timedelta(seconds=5))
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    tensor = torch.ones(100)
    best_s = 1.0
    for _ in range(20):
        began = time.thread_time()
        for _ in range(200):
            group.allreduce([tensor], opts).wait()
        best_s = min(best_s, (time.thread_time() - began) / 200)
    group.shutdown()
    hub.stop()
    assert best_s < 40e-6
