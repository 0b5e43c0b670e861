"""Delayed channels keep the contract of those they wrap, and do delay."""

from __future__ import annotations

import random

import pytest

from tests.conformance import delays
from tests.conformance.transport_contract import TransportContract
from tests.transport.test_inproc import InprocKit
from tests.transport.test_shm import ShmKit
from tests.transport.test_tcp import TcpKit
from torch_bps.config import Config
from torch_bps.core import runtime


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "LONGEST_S", 0.005)


class DelayedTcpKit(TcpKit):
    def make(self) -> delays.DelayedTransport:
        return delays.DelayedTransport(super().make(), random.Random(3))


class TestDelayedTcpContract(TransportContract):
    kit_class = DelayedTcpKit


class DelayedShmKit(ShmKit):
    def make(self) -> delays.DelayedTransport:
        return delays.DelayedTransport(super().make(), random.Random(5))


class TestDelayedShmContract(TransportContract):
    kit_class = DelayedShmKit


class DelayedInprocKit(InprocKit):
    def make(self) -> delays.DelayedTransport:
        return delays.DelayedTransport(super().make(), random.Random(7))


class TestDelayedInprocContract(TransportContract):
    kit_class = DelayedInprocKit


def test_the_same_seed_draws_the_same_delays() -> None:
    one, other = random.Random("20190/test/0"), random.Random("20190/test/0")
    drawn = [delays.draw(one) for _ in range(200)]
    assert drawn == [delays.draw(other) for _ in range(200)]
    assert 30 < sum(delay_s > 0 for delay_s in drawn) < 90
    assert max(drawn) < delays.LONGEST_S


def test_installed_it_is_in_every_transport_of_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("make", "InprocTransport"):
        monkeypatch.setattr(runtime, name, getattr(runtime, name))  # what `install` replaces is put back
    delays.install("seed")
    made = runtime.Runtime(Config.load({}), 0)
    try:
        assert {type(transport) for transport in made._transports.values()} == {delays.DelayedTransport}
    finally:
        made.users = 1
        made.release(abort=True)
