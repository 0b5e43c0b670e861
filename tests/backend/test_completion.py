"""The pool of worker threads: grows when all are busy, ends when asked, starts again."""

from __future__ import annotations

import threading

import pytest

from torch_bps.backend.completion import Workers

LIMIT_S = 10.0


@pytest.fixture
def pool():
    pool = Workers()
    yield pool
    pool.stop()


def test_a_blocked_task_does_not_hold_up_the_next(pool):
    """Each task waits for the one after it."""
    events = [threading.Event() for _ in range(20)]
    for number in range(19):
        pool.post(lambda number=number: events[number + 1].wait(LIMIT_S) and events[number].set())
    pool.post(events[19].set)
    assert events[0].wait(LIMIT_S)


def test_idle_threads_are_used_again(pool):
    names = set()
    for _ in range(50):
        done = threading.Event()

        def task(done=done):
            names.add(threading.current_thread().name)
            done.set()

        pool.post(task)
        assert done.wait(LIMIT_S)
    # a thread is free again only a moment after its task, so now and then a second one is started
    assert len(names) < 10
    assert all(name.startswith("byteps-work-") for name in names)


def test_idle_threads_end_by_themselves():
    pool = Workers(idle_s=0.0)
    threads = []
    done = threading.Event()
    pool.post(lambda: (threads.append(threading.current_thread()), done.set()))
    assert done.wait(LIMIT_S)
    threads[0].join(LIMIT_S)
    assert not threads[0].is_alive()
    assert not pool._threads


def test_stop_waits_for_tasks_and_the_pool_starts_again(pool):
    for _ in range(2):
        began, go, ended = threading.Event(), threading.Event(), []

        def task(began=began, go=go, ended=ended):
            began.set()
            go.wait(LIMIT_S)
            ended.append(1)

        pool.post(task)
        assert began.wait(LIMIT_S)
        threading.Thread(target=go.set).start()
        pool.stop()
        assert ended == [1]
        assert not pool._threads


def test_the_last_user_ends_the_threads(pool):
    pool.acquire()
    pool.acquire()
    done = threading.Event()
    pool.post(done.set)
    assert done.wait(LIMIT_S)
    pool.release()
    assert pool._threads
    pool.release()
    assert not pool._threads


def test_stop_from_a_task_does_not_wait_for_itself(pool):
    done = threading.Event()
    pool.post(lambda: (pool.stop(), done.set()))
    assert done.wait(LIMIT_S)


def test_a_task_that_never_ends_is_named(pool, caplog):
    go = threading.Event()
    pool.post(lambda: go.wait(LIMIT_S))
    pool.stop(timeout_s=0.01)
    assert "byteps-work-0 still runs a callback" in caplog.text
    go.set()


def test_exceptions_of_tasks_are_logged(pool, caplog):
    done = threading.Event()
    pool.post(lambda: 1 / 0)
    pool.post(done.set)
    assert done.wait(LIMIT_S)
    pool.stop()
    assert "ZeroDivisionError" in caplog.text


def test_no_more_threads_to_be_had(pool, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = []
    pool.post(lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]
    assert not pool._threads
