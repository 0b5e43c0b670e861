"""A link's lanes: to which addresses of a service they go, and which frames go over which. Over fake channels."""

from __future__ import annotations

from typing import Any

import pytest

from torch_bps.core.link import Link
from torch_bps.transport.base import Buffer
from torch_bps.wire import control
from torch_bps.wire.header import CONTROL, PUSH, URGENT, Header

ZMQ, TCP, OTHER_TCP = "zmq://10.0.0.1:1", "tcp://10.0.0.1:2", "tcp://10.0.1.1:2"


class FakeChannel:
    """Keeps what is sent; also the transport that it is made by."""

    def __init__(self, address: str, lane: int) -> None:
        self.address = address
        self.lane = lane
        self.queued_nbytes = 0
        self.pushes: list[int] = []

    def send(self, header: Header, buffer: Buffer | None = None) -> None:
        if header.frame == PUSH:
            self.pushes.append(header.sequence)

    def close(self, error: Exception | None = None) -> None:
        pass


class FakeTransport:
    """Connects at once."""

    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []

    def connect(self, reactor: object, address: str, handler: object, lane: int = 0) -> FakeChannel:
        self.channels.append(FakeChannel(address, lane))
        return self.channels[-1]


def linked(endpoints: list[str], lanes: int, address: str = ZMQ) -> tuple[Link, list[FakeChannel]]:
    """Return a link that is ready, and its lanes."""
    transport: Any = FakeTransport()
    owner: Any = None
    link = Link(
        owner, {"zmq": transport, "tcp": transport}, owner, control.Hello("me", 0, "here", 1), address, lanes=lanes
    )
    header, payload = control.encode(control.Welcome("service", endpoints, nic_gbps=25.0))
    assert header.frame == CONTROL
    link.on_frame(transport.channels[0], header, Buffer(memoryview(payload)))
    for channel in transport.channels[1:]:
        link.on_open(channel)
    assert link.ready
    assert link.nic_gbps == 25.0
    return link, transport.channels[1:]


@pytest.mark.parametrize(
    ("endpoints", "lanes", "addresses"),
    [
        ([ZMQ, TCP], 2, [TCP, TCP, TCP]),  # the first is the express lane
        ([TCP, OTHER_TCP, ZMQ], 2, [TCP, OTHER_TCP, TCP]),
        ([TCP, OTHER_TCP], 1, [TCP, OTHER_TCP, TCP]),  # each address has a lane
        ([TCP, OTHER_TCP], 4, [TCP, OTHER_TCP, TCP, OTHER_TCP, TCP]),
        ([ZMQ], 4, [ZMQ, ZMQ]),
    ],
)
def test_lanes_take_the_addresses_of_the_service_in_turn(
    endpoints: list[str], lanes: int, addresses: list[str]
) -> None:
    link, channels = linked(endpoints, lanes)
    assert [channel.address for channel in channels] == addresses
    assert [channel.lane for channel in channels] == list(range(len(addresses)))
    assert ("to 2 addresses" in link.reason) == (len(set(addresses)) == 2)


@pytest.mark.parametrize(
    ("address", "endpoints", "where"),
    [
        ("zmq://10.0.0.9:1", ["tcp://0.0.0.0:2"], "tcp://10.0.0.9:2"),
        ("zmq://a-name:1", ["tcp://[::]:2"], "tcp://a-name:2"),
        ("zmq://[fd77::1]:1", ["tcp://[::]:2"], "tcp://[fd77::1]:2"),
    ],
)
def test_a_service_that_listens_everywhere_is_where_it_was_reached(
    address: str, endpoints: list[str], where: str
) -> None:
    _, channels = linked(endpoints, 1, address)
    assert {channel.address for channel in channels} == {where}


def push(link: Link, sequence: int, priority: int = 0, total: int = 64) -> None:
    link.send(Header(PUSH, sequence=sequence, priority=priority, total=total), None)


def test_lanes_take_turns_also_where_the_kernel_takes_everything_at_once() -> None:
    link, (express, *lanes) = linked([TCP], 3)
    for sequence in range(6):
        push(link, sequence)
    assert sorted(lane.pushes for lane in lanes) == [[0, 3], [1, 4], [2, 5]]
    assert not express.pushes


def test_a_lane_that_is_behind_is_passed_over() -> None:
    link, (_, *lanes) = linked([TCP], 3)
    lanes[0].queued_nbytes, lanes[2].queued_nbytes = 200, 100
    for sequence in range(3):
        push(link, sequence)
    assert lanes[1].pushes == [0, 1, 2]
    lanes[1].queued_nbytes = 300
    push(link, 3)
    push(link, 4)
    assert lanes[2].pushes == [3, 4]


def test_small_urgent_frames_have_the_express_lane_and_any_other_while_that_is_behind() -> None:
    link, (express, *lanes) = linked([TCP], 2)
    push(link, 0, URGENT - 1)
    push(link, 1, URGENT - 1)
    push(link, 9, URGENT - 1, total=1 << 20)
    assert express.pushes == [0, 1]
    express.queued_nbytes = 100
    push(link, 2, URGENT - 1)
    assert sorted(lane.pushes for lane in lanes) == [[2], [9]]
