"""Plans of all ranks, put together: they meet at the same engines, and do what the operation promises."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from torch_bps.core.flight import Flight, Task
from torch_bps.core.group import Group
from torch_bps.core.operation import Operation
from torch_bps.core.placement import Placement
from torch_bps.core.plan import Plane, plan_collective, plan_first_part, plan_other_parts
from torch_bps.core.split import split
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPE_BY_NAME, SUM
from torch_bps.wire.header import BY_NODE, DECLARE, HOME, PULL, PUSH, WANT, Header

FLOAT32 = DTYPE_BY_NAME["float32"].code
PARTITION_NBYTES = 128 << 10
GROUP_ID = 77
COLLECTIVES = [row.code for row in ops.ROWS if row.code not in (0, ops.SEND)]
REDUCING = [code for code in COLLECTIVES if ops.ROWS[code].combine == ops.REDUCE]
NUMELS = [0, 1, 100, 20_000, 100_003]


@dataclass(frozen=True)
class FakeLink:
    """An engine; all ranks have the same object for it."""

    name: str


@dataclass
class Job:
    """The groups of all ranks of a job."""

    mode: str
    nodes: list[int]
    groups: list[Group] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.nodes)


def make_job(mode: str, nodes: list[int], weights: list[float]) -> Job:
    """Make each rank's group as core.opening does."""
    job = Job(mode, nodes)
    ranks: list[Any] = [FakeLink(f"rank {rank}") for rank in range(len(nodes))]
    servers: list[Any] = [FakeLink(f"server {index}") for index in range(len(weights))]
    for rank, node in enumerate(nodes):
        here = [link for link, its_node in zip(ranks, nodes, strict=True) if its_node == node]
        server_plane = Plane(servers, weights)
        local_plane = Plane(here, [1.0] * len(here))
        reduce_plane, relay_plane, uplink_plane = local_plane, server_plane, None
        if mode == "local":
            relay_plane = local_plane
        elif mode == "flat":
            reduce_plane = server_plane
        else:
            uplink_plane = server_plane
        job.groups.append(
            Group(
                None,  # type: ignore[arg-type]
                GROUP_ID,
                "g",
                rank,
                len(nodes),
                reduce_plane=reduce_plane,
                relay_plane=relay_plane,
                uplink_plane=uplink_plane,
                is_local=mode == "local",
                round_length=Placement(weights).round_length or len(nodes),
                partition_bytes=PARTITION_NBYTES,
                description="",
            )
        )
    return job


def mixed(n: int, k: int) -> list[float]:
    shares = split([1.0] * n, [1.0] * k)
    return shares.colocated + shares.dedicated


JOBS = {
    "local of 2": lambda: make_job("local", [0, 0], []),
    "local of 5": lambda: make_job("local", [0] * 5, []),
    "flat, one server": lambda: make_job("flat", [0, 1], [1.0]),
    "flat, three servers": lambda: make_job("flat", [0, 1, 2, 3], [1.0, 1.0, 1.0]),
    "flat, mixed": lambda: make_job("flat", [0, 1, 2, 3], mixed(4, 3)),
    "flat, idle co-located": lambda: make_job("flat", [0, 1], mixed(2, 3)),
    "hierarchical": lambda: make_job("hierarchical", [0, 0, 0, 1, 1, 1], [1.0, 1.0]),
    "hierarchical, uneven": lambda: make_job("hierarchical", [0, 1, 0, 2, 0], mixed(3, 1)),
}
jobs = pytest.mark.parametrize("name", JOBS)
collectives = pytest.mark.parametrize("op", COLLECTIVES, ids=lambda code: ops.ROWS[code].name)


# ---- operations: what each rank brings and what it is promised


@functools.cache
def contribution(rank: int, block: int, numel: int) -> np.ndarray:
    """Return what `rank` has of a block: whole numbers, so that sums are exact."""
    return ((np.arange(numel) * 7 + rank * 31 + block * 101) % 1009).astype(np.float32)


def length_of(op: int, block: int, numel: int) -> int:
    if op == ops.BARRIER:
        return 0
    return numel + block if op in (ops.ALL_GATHER, ops.ALL_TO_ALL) and numel else numel


class Call:
    """One rank's operation, its memory, and what is to be in it in the end."""

    def __init__(self, op: int, rank: int, size: int, numel: int, root: int) -> None:
        self.results: dict[int, np.ndarray] = {}
        self.expected: dict[int, np.ndarray] = {}
        pushed, pulled = blocks_of(op, rank, size, root)
        pushes = {block: contribution(rank, block, length_of(op, block, numel)) for block in pushed}
        reducing = ops.ROWS[op].combine == ops.REDUCE
        for block, source in pulled.items():
            length = length_of(op, block, numel)
            self.results[block] = np.full(length, -1, np.float32)
            if reducing:
                everybody = [contribution(other, block, length) for other in range(size)]
                self.expected[block] = np.sum(everybody, axis=0, dtype=np.float32)
            else:
                self.expected[block] = contribution(source, block, length)
        self.operation = Operation(
            op,
            dtype=FLOAT32,
            redop=SUM if reducing else 0,
            root=root,
            pushes=tuple((block, as_bytes(array)) for block, array in pushes.items()),
            pulls=tuple((block, as_bytes(array)) for block, array in self.results.items()),
            on_done=lambda error: None,
            label=ops.ROWS[op].name,
            timeout_s=10,
            priority=-3,
        )

    def check(self) -> None:
        for block, expected in self.expected.items():
            np.testing.assert_array_equal(self.results[block], expected)


def as_bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(bytearray())


def blocks_of(op: int, rank: int, size: int, root: int) -> tuple[list[int], dict[int, int]]:
    """Return the blocks that a rank pushes, and those it pulls with their sources (-1: reduced), as in wire.ops."""
    ranks = range(size)
    others = [other for other in ranks if other != rank]
    match op:
        case ops.ALL_REDUCE | ops.BARRIER:
            return [0], {0: -1}
        case ops.REDUCE_TO_ROOT:
            return [0], {0: -1} if rank == root else {}
        case ops.REDUCE_SCATTER:
            return list(ranks), {rank: -1}
        case ops.BROADCAST:
            return ([0], {}) if rank == root else ([], {0: root})
        case ops.ALL_GATHER:
            return [rank], {other: other for other in others}
        case ops.GATHER:
            return ([], {other: other for other in others}) if rank == root else ([rank], {})
        case ops.SCATTER:
            return (others, {}) if rank == root else ([], {rank: root})
        case ops.ALL_TO_ALL:
            return [rank * size + other for other in others], {other * size + rank: other for other in others}
    raise AssertionError(op)


# ---- plans


def plan(group: Group, operation: Operation, sequence: int) -> Flight:
    operation.sequence = sequence
    flight = Flight(group, (group.id, 0, sequence), "", operation.priority, operation.on_done, operation)
    plan_collective(group, flight, operation)
    return flight


def run(job: Job, op: int, numel: int, sequence: int, root: int) -> list[Flight]:
    """Plan an operation on all ranks, do what the plans say, check what comes out; return the plans."""
    calls = [Call(op, rank, job.size, numel, root) for rank in range(job.size)]
    flights = [plan(group, call.operation, sequence) for group, call in zip(job.groups, calls, strict=True)]
    slots: dict[tuple[int, int], list[tuple[int, Task]]] = defaultdict(list)
    for rank, flight in enumerate(flights):
        for task in flight.tasks:
            check_header(job, calls[rank].operation, task)
            slots[task.header.block, task.header.part].append((rank, task))
    for slot, tasks in slots.items():
        if ops.ROWS[op].combine == ops.REDUCE:
            run_reduce(job, flights, slot, tasks)
        else:
            run_relay(job, op, tasks)
    for call in calls:
        call.check()
    return flights


def check_header(job: Job, operation: Operation, task: Task) -> None:
    header = task.header
    assert header[1:4] == (operation.op, FLOAT32, operation.redop)
    assert header[5:8] == (GROUP_ID, 0, operation.sequence)
    assert (header.root, header.priority) == (operation.root, -3)
    assert task.key == header[5:10]
    assert task.flight.operation is operation
    total = dict(operation.pushes if header.frame == PUSH else operation.pulls)[header.block].nbytes
    assert header.total == total
    assert task.credit_nbytes == (len(task.push) if task.push is not None else 0)  # a pull needs no credit
    assert task.credit_nbytes <= PARTITION_NBYTES
    if header.frame == PUSH:
        assert header.nbytes == (0 if task.push is None else task.push.nbytes)
        assert (task.push is None) == (header.nbytes == 0)
        assert bool(header.flags & WANT) == (task.into is not None)
    else:
        assert (header.frame, header.nbytes, task.push) == (PULL, 0, None)
        assert task.into is not None
    assert bool(header.flags & HOME) == (task.link is task.flight.homes[0])


def floats(view: memoryview | None) -> np.ndarray:
    return np.frombuffer(view, np.float32) if view is not None and view.nbytes else np.zeros(0, np.float32)


def run_relay(job: Job, op: int, tasks: list[tuple[int, Task]]) -> None:
    assert len({id(task.link) for _, task in tasks}) == 1, "pusher and pullers do not meet"
    (push,) = [task for _, task in tasks if task.header.frame == PUSH]
    pulls = [task for _, task in tasks if task.header.frame == PULL]
    assert len(pulls) == (job.size - 1 if ops.ROWS[op].pulls_all else 1)
    for pull in pulls:
        floats(pull.into)[:] = floats(push.push)


def run_reduce(job: Job, flights: list[Flight], slot: tuple[int, int], tasks: list[tuple[int, Task]]) -> None:
    assert [rank for rank, _ in tasks] == list(range(job.size)), "somebody does not push"
    engines: dict[int, set[int]] = defaultdict(set)
    for rank, task in tasks:
        assert not task.header.flags & BY_NODE
        engines[job.nodes[rank] if job.mode == "hierarchical" else 0].add(id(task.link))
    assert all(len(links) == 1 for links in engines.values()), "the ranks (of a node) do not meet"
    if job.mode == "hierarchical":
        servers = {id(flights[rank].servers.get(slot, task.link)) for rank, task in tasks}
        assert len(servers) == 1, "the nodes' sums do not meet"
    else:
        assert not any(flight.servers for flight in flights)
    total = np.sum([floats(task.push) for _, task in tasks], axis=0, dtype=np.float32)
    for _, task in tasks:
        if task.into is not None:
            floats(task.into)[:] = total


@jobs
@collectives
def test_the_plans_of_all_ranks_meet_and_do_what_the_operation_promises(name: str, op: int) -> None:
    job = JOBS[name]()
    for sequence, numel in enumerate([*NUMELS, 40_000]):
        run(job, op, numel, sequence, root=sequence % job.size)


@jobs
@pytest.mark.parametrize("op", REDUCING, ids=lambda code: ops.ROWS[code].name)
def test_the_first_part_of_a_reduction_is_at_home(name: str, op: int) -> None:
    job = JOBS[name]()
    for sequence in range(4):
        for flight in run(job, op, 40_000, sequence, root=0):
            first = flight.tasks[0]
            assert (first.header.block, first.header.part) == (0, 0)
            if op == ops.REDUCE_SCATTER and job.mode == "local":
                assert first.link is flight.group.reduce_plane.links[0]  # each engine adds what its rank wants
            else:
                assert first.link is flight.homes[0]
                assert first.header.flags & HOME
            if flight.servers:
                uplink = flight.group.uplink_plane
                assert uplink is not None
                assert flight.servers[0, 0] is uplink.links[uplink.placement.home(sequence)]


def touched(flight: Flight) -> set[int]:
    """Return the homes that hear of the operation."""
    frames = [(task.link, task.header) for task in flight.tasks] + flight.declares
    return {id(link) for link, header in frames if header.flags & HOME}


@jobs
@collectives
def test_every_rank_tells_the_home_once_where_no_task_goes(name: str, op: int) -> None:
    job = JOBS[name]()
    for sequence in range(4):
        flights = run(job, op, 100, sequence, root=1)
        for flight in flights:
            (home,) = flight.homes
            assert id(home) in touched(flight)
            by_tasks = [task for task in flight.tasks if task.link is home]
            declared = [header for link, header in flight.declares if link is home]
            assert len(declared) == (0 if by_tasks else 1)
            for _, header in flight.declares:
                check_declare(header, op, sequence)


def check_declare(header: Header, op: int, sequence: int) -> None:
    assert (header.frame, header.op, header.flags, header.nbytes) == (DECLARE, op, HOME, 0)
    assert header[5:10] == (GROUP_ID, 0, sequence, 0, 0)


@jobs
def test_ranks_that_disagree_have_a_home_in_common(name: str) -> None:
    job = JOBS[name]()
    for sequence in range(3):
        homes = {
            (rank, op): touched(plan(group, Call(op, rank, job.size, 100 + rank, 0).operation, sequence))
            for rank, group in enumerate(job.groups)
            for op in COLLECTIVES
        }
        for (rank, op), mine in homes.items():
            for (peer, other), theirs in homes.items():
                # in a hierarchical job a node's ranks find out at the node, the nodes at a server
                if job.mode != "hierarchical" or job.nodes[rank] == job.nodes[peer]:
                    assert mine & theirs, f"rank {rank} with op {op} and rank {peer} with op {other}"


@jobs
def test_a_disagreement_leaves_no_trace_in_later_plans(name: str) -> None:
    job = JOBS[name]()
    for rank, group in enumerate(job.groups):
        op = ops.BROADCAST if rank == 1 else ops.ALL_REDUCE
        plan(group, Call(op, rank, job.size, 30_000 * (rank + 1), 0).operation, 0)
    for sequence in range(1, 4):
        run(job, ops.ALL_REDUCE, 200_000, sequence, root=0)


def test_the_engine_of_a_local_reduce_scatter_is_who_wants_the_block() -> None:
    job = JOBS["local of 5"]()
    for flight in run(job, ops.REDUCE_SCATTER, 70_000, 3, root=0):
        for task in flight.tasks:
            assert task.link is job.groups[0].reduce_plane.links[task.header.block]


@pytest.mark.parametrize("op", [ops.BROADCAST, ops.ALL_GATHER, ops.GATHER, ops.SCATTER, ops.ALL_TO_ALL])
def test_locally_a_relayed_block_stays_with_who_pushed_it(op: int) -> None:
    job = JOBS["local of 5"]()
    for rank, flight in enumerate(run(job, op, 70_000, 3, root=2)):
        for task in flight.tasks:
            if task.header.frame == PUSH:
                assert task.link is job.groups[0].relay_plane.links[rank]


# ---- messages


@jobs
@pytest.mark.parametrize("any_source", [False, True], ids=["from one", "from any"])
@pytest.mark.parametrize("numel", NUMELS)
def test_both_ends_of_a_message_meet(name: str, any_source: bool, numel: int) -> None:
    job = JOBS[name]()
    src, dst, tag, number = job.size - 1, 0, -5, 4
    data, room = contribution(src, 0, numel), np.full(numel, -1, np.float32)
    send, receive = (
        message(pushed=data, peer=dst, tag=tag),
        message(pulled=room, peer=ops.ANY_SOURCE if any_source else src, tag=tag),
    )
    sent = first_part(job.groups[src], send, ops.stream_of(src, dst, tag), number)
    posted = first_part(job.groups[dst], receive, ops.stream_of(receive.peer, dst, tag), 9)

    (push,), (pull,) = sent.tasks, posted.tasks
    assert push.link is pull.link is sent.homes[0] is posted.homes[0]
    assert (push.header.frame, pull.header.frame) == (PUSH, PULL)
    assert (push.credit_nbytes, pull.credit_nbytes) == (0, 0)
    assert push.header.part == pull.header.part == 0
    assert push.header.sequence == number
    assert pull.header.sequence == 9
    assert (push.push is None) == (numel == 0)
    if job.mode == "local":
        assert push.link is job.groups[0].relay_plane.links[dst]

    stream = push.header.stream
    pushes = [push, *plan_other_parts(job.groups[src], sent, send, stream, number)]
    pulls = [pull, *plan_other_parts(job.groups[dst], posted, receive, stream, number)]
    for out, back in zip(pushes, pulls, strict=True):
        assert out.link is back.link
        assert out.header.total == back.header.total == 4 * numel
        if out is not push:
            assert out.key == back.key == out.header[5:10]
            assert out.credit_nbytes == out.header.nbytes > 0
            assert back.credit_nbytes == 0
        floats(back.into)[:] = floats(out.push)
    np.testing.assert_array_equal(room, data)
    if job.mode == "local":
        assert all(out.link is job.groups[0].relay_plane.links[src] for out in pushes[1:])


def message(*, pushed: np.ndarray | None = None, pulled: np.ndarray | None = None, peer: int, tag: int) -> Operation:
    return Operation(
        ops.SEND,
        dtype=FLOAT32,
        on_done=lambda error: None,
        label="send",
        timeout_s=10,
        pushes=() if pushed is None else ((0, as_bytes(pushed)),),
        pulls=() if pulled is None else ((0, as_bytes(pulled)),),
        peer=peer,
        tag=tag,
    )


def first_part(group: Group, operation: Operation, stream: int, number: int) -> Flight:
    operation.sequence = number
    flight = Flight(group, (group.id, stream, number), "", 0, operation.on_done, operation)
    plan_first_part(group, flight, operation, number)
    return flight
