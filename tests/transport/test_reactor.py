"""The loop: order, timers, descriptors that come and go, threads, the end."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torch_bps.transport.reactor import EpollReactor

DEADLINE_S = 10.0


@pytest.fixture
def reactor() -> Iterator[EpollReactor]:
    reactor = EpollReactor("byteps-test")
    yield reactor
    reactor.stop()


@pytest.fixture
def wires() -> Iterator[list[socket.socket]]:
    """Two connected pairs: 0-1, 2-3."""
    sockets = [*socket.socketpair(), *socket.socketpair()]
    yield sockets
    for sock in sockets:
        sock.close()


def until(reactor: EpollReactor, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline
        reactor.run_once(0.1)


# ---- calls


def test_calls_run_in_order_and_those_made_meanwhile_in_the_next_round(reactor: EpollReactor) -> None:
    ran: list[object] = []

    def first() -> None:
        ran.append("first")
        reactor.call(ran.append, "made meanwhile")

    reactor.call(first)
    reactor.call(ran.append, "second")
    reactor.run_once()
    assert ran == ["first", "second"]
    reactor.run_once(DEADLINE_S)  # does not wait: there is something to do
    assert ran == ["first", "second", "made meanwhile"]


def test_a_call_from_another_thread_wakes_the_loop(reactor: EpollReactor) -> None:
    reactor.start()
    ran: list[int] = []
    done = threading.Event()

    def put(first: int) -> None:
        for number in range(first, first + 500):
            reactor.call(ran.append, number)

    threads = [threading.Thread(target=put, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    reactor.call(done.set)
    assert done.wait(DEADLINE_S)
    assert [number for number in ran if number < 1000] == list(range(500))
    assert [number for number in ran if number >= 1000] == list(range(1000, 1500))


def test_in_thread(reactor: EpollReactor) -> None:
    assert reactor.in_thread()
    seen: list[object] = []
    done = threading.Event()
    reactor.start()
    reactor.call(lambda: (seen.extend([reactor.in_thread(), threading.current_thread().name]), done.set()))
    assert done.wait(DEADLINE_S)
    assert seen == [True, "byteps-test"]
    assert not reactor.in_thread()


def test_a_crash_is_reported_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    crashes: list[BaseException] = []
    reactor = EpollReactor(on_crash=crashes.append)
    error, ran = RuntimeError("a bug"), []

    def fail() -> None:
        raise error

    reactor.call(fail)
    reactor.call_later(0.0, fail)
    reactor.call(ran.append, 1)
    reactor.run_once()
    reactor.stop()
    assert crashes == [error, error]
    assert ran == [1]
    assert "a bug" in caplog.text


# ---- timers


def test_timers_fire_in_the_order_of_their_time(reactor: EpollReactor) -> None:
    fired: list[str] = []
    reactor.call_later(0.02, lambda: fired.append("late"))
    reactor.call_later(0.0, lambda: fired.append("now"))
    cancelled = reactor.call_later(0.01, lambda: fired.append("never"))
    cancelled.cancel()
    started = time.monotonic()
    until(reactor, lambda: len(fired) == 2)
    assert fired == ["now", "late"]
    assert time.monotonic() - started >= 0.02
    cancelled.cancel()


def test_a_timer_ends_the_wait_and_a_cancelled_one_does_not(reactor: EpollReactor) -> None:
    fired: list[int] = []
    reactor.call_later(0.0, lambda: fired.append(0)).cancel()
    reactor.call_later(0.03, lambda: fired.append(1))
    started = time.monotonic()
    until(reactor, lambda: fired)
    assert fired == [1]
    assert time.monotonic() - started < DEADLINE_S / 2
    fired.clear()
    timers = [reactor.call_later(5.0, lambda: fired.append(2)) for _ in range(3)]
    for timer in timers:
        timer.cancel()
    reactor.run_once(0.001)
    assert fired == []


# ---- descriptors


def test_events_are_level_triggered_and_can_be_changed(reactor: EpollReactor, wires: list[socket.socket]) -> None:
    seen: list[int] = []
    fd = wires[0].fileno()
    reactor.add(fd, select.EPOLLIN, seen.append)
    reactor.run_once()
    assert seen == []
    wires[1].send(b"x")
    reactor.run_once()
    reactor.run_once()
    assert seen == [select.EPOLLIN, select.EPOLLIN]
    reactor.modify(fd, select.EPOLLOUT)
    reactor.run_once()
    assert seen[2:] == [select.EPOLLOUT]
    reactor.remove(fd)
    reactor.remove(fd)
    reactor.run_once()
    assert len(seen) == 3


def test_a_descriptor_removed_in_the_same_round_is_not_called(
    reactor: EpollReactor, wires: list[socket.socket]
) -> None:
    called: list[int] = []

    def watch(mine: int, other: int) -> None:
        reactor.add(mine, select.EPOLLIN, lambda events: (called.append(mine), reactor.remove(other)))

    watch(wires[0].fileno(), wires[2].fileno())
    watch(wires[2].fileno(), wires[0].fileno())
    wires[1].send(b"x")
    wires[3].send(b"x")
    reactor.run_once()
    assert len(called) == 1


def test_an_event_of_a_closed_descriptor_does_not_reach_its_successor(
    reactor: EpollReactor, wires: list[socket.socket]
) -> None:
    """A connecting socket that got the number of one just closed would take the old event for its own success."""
    quiet = socket.socketpair()
    stale: list[int] = []
    replaced: list[int] = []

    def watch(mine: socket.socket, other: socket.socket) -> None:
        def on_event(events: int) -> None:
            if not replaced:
                fd = other.fileno()
                reactor.remove(fd)
                os.dup2(quiet[0].fileno(), fd, inheritable=False)
                reactor.add(fd, select.EPOLLIN, stale.append)
                replaced.append(fd)

        reactor.add(mine.fileno(), select.EPOLLIN, on_event)

    watch(wires[0], wires[2])
    watch(wires[2], wires[0])
    wires[1].send(b"x")
    wires[3].send(b"x")
    reactor.run_once()
    assert replaced
    assert stale == []
    quiet[1].send(b"y")
    reactor.run_once()
    assert stale == [select.EPOLLIN]
    for sock in quiet:
        sock.close()


# ---- the end


def test_stop_joins_the_thread_and_calls_after_it_are_harmless() -> None:
    reactor = EpollReactor("byteps-test-stop")
    reactor.start()
    reactor.stop()
    assert all(thread.name != "byteps-test-stop" for thread in threading.enumerate())
    reactor.call(pytest.fail)
    reactor.stop()


@pytest.mark.parametrize("from_timer", [False, True])
def test_stop_from_inside_the_loop(from_timer: bool) -> None:
    reactor = EpollReactor()
    ran: list[int] = []
    if from_timer:
        reactor.call_later(0.0, reactor.stop)
        reactor.call_later(0.0, lambda: ran.append(1))
    else:
        reactor.call(reactor.stop)
        reactor.call(ran.append, 1)
    reactor.run_once()
    assert ran == []


def test_stop_says_when_the_thread_does_not_end() -> None:
    reactor = EpollReactor("byteps-test-busy")
    go_on = threading.Event()
    reactor.start()
    reactor.call(go_on.wait, DEADLINE_S)
    with pytest.raises(TimeoutError, match="byteps-test-busy"):
        reactor.stop(timeout_s=0.01)
    go_on.set()
    reactor.stop()


def test_fds_are_those_watched_and_its_own(reactor: EpollReactor, wires: list[socket.socket]) -> None:
    own = set(reactor.fds())
    reactor.add(wires[0].fileno(), select.EPOLLIN, lambda events: None)
    assert set(reactor.fds()) - own == {wires[0].fileno()}
