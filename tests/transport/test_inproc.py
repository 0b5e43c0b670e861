"""The contract within one process, and the fault plan."""

from __future__ import annotations

import itertools

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import Kit, Rig, send
from torch_bps.errors import PeerLostError
from torch_bps.transport.faults import FaultPlan
from torch_bps.transport.inproc import InprocTransport

_names = itertools.count()


class InprocKit(Kit):
    name = "inproc"
    one_reactor = True
    clog_nbytes = None
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
    assert len(far.log.frames) <= 2
    rig.close()
