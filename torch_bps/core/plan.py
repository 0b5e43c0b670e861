"""From an Operation to tasks: cut into partitions, placed on engines. Pure; every rank of a group comes to the same.

    local          all ranks on one host: each rank's own service is an engine
    flat           engines are servers; each rank contributes for itself
    hierarchical   reducing ops go to the engines of the node's ranks, which push the node's sum on to a server;
                   the rest is flat

Rules that keep ranks together even when they disagree about an operation: part 0 of block 0 goes to the home engine,
which depends on the sequence alone; a rank that sends nothing there sends a DECLARE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bps.core.flight import Flight, Task, receive_key
from torch_bps.core.link import Link
from torch_bps.core.operation import Operation
from torch_bps.core.partition import cut, partition_nbytes
from torch_bps.core.placement import Placement
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPES
from torch_bps.wire.header import DECLARE, HOME, PULL, PUSH, WANT, Header

if TYPE_CHECKING:
    from torch_bps.core.group import Group


class Plane:
    """A set of engines and the placement on them. `links[i]` is engine i."""

    def __init__(self, links: list[Link], weights: list[float]) -> None:
        self.links = links
        self.placement = Placement(weights)


def plan_collective(group: Group, flight: Flight, operation: Operation) -> None:
    """Fill `flight` with the tasks of a collective. Called under the group's lock, in the order of sequences."""
    reducing = ops.ROWS[operation.op].combine == ops.REDUCE
    plane = group.reduce_plane if reducing else group.relay_plane
    home = plane.placement.home(operation.sequence)
    touched = False
    if reducing:
        touched = _plan_reduce(group, flight, operation, plane, home)
    else:
        touched = _plan_relay(group, flight, operation, plane, home)
    flight.homes = [plane.links[home]]
    pieces = operation.pushes or operation.pulls
    declare = _header(group, operation, DECLARE, flags=HOME, total=pieces[0][1].nbytes if pieces else 0)
    if not touched:
        flight.declares.append((plane.links[home], declare))
    if not reducing and group.uplink_plane is not None:
        # ranks of this node that think it is a reducing operation are at the node's own home
        local = group.reduce_plane
        flight.declares.append((local.links[local.placement.home(operation.sequence)], declare))


def _plan_reduce(group: Group, flight: Flight, operation: Operation, plane: Plane, home: int) -> bool:
    wanted = dict(operation.pulls)
    itemsize = DTYPES[operation.dtype].itemsize
    sequence = operation.sequence
    touched = False
    uplink = group.uplink_plane
    for block, memory in operation.pushes:
        total = memory.nbytes
        parts = cut(
            total,
            partition_nbytes(
                total,
                partition_bytes=group.partition_bytes,
                round_length=group.round_length,
                itemsize=itemsize,
                pipeline=not group.is_local,
            ),
        )
        into = wanted.get(block)
        if operation.op == ops.REDUCE_SCATTER and group.is_local:
            engines = [block] * len(parts)  # who wants the block adds it: its result need not travel
        else:
            engines = plane.placement.spread(sequence, block, len(parts))
        servers: list[int] = []
        if uplink is not None:
            servers = uplink.placement.spread(sequence, block, len(parts))
        for part, (offset, nbytes) in enumerate(parts):
            engine = engines[part]
            flags = (HOME if engine == home else 0) | (WANT if into is not None else 0)
            touched = touched or engine == home
            header = _header(group, operation, PUSH, flags, block, part, total, nbytes)
            piece = memory[offset : offset + nbytes]
            target = into[offset : offset + nbytes] if into is not None else None
            flight.tasks.append(
                Task(
                    flight,
                    plane.links[engine],
                    header,
                    piece if nbytes else None,
                    target,
                    header[5:10],
                    _charge(group, nbytes, len(parts)),
                )
            )
            if uplink is not None:
                flight.servers[block, part] = uplink.links[servers[part]]
    return touched


def _plan_relay(group: Group, flight: Flight, operation: Operation, plane: Plane, home: int) -> bool:
    touched = False
    # Pulls first and without credit: what they bring was pushed within another rank's credit. Behind this rank's own
    # pushes, which wait for the others' pulls, they would make all ranks wait for each other.
    for frame, pieces in ((PULL, operation.pulls), (PUSH, operation.pushes)):
        for block, memory in pieces:
            total = memory.nbytes
            parts = cut(total, _relay_partition(group, total))
            if group.is_local:
                engines = [_pusher(operation, block, group.size)] * len(parts)
            else:
                engines = plane.placement.spread(operation.sequence, block, len(parts))
            for part, (offset, nbytes) in enumerate(parts):
                engine = engines[part]
                flags = HOME if engine == home else 0
                touched = touched or engine == home
                piece = memory[offset : offset + nbytes]
                push = frame == PUSH
                header = _header(group, operation, frame, flags, block, part, total, nbytes if push else 0)
                flight.tasks.append(
                    Task(
                        flight,
                        plane.links[engine],
                        header,
                        piece if push and nbytes else None,
                        None if push else piece,
                        header[5:10],
                        _charge(group, nbytes, len(parts)) if push else 0,
                    )
                )
    return touched


def _charge(group: Group, nbytes: int, num_parts: int) -> int:
    """Return what a partition takes of the credit: all of a large block's count alike, whatever their size."""
    return max(nbytes, group.charge_nbytes) if num_parts > 1 and nbytes else nbytes


def _relay_partition(group: Group, total: int) -> int:
    return partition_nbytes(
        total,
        partition_bytes=group.partition_bytes,
        round_length=1 if group.is_local else group.round_length,
        itemsize=1,
        pipeline=not group.is_local,
    )


def _pusher(operation: Operation, block: int, size: int) -> int:
    """Return the rank that pushes a relayed block: on one host its own service holds it."""
    if operation.op in (ops.BROADCAST, ops.SCATTER):
        return operation.root
    return block // size if operation.op == ops.ALL_TO_ALL else block


# ---- point-to-point: part 0 through the receiver's mailbox, the rest when it was matched


def message_parts(group: Group, nbytes: int) -> list[tuple[int, int]]:
    """Return the parts of a message of `nbytes`."""
    return cut(nbytes, _relay_partition(group, nbytes))


def plan_first_part(group: Group, flight: Flight, operation: Operation, sequence: int) -> None:
    """Fill `flight` with part 0 of a send, or the pull of part 0 of a receive."""
    sending = bool(operation.pushes)
    (_, memory), *_ = operation.pushes or operation.pulls
    dst = operation.peer if sending else group.rank
    offset, nbytes = message_parts(group, memory.nbytes)[0]
    piece = memory[offset : offset + nbytes]
    header = Header(
        PUSH if sending else PULL,
        ops.SEND,
        operation.dtype,
        group=group.id,
        stream=flight.id[1],
        sequence=sequence,
        total=memory.nbytes,
        nbytes=nbytes if sending else 0,
        priority=operation.priority,
    )
    link = group.relay_plane.links[dst % len(group.relay_plane.links)]
    flight.homes = [link]
    push = piece if sending and nbytes else None
    # no credit: a message that nobody has come for yet must not hold up the rest
    key = header[5:10] if sending else receive_key(group.id, flight.id[1], sequence)
    flight.tasks.append(Task(flight, link, header, push, None if sending else piece, key, 0))


def plan_other_parts(group: Group, flight: Flight, operation: Operation, stream: int, number: int) -> list[Task]:
    """Return the tasks of parts 1.. of message `number` of `stream`, now that part 0 was matched."""
    sending = bool(operation.pushes)
    (_, memory), *_ = operation.pushes or operation.pulls
    parts = message_parts(group, memory.nbytes)
    src, dst, _tag = ops.split_stream(stream)
    links = group.relay_plane.links
    tasks = []
    for part, (offset, nbytes) in enumerate(parts[1:], 1):
        engine = src if group.is_local else (dst + number + part) % len(links)
        header = Header(
            PUSH if sending else PULL,
            ops.SEND,
            operation.dtype,
            group=group.id,
            stream=stream,
            sequence=number,
            part=part,
            total=memory.nbytes,
            nbytes=nbytes if sending else 0,
            priority=operation.priority,
        )
        piece = memory[offset : offset + nbytes]
        tasks.append(
            Task(
                flight,
                links[engine],
                header,
                piece if sending else None,
                None if sending else piece,
                header[5:10],
                _charge(group, nbytes, len(parts)) if sending else 0,
            )
        )
    return tasks


def _header(
    group: Group,
    operation: Operation,
    frame: int,
    flags: int = 0,
    block: int = 0,
    part: int = 0,
    total: int = 0,
    nbytes: int = 0,
) -> Header:
    return Header(
        frame,
        operation.op,
        operation.dtype,
        operation.redop,
        flags,
        group.id,
        0,
        operation.sequence,
        block,
        part,
        total,
        nbytes,
        operation.root,
        operation.priority,
    )
