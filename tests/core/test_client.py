"""When the client takes waiting for a stall; over a fake link and clock. All else of it meets real services."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torch_bps.core import client as module
from torch_bps.core.client import Client
from torch_bps.core.flight import Flight, Task
from torch_bps.wire.header import DONE, PUSH, Header, key_of

NBYTES, WINDOW = 1 << 20, 4


class Clock:
    """Stands in for the reactor and for the clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        self._due.append((self.now_s + delay_s, function))

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [entry for entry in self._due if entry[0] <= end_s]:
            first = min(due, key=lambda entry: entry[0])
            self._due.remove(first)
            self.now_s = first[0]
            first[1]()
        self.now_s = end_s


class Job:
    """A client, one service, and operations of 8 partitions where 4 may be under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock.monotonic))
        reactor: Any = self.clock
        self.client = Client(
            reactor, credit_nbytes=WINDOW * NBYTES, heartbeat_timeout_s=0.0, stall_warning_s=1e9, who="a test"
        )
        self.under_way: list[Header] = []
        self.link: Any = SimpleNamespace(
            closed=None, tasks={}, transport="tcp", send=lambda header, buffer: self.under_way.append(header)
        )

    def start(self, sequence: int, priority: int = 0, group_id: int = 1) -> None:
        group: Any = SimpleNamespace(broken=None, id=group_id)
        operation: Any = SimpleNamespace(name="all_reduce")
        flight = Flight(group, (group_id, 0, sequence), f"#{sequence}", priority, lambda error: None, operation)
        flight.deadline_s = 1e9
        for part in range(8):
            header = Header(PUSH, group=group_id, sequence=sequence, part=part)
            flight.tasks.append(Task(flight, self.link, header, None, None, key_of(header), NBYTES))
        self.client.start(flight)

    def answer_all(self, after_s: float) -> None:
        while self.under_way:
            self.clock.wait(after_s)
            for header in [*self.under_way]:
                self.under_way.remove(header)
                self.client.on_result(self.link, header._replace(frame=DONE), None)


def test_nothing_back_for_a_moment_is_a_stall_where_results_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.start(1)
    job.answer_all(after_s=0.001)
    job.start(2)
    job.start(1, group_id=2)
    assert len(job.under_way) == WINDOW
    job.clock.wait(0.2)
    assert len(job.under_way) > WINDOW


def test_it_is_none_where_results_take_that_long(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for sequence in range(1, 9):
        job.start(sequence)
        job.answer_all(after_s=0.2)
    job.start(10)
    job.start(1, group_id=2)
    job.clock.wait(0.25)
    assert len(job.under_way) == WINDOW
    job.clock.wait(2.0)  # but no wait is for ever
    assert len(job.under_way) > WINDOW


@pytest.mark.parametrize(("priority", "stalls"), [(0, False), (5, True)])
def test_within_a_group_only_priorities_that_differ_make_a_stall_and_a_late_one(
    monkeypatch: pytest.MonkeyPatch, priority: int, stalls: bool
) -> None:
    job = Job(monkeypatch)
    job.start(1)
    job.start(2, priority)
    job.clock.wait(0.9)
    assert len(job.under_way) == WINDOW
    job.clock.wait(1.2)
    assert (len(job.under_way) > WINDOW) == stalls


def test_after_a_late_stall_within_a_group_the_next_ones_are_early_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for sequence in range(1, 12):
        job.start(sequence, priority=5 * (sequence > 1))
    job.clock.wait(1.2)
    under_way = len(job.under_way)
    assert under_way > WINDOW
    job.clock.wait(0.2)
    assert len(job.under_way) > under_way


def test_a_result_begins_the_wait_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.start(1)
    job.start(1, group_id=2)
    for _ in range(5):
        job.clock.wait(0.04)
        header = job.under_way.pop(0)
        job.client.on_result(job.link, header._replace(frame=DONE), None)
        assert len(job.under_way) == WINDOW
