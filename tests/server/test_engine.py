"""The engine's rules for collectives, one by one; tests/property/test_engine_machine.py mixes them all."""

from __future__ import annotations

import random

import pytest

from tests.server.ledger import Ledger, Script, by_nodes, head
from torch_bps.errors import ProtocolError
from torch_bps.server.engine import Done, Drop, Engine, Fold, Send, Uplink
from torch_bps.wire import ops
from torch_bps.wire.dtypes import AVG, BAND, DTYPE_BY_NAME, DTYPES
from torch_bps.wire.header import ACC32, BY_NODE, DECLARE, HOME, PULL, PUSH, WANT, Header

COLLECTIVES = [row.code for row in ops.ROWS if row.code not in (0, ops.SEND)]
BFLOAT16 = DTYPE_BY_NAME["bfloat16"].code


# ---- every collective, in any order


@pytest.mark.parametrize("home", [True, False])
@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_frames_in_any_order(op: int, size: int, home: bool) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        ledger = Ledger()
        ledger.join(1, size)
        frames = Script(op, 1, 7, size, root=rng.randrange(size), parts=2, home=home).frames()
        rng.shuffle(frames)
        for index, header in frames:
            ledger.send(index, header)
        assert not ledger.fails
        ledger.check_empty()


@pytest.mark.parametrize("op", [ops.GATHER, ops.SCATTER, ops.ALL_TO_ALL, ops.BROADCAST])
def test_a_home_that_sees_some_of_the_blocks(op: int) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        ledger = Ledger()
        ledger.join(1, 3)
        seen = {(block, part) for block in range(9) for part in range(3) if rng.random() < 0.4}
        frames = Script(op, 1, 0, 3, parts=3, seen=seen).frames()
        rng.shuffle(frames)
        for index, header in frames:
            ledger.send(index, header)
        ledger.check_empty()
        ledger.leave(1, 2)
        assert not ledger.fails


@pytest.mark.parametrize("nbytes", [0, 400])
def test_a_group_of_one(nbytes: int) -> None:
    ledger = Ledger()
    ledger.join(1, 1)
    assert isinstance(ledger.send(0, head(PUSH, ops.ALL_REDUCE, total=nbytes, flags=WANT)).answer, Send)
    assert isinstance(ledger.send(0, head(PUSH, ops.BROADCAST, 1, total=nbytes)).answer, Done)
    ledger.check_empty()


def test_folds_begin_with_two_and_do_not_overlap() -> None:
    ledger = Ledger(fold_at_once=False)
    ledger.join(1, 4)
    push = head(PUSH, ops.ALL_REDUCE, flags=WANT)
    third = ledger.send(2, push)
    assert not ledger.folding(), "not in order"
    ledger.send(0, push)
    assert not ledger.folding(), "one buffer alone is no add"
    ledger.send(1, push)
    (slot,) = ledger.folding()
    assert ledger.books[slot].folded == [0, 1, 2]
    ledger.send(3, push)
    assert third.answer is None
    ledger.fold_done(slot)
    assert ledger.books[slot].folded == [0, 1, 2, 3]
    assert third.answer is None
    ledger.fold_done(slot)
    assert third.answer is not None
    ledger.check_empty()


def test_what_a_slot_tells_the_service() -> None:
    engine = Engine()
    for index in range(2):
        engine.join(1, size=2, index=index, rank=index)
    header = head(PUSH, ops.ALL_REDUCE, dtype=BFLOAT16, redop=AVG, total=100, nbytes=200, flags=ACC32)
    assert engine.push(0, header, object(), None) == []  # type: ignore[arg-type]
    (fold,) = engine.push(1, header, object(), None)  # type: ignore[arg-type]
    assert isinstance(fold, Fold)
    slot = fold.slot
    assert (slot.key, slot.header, slot.dtype, slot.redop) == (header[5:10], header, BFLOAT16, AVG)
    assert (slot.nbytes, slot.acc32, slot.keep32, slot.divisor) == (100, True, False, 2)
    assert (slot.accumulator, slot.result) == (None, None)


@pytest.mark.parametrize("op", [ops.ALL_REDUCE, ops.BARRIER, ops.REDUCE_TO_ROOT])
def test_uplink(op: int) -> None:
    ledger = Ledger()
    ledger.join(1, 2, uplink=True)
    fields = {"root": 9} if op == ops.REDUCE_TO_ROOT else {"flags": WANT}
    frames = [ledger.send(index, head(PUSH, op, redop=AVG if op != ops.BARRIER else 0, **fields)) for index in (1, 0)]
    assert frames[0].answer is None
    (slot,) = ledger.uplinking()
    assert slot.wants() == (op != ops.REDUCE_TO_ROOT)
    assert slot.divisor == 1, "the servers divide"
    ledger.uplink_done(slot)
    assert all(frame.answer for frame in frames)
    ledger.check_empty()


def test_uplink_tells_whether_anybody_wants_the_result() -> None:
    engine = Engine()
    engine.join(1, size=1, index=0, rank=4, uplink=True)
    half = head(PUSH, ops.REDUCE_TO_ROOT, dtype=BFLOAT16)
    (fold,) = engine.push(0, half, object(), None)  # type: ignore[arg-type]
    assert isinstance(fold, Fold)
    assert fold.slot.keep32
    assert engine.folded(fold.slot) == [Uplink(fold.slot, False)]


def test_uplink_fails() -> None:
    ledger = Ledger()
    ledger.join(1, 2, uplink=True)
    for index in range(2):
        ledger.send(index, head(PUSH, ops.ALL_REDUCE, flags=WANT))
    (slot,) = ledger.uplinking()
    ledger.uplink_done(slot, "PeerLostError")
    (fail,) = ledger.fails
    assert fail == ((0, 1), 1, 0, 0, "PeerLostError", "no server", "")
    ledger.check_empty()


def test_a_failed_uplink_of_a_broken_group_is_dropped() -> None:
    ledger = Ledger()
    ledger.join(1, 2, uplink=True)
    for index in range(2):
        ledger.send(index, head(PUSH, ops.ALL_REDUCE, flags=WANT))
    (slot,) = ledger.uplinking()
    ledger.leave(1, 0, "PeerLostError")
    assert not ledger.engine.is_idle()
    ledger.uplink_done(slot, "PeerLostError")
    assert len(ledger.fails) == 1
    ledger.check_empty()


@pytest.mark.parametrize("op", [ops.ALL_REDUCE, ops.REDUCE_SCATTER, ops.BARRIER])
def test_nodes_contribute(op: int) -> None:
    nodes = [0, 0, 1, 2, 2]
    ledger = Ledger()
    ledger.join(1, 5, nodes=nodes)
    frames = by_nodes(Script(op, 1, 3, 5, parts=2, nodes=nodes).frames(), nodes)
    for index, header in frames[:-1]:
        ledger.send(index, header)
    assert ledger.engine.missing(1, 0, 3) in ([], [nodes[frames[-1][0]]])
    ledger.send(*frames[-1])
    ledger.check_empty()


# ---- questions


def test_missing_and_holds() -> None:
    engine = Engine()
    for index, rank in ((0, 4), (1, 5), (2, 9)):
        engine.join(1, size=3, index=index, rank=rank)
    assert engine.missing(1, 0, 0) == []
    assert engine.missing(8, 0, 0) == []
    assert not engine.holds(1, 1)
    engine.push(1, head(PUSH, ops.ALL_REDUCE), object(), None)  # type: ignore[arg-type]
    assert engine.missing(1, 0, 0) == [4, 9]
    assert engine.holds(1, 1)
    assert not engine.holds(1, 0)  # it has no part in it yet
    assert not engine.holds(2, 1)
    assert not engine.is_idle()
    assert engine.describe() == {
        "groups": 1, "members": 3, "operations": 1, "slots": 1, "messages": 0, "receives": 0, "held_nbytes": 400,
    }  # fmt: skip


# ---- what no honest member sends


@pytest.mark.parametrize(
    "change",
    [
        {"size": 4}, {"num_nodes": 2}, {"uplink": True}, {"index": 0}, {"index": 3}, {"index": -1}, {"node": 1},
        {"rank": -1}, {"group": 5, "size": 0}, {"group": 5, "size": 1 << 20}, {"group": 5, "num_nodes": 0},
    ],
)  # fmt: skip
def test_bad_joins(change: dict[str, int]) -> None:
    engine = Engine()
    good = {"group": 1, "size": 3, "index": 0, "rank": 0}
    engine.join(**good)
    with pytest.raises(ProtocolError):
        engine.join(**(good | {"index": 1, "rank": 1} | change))
    assert engine.describe()["groups"] == 1
    assert engine.describe()["members"] == 1


@pytest.mark.parametrize(
    "header",
    [
        head(PUSH, ops.ALL_REDUCE)._replace(op=0),
        head(PUSH, ops.ALL_REDUCE)._replace(op=11),
        head(PUSH, ops.ALL_REDUCE)._replace(op=255),
        head(PUSH, ops.ALL_REDUCE, dtype=len(DTYPES)),
        head(PUSH, ops.ALL_REDUCE, dtype=0),
        head(PUSH, ops.ALL_REDUCE, redop=99),
        head(PUSH, ops.ALL_REDUCE, redop=0),
        head(PUSH, ops.ALL_REDUCE, redop=BAND),
        head(PUSH, ops.ALL_REDUCE, block=1),
        head(PUSH, ops.ALL_REDUCE, nbytes=404),
        head(PUSH, ops.ALL_REDUCE, nbytes=398),
        head(PUSH, ops.ALL_REDUCE, total=402, nbytes=400),
        head(PUSH, ops.ALL_REDUCE, stream=5),
        head(PUSH, ops.ALL_REDUCE, flags=ACC32),
        head(PUSH, ops.ALL_REDUCE, dtype=BFLOAT16, flags=ACC32, total=200, nbytes=402),
        head(PUSH, ops.REDUCE_SCATTER, block=ops.MAX_RANKS),
        head(PUSH, ops.BARRIER, total=4),
        head(PUSH, ops.BROADCAST, flags=BY_NODE),
        head(PUSH, ops.BROADCAST, root=1),
        head(PUSH, ops.BROADCAST, root=77),
        head(PUSH, ops.BROADCAST, block=1),
        head(PUSH, ops.GATHER, block=0),
        head(PUSH, ops.GATHER, block=9),
        head(PUSH, ops.SCATTER, root=0, block=0),
        head(PUSH, ops.ALL_TO_ALL, block=0),
        head(PUSH, ops.ALL_TO_ALL, block=5),
        head(PUSH, ops.ALL_TO_ALL, block=9),
        head(PULL, ops.ALL_REDUCE),
        head(PULL, ops.BROADCAST, root=0),
        head(PULL, ops.GATHER, root=1, block=2),
        head(PULL, ops.SCATTER, root=1, block=2),
        head(PULL, ops.ALL_TO_ALL, block=1),
        head(DECLARE, ops.ALL_REDUCE)._replace(op=99),
        head(DECLARE, ops.SEND, stream=ops.stream_of(0, 1, 0)),
        head(PUSH, ops.ALL_REDUCE, group=9),
    ],
)
def test_bad_frames_leave_nothing(header: Header) -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    ledger.present[9] = {0: 0}
    with pytest.raises(ProtocolError):
        ledger.send(0, header)
    ledger.check_empty()
    assert not ledger.fails


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (ops.ALL_REDUCE, {}),
        (ops.ALL_REDUCE, {"part": 1, "nbytes": 200}),
        (ops.BROADCAST, {}),
        (ops.BARRIER, {}),
    ],
)
def test_twice_or_in_other_partitions(op: int, change: dict[str, int]) -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    first = head(PUSH, op, part=change.get("part", 0))
    ledger.send(0, first)
    with pytest.raises(ProtocolError):
        ledger.send(1 if change else 0, first._replace(**change))
    if op == ops.BROADCAST:
        ledger.send(1, first._replace(frame=PULL, nbytes=0))
        with pytest.raises(ProtocolError):
            ledger.send(1, first._replace(frame=PULL, nbytes=0))
        ledger.send(2, first._replace(frame=PULL, nbytes=0))
        ledger.check_empty()
    else:
        ledger.send(1, first)
        ledger.send(2, first)
        ledger.check_empty()


def test_partial_sums_and_plain_halves_do_not_mix() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    ledger.send(0, head(PUSH, ops.ALL_REDUCE, dtype=BFLOAT16, nbytes=400))
    with pytest.raises(ProtocolError):
        ledger.send(1, head(PUSH, ops.ALL_REDUCE, dtype=BFLOAT16, nbytes=400, flags=ACC32))


@pytest.mark.parametrize(("nbytes", "payload"), [(0, object()), (400, None)])
def test_payload_and_header_disagree(nbytes: int, payload: object) -> None:
    engine = Engine()
    for index in range(2):
        engine.join(1, size=2, index=index, rank=index)
    header = head(PUSH, ops.ALL_REDUCE, nbytes=nbytes)
    good = object() if nbytes else None
    engine.push(0, header, good, None)  # type: ignore[arg-type]
    for index in (1, 5):
        with pytest.raises(ProtocolError):
            engine.push(index, header, payload, None)  # type: ignore[arg-type]
    assert any(isinstance(i, Fold | Drop) for i in engine.push(1, header, good, None))  # type: ignore[arg-type]


def test_a_nodes_own_service_relays_nothing() -> None:
    ledger = Ledger()
    ledger.join(1, 2, uplink=True)
    with pytest.raises(ProtocolError):
        ledger.send(0, head(PUSH, ops.BROADCAST))
    ledger.send(0, head(DECLARE, ops.BROADCAST, total=0, root=8, flags=HOME))
    ledger.send(1, head(PUSH, ops.ALL_REDUCE, flags=HOME))
    assert ledger.fails[0].error == "MismatchError"
    ledger.check_empty()


def test_memory_of_failed_operations_is_bounded() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    for sequence in range(3000):
        ledger.engine.cancel(0, 1, 0, sequence, "OperationTimeout", "")
    group = ledger.engine._groups[1]
    assert len(group.failed) == 1024
    assert ledger.send(1, head(PUSH, ops.ALL_REDUCE, 2999)).failed
    assert not ledger.send(1, head(PUSH, ops.ALL_REDUCE, 3)).is_over(), "the oldest are forgotten"
