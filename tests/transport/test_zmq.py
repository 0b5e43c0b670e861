"""The contract over ZeroMQ."""

from __future__ import annotations

from tests.conformance.transport_contract import TransportContract
from tests.conformance.transport_rig import Kit
from torch_bps.transport.zmq import ZmqTransport


class ZmqKit(Kit):
    name = "zmq"
    clog_nbytes = None

    def make(self) -> ZmqTransport:
        return ZmqTransport()

    def nowhere(self) -> str:
        return "zmq://127.0.0.1:1"


class TestZmqContract(TransportContract):
    kit_class = ZmqKit
