"""The contract within one process, and the fault plan."""

from __future__ import annotations

import itertools

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import Kit, Recorder, Rig, send
from torch_bps.errors import PeerLostError
from torch_bps.transport.faults import FaultPlan
from torch_bps.transport.inproc import InprocTransport
from torch_bps.transport.reactor import EpollReactor
from torch_bps.wire.header import PUSH, Header

_names = itertools.count()


class InprocKit(Kit):
    name = "inproc"
    one_reactor = True
    cut_is_noticed = True
    faults: FaultPlan | None = None

    def make(self) -> InprocTransport:
        return InprocTransport(self.faults)

    def where(self) -> str:
        return f"name{next(_names)}"

    def nowhere(self) -> str:
        return "inproc://nobody"


class TestInprocContract(TransportContract):
    kit_class = InprocKit


class DelayedKit(InprocKit):
    def __init__(self) -> None:
        super().__init__()
        self.faults = FaultPlan(3, max_delay=4)


class TestDelayedInprocContract(TransportContract):
    """Delays change nothing that the contract promises."""

    kit_class = DelayedKit


def test_the_same_seed_brings_the_same_delays() -> None:
    one, other = FaultPlan(5, max_delay=9), FaultPlan(5, max_delay=9)
    assert [one.delay() for _ in range(50)] == [other.delay() for _ in range(50)]
    assert one.num_delayed > 10


def test_a_cut_connection_is_lost() -> None:
    kit = InprocKit()
    kit.faults = FaultPlan(1, cut_after=2)
    rig = Rig(kit)
    near, far = rig.pair()
    for number in range(3):
        send(rig, near, b"x" * 100, number)
    rig.until_closed(near, far)
    assert isinstance(near.log.closed[0], PeerLostError)
    assert isinstance(far.log.closed[0], PeerLostError)
    assert len(far.log.frames) <= 2
    rig.close()


def test_frames_are_held_until_let_go() -> None:
    kit = InprocKit()
    kit.faults = FaultPlan(1)
    rig = Rig(kit)
    pairs = [rig.pair(), rig.pair()]
    kit.faults.hold()
    expected = [[send(rig, near, bytes([n]), n) for n in range(3)] for near, _ in pairs]
    pairs[1][0].channel.close_when_sent()
    for _ in range(10):
        rig.step()
    assert all(far.log.frames == [] for _, far in pairs)
    assert pairs[1][1].log.closed == []
    kit.faults.let_go()
    rig.until(lambda: all(len(far.log.frames) >= 3 for _, far in pairs), "all frames")
    rig.until_closed(*pairs[1])
    assert [far.log.frames for _, far in pairs] == expected
    rig.close()


def test_a_channel_closed_while_frames_are_held_loses_them() -> None:
    kit = InprocKit()
    kit.faults = FaultPlan(1)
    rig = Rig(kit)
    near, far = rig.pair()
    kit.faults.hold()
    send(rig, near, b"lost")
    rig.step()
    near.channel.close()
    rig.until_closed(near, far)
    assert rig.sent.alive == 0
    kit.faults.let_go()
    rig.step()
    assert far.log.frames == []
    rig.close()


def test_buffers_are_handed_over_not_copied() -> None:
    rig = Rig(InprocKit())
    near, far = rig.pair()
    buffer = rig.sent.buffer(bytearray(1000))
    near.channel.send(Header(PUSH, nbytes=1000), buffer)
    rig.until(lambda: far.log.frames, "the frame")
    assert far.log.received_into[0] is buffer
    rig.close()


def test_names_belong_to_one_transport_object() -> None:
    reactor, log = EpollReactor(), Recorder()
    one, other = InprocTransport(), InprocTransport()
    one.listen(reactor, "name", lambda channel: Recorder())
    other.listen(reactor, "name", lambda channel: Recorder()).close()
    other.connect(reactor, "inproc://name", log)
    reactor.run_once()
    reactor.run_once()
    reactor.stop()
    assert isinstance(log.closed[0], PeerLostError)
