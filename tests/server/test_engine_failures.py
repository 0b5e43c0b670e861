"""What ends an operation before its time: ranks that disagree, give up, leave or die."""

from __future__ import annotations

import pytest

from tests.server.ledger import Ledger, Script, head
from torch_bps.errors import ProtocolError
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPE_BY_NAME, MAX
from torch_bps.wire.header import BY_NODE, DECLARE, HOME, PULL, PUSH, WANT

# ---- disagreement


def only_fail(ledger: Ledger) -> tuple[list[str], tuple[int, ...]]:
    (fail,) = ledger.fails
    assert fail.error == "MismatchError"
    assert fail.hint
    return fail.text.split("\n"), fail.indices


def test_another_operation() -> None:
    ledger = Ledger()
    ledger.join(1, 4)
    ledger.send(0, head(PUSH, ops.ALL_REDUCE, 7, flags=WANT | HOME))
    ledger.send(2, head(PUSH, ops.ALL_REDUCE, 7, flags=WANT | HOME))
    ledger.send(1, head(PUSH, ops.BROADCAST, 7, root=1, flags=HOME))
    lines, indices = only_fail(ledger)
    assert lines == [
        "the ranks disagree about operation #7 of the group:",
        "  rank 0: all_reduce SUM float32[100]",
        "  rank 1: broadcast float32[100] root 1",
        "  rank 2: all_reduce SUM float32[100]",
        "  not heard from yet: rank 3",
    ]
    assert indices == (0, 1, 2, 3)
    ledger.check_empty()
    late = ledger.send(3, head(PUSH, ops.ALL_REDUCE, 7, flags=WANT | HOME))
    assert late.failed
    assert ledger.fails[1].indices == (3,)
    assert ledger.fails[1].text == ledger.fails[0].text
    ledger.check_empty()


@pytest.mark.parametrize(
    ("op", "fields", "view"),
    [
        (ops.ALL_REDUCE, {"total": 404}, "all_reduce SUM float32[101]"),
        (ops.ALL_REDUCE, {"redop": MAX}, "all_reduce MAX float32[100]"),
        (ops.ALL_REDUCE, {"dtype": DTYPE_BY_NAME["int64"].code}, "all_reduce SUM int64[50]"),
        (ops.REDUCE_TO_ROOT, {"root": 2}, "reduce SUM float32[100] root 2"),
        (ops.REDUCE_SCATTER, {"total": 40, "block": 2}, "reduce_scatter SUM float32[10]"),
    ],
)
def test_another_view(op: int, fields: dict[str, int], view: str) -> None:
    ledger = Ledger(fold_at_once=False)
    ledger.join(1, 3)
    block = fields.get("block", 0)
    ledger.send(0, head(PUSH, op, block=block))
    ledger.send(1, head(PUSH, op, block=block))
    (slot,) = ledger.folding()
    ledger.send(2, head(PUSH, op, **fields))
    lines, _ = only_fail(ledger)
    assert lines[3] == f"  rank 2: {view}"
    assert not ledger.books[slot].dropped, "the fold still uses it"
    ledger.fold_done(slot)
    ledger.check_empty()


def test_sizes_are_compared_across_partitions_of_a_block() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    ledger.send(0, head(PUSH, ops.ALL_REDUCE, total=800, nbytes=400, part=0))
    ledger.send(1, head(PUSH, ops.ALL_REDUCE, total=1200, nbytes=400, part=2))
    lines, _ = only_fail(ledger)
    assert lines[1:] == ["  rank 0: all_reduce SUM float32[200]", "  rank 1: all_reduce SUM float32[300]"]
    ledger.check_empty()


def test_a_relay_of_another_size() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    ledger.send(1, head(PULL, ops.BROADCAST, total=404))
    ledger.send(0, head(PUSH, ops.BROADCAST))
    lines, _ = only_fail(ledger)
    assert lines[1:] == ["  rank 0: broadcast float32[100] root 0", "  rank 1: broadcast float32[101] root 0"]
    ledger.check_empty()


def test_blocks_may_differ_in_size() -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    for index, header in Script(ops.ALL_GATHER, 1, 0, 3).frames():
        ledger.send(index, header)
    assert len({frame.header.total for frame in ledger.frames}) == 3
    assert not ledger.fails
    ledger.check_empty()


def test_barrier_has_no_dtype() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    ledger.send(0, head(PUSH, ops.BARRIER, dtype=1, redop=2))
    ledger.send(1, head(PUSH, ops.BARRIER, dtype=3))
    ledger.check_empty()


def test_a_declaration_is_compared() -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    ledger.send(0, head(DECLARE, ops.BROADCAST, total=0, flags=HOME))
    assert ledger.engine.missing(1, 0, 0) == [1, 2]
    ledger.send(1, head(DECLARE, ops.BROADCAST, total=0, root=1, flags=HOME))
    lines, _ = only_fail(ledger)
    assert lines[1:3] == ["  rank 0: broadcast float32 root 0", "  rank 1: broadcast float32 root 1"]
    ledger.check_empty()


def test_a_declaration_that_knows_its_size() -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    ledger.send(0, head(DECLARE, ops.BROADCAST, total=400, flags=HOME))
    ledger.send(1, head(PULL, ops.BROADCAST, total=404, flags=HOME))
    lines, _ = only_fail(ledger)
    assert lines[1] == "  rank 0: broadcast float32[100] root 0"


def test_nodes_and_ranks_disagree() -> None:
    ledger = Ledger()
    ledger.join(1, 4, nodes=[0, 0, 1, 1])
    ledger.send(1, head(PUSH, ops.ALL_REDUCE, flags=BY_NODE | HOME))
    ledger.send(2, head(DECLARE, ops.GATHER, total=0, flags=HOME))
    lines, indices = only_fail(ledger)
    assert lines[1:3] == ["  node 0: all_reduce SUM float32[100]", "  rank 2: gather float32 root 0"]
    assert indices == (0, 1, 2, 3)


def test_many_ranks_that_say_the_same_share_a_line() -> None:
    ledger = Ledger()
    ledger.join(1, 100)
    for index in range(1, 98):
        ledger.send(index, head(PUSH, ops.ALL_REDUCE))
    ledger.send(0, head(PUSH, ops.BARRIER))
    lines, _ = only_fail(ledger)
    assert lines[1:] == [
        "  rank 0: barrier",
        "  ranks 1-97: all_reduce SUM float32[100]",
        "  not heard from yet: ranks 98, 99",
    ]


# ---- giving up and leaving


def test_cancel_fails_the_others() -> None:
    ledger = Ledger(fold_at_once=False)
    ledger.join(1, 4)
    push = head(PUSH, ops.ALL_REDUCE, 5, flags=WANT | HOME)
    for index in range(3):
        ledger.send(index, push)
    (slot,) = ledger.folding()
    ledger.cancel(2, 1, 5, text="30 s passed")
    (fail,) = ledger.fails
    assert fail == ((0, 1), 1, 0, 5, "OperationTimeout", "rank 2 gave up all_reduce #5: 30 s passed", "")
    ledger.cancel(0, 1, 5)
    assert len(ledger.fails) == 1, "it has failed already"
    ledger.send(3, push)
    assert ledger.fails[1].indices == (3,)
    ledger.send(2, push._replace(part=1))
    assert len(ledger.fails) == 2, "who gave up knows it"
    assert not ledger.books[slot].dropped
    ledger.fold_done(slot)
    assert not ledger.held()


def test_cancel_before_anything_came() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    ledger.cancel(0, 1, 3)
    assert ledger.send(1, head(PUSH, ops.ALL_REDUCE, 3)).failed
    assert "rank 0 gave up operation #3" in ledger.fails[0].text
    ledger.check_empty()


def test_cancel_by_a_node_concerns_whole_nodes() -> None:
    ledger = Ledger()
    ledger.join(1, 6, nodes=[0, 0, 1, 1, 2, 2])
    ledger.send(0, head(PUSH, ops.ALL_REDUCE, flags=BY_NODE))
    ledger.send(2, head(PUSH, ops.ALL_REDUCE, flags=BY_NODE))
    ledger.cancel(0, 1, 0)
    assert ledger.fails[0].indices == (1, 2, 3)


def test_an_unknown_error_name_becomes_the_root_error() -> None:
    ledger = Ledger()
    ledger.join(1, 2)
    ledger.engine.cancel(0, 1, 0, 0, "os.system", "boo")
    ledger.send(1, head(PUSH, ops.ALL_REDUCE))
    assert ledger.fails[0].error == "BytePSError"


def test_a_lost_member_breaks_the_group() -> None:
    ledger = Ledger(fold_at_once=False)
    ledger.join(1, 3)
    ledger.join(2, 3)
    frames = [ledger.send(index, head(PUSH, ops.ALL_REDUCE, flags=WANT)) for index in (0, 1)]
    ledger.send(1, head(PULL, ops.BROADCAST, 1))
    ledger.send(0, head(PUSH, ops.BROADCAST, 1))
    kept = ledger.send(0, head(PUSH, ops.ALL_REDUCE, group=2))
    (slot,) = ledger.folding()
    ledger.leave(1, 2, "PeerLostError", "rank 2 is lost: it was killed")
    (fail,) = ledger.fails
    assert fail == ((0, 1), 1, 0, -1, "PeerLostError", "rank 2 is lost: it was killed", "")
    assert all(frame.failed for frame in frames)
    late = ledger.send(1, head(PUSH, ops.ALL_REDUCE, 9))
    assert late.failed
    assert ledger.fails[1][:4] == ((1,), 1, 0, -1)
    ledger.leave(1, 0, "PeerLostError")
    assert len(ledger.fails) == 2, "it is broken already"
    ledger.fold_done(slot)
    assert ledger.books[slot].dropped
    assert not kept.is_over(), "other groups go on"
    with pytest.raises(ProtocolError, match="no member"):
        ledger.engine.leave(3, 0, None, "")


def test_clean_leave_fails_what_needs_the_leaver() -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    pending = ledger.send(0, head(PUSH, ops.ALL_REDUCE, 7, flags=WANT | HOME))
    ledger.leave(1, 2)
    (fail,) = ledger.fails
    assert fail.indices == (0,)
    assert fail.error == "PeerLostError"
    assert fail.text == "rank 2 left the group (it ended or destroyed it) before all_reduce #7"
    assert pending.failed
    assert ledger.send(1, head(PUSH, ops.ALL_REDUCE, 8, flags=WANT | HOME)).failed
    assert ledger.send(1, head(DECLARE, ops.SCATTER, 9, total=0, flags=HOME)).is_over()
    assert ledger.fails[-1].sequence == 9
    ledger.check_empty()


def test_clean_leave_lets_stated_operations_go_on() -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    frames = [ledger.send(index, head(PUSH, ops.ALL_REDUCE, 7, flags=HOME)) for index in (0, 2)]
    ledger.leave(1, 2)
    frames.append(ledger.send(1, head(PUSH, ops.ALL_REDUCE, 7, flags=WANT | HOME)))
    assert all(frame.answer for frame in frames)
    assert not ledger.fails
    ledger.check_empty()


def test_clean_leave_excuses_the_leavers_pulls() -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    push = ledger.send(0, head(PUSH, ops.ALL_GATHER, flags=HOME, block=0))
    ledger.send(2, head(PUSH, ops.ALL_GATHER, flags=HOME, block=2))
    ledger.leave(1, 2)
    for block in (0, 2):
        ledger.send(1, head(PULL, ops.ALL_GATHER, flags=HOME, block=block))
    ledger.send(0, head(PULL, ops.ALL_GATHER, flags=HOME, block=2))
    own = ledger.send(1, head(PUSH, ops.ALL_GATHER, flags=HOME, block=1))
    ledger.send(0, head(PULL, ops.ALL_GATHER, flags=HOME, block=1))
    assert push.answer
    assert own.answer
    assert not ledger.fails
    ledger.check_empty()


def test_clean_leave_does_not_touch_relays_between_others() -> None:
    ledger = Ledger()
    ledger.join(1, 4)
    ledger.leave(1, 3)
    for index, frame in ((1, PUSH), (0, PULL)):
        ledger.send(index, head(frame, ops.GATHER, block=1))
    assert not ledger.fails
    ledger.check_empty()
    assert ledger.send(0, head(PULL, ops.GATHER, 1, block=3)).failed, "nobody will push that"
    ledger.check_empty()


@pytest.mark.parametrize("flags", [0, HOME])
def test_clean_leave_fails_a_relay_that_the_leaver_never_stated(flags: int) -> None:
    ledger = Ledger()
    ledger.join(1, 3)
    early = ledger.send(0, head(PUSH, ops.BROADCAST, flags=flags))
    ledger.leave(1, 2)
    assert early.failed
    assert ledger.send(1, head(PULL, ops.BROADCAST, 1, flags=flags)).failed
    assert [fail.error for fail in ledger.fails] == ["PeerLostError"] * 2
    ledger.check_empty()


def test_a_settled_operation_outlives_a_clean_leave() -> None:
    """More partitions of a relayed operation may come when all have stated it here and its slots are done."""
    ledger = Ledger()
    ledger.join(1, 3)
    frames = Script(ops.GATHER, 1, 4, 3, parts=2, seen={(1, 0), (1, 1)}).frames()
    first = [pair for pair in frames if pair[1].frame == DECLARE or pair[1].part == 0]
    for index, header in first:
        ledger.send(index, header)
    assert ledger.engine.describe()["operations"] == 0
    ledger.leave(1, 2)
    for index, header in frames:
        if (index, header) not in first:
            ledger.send(index, header)
    assert not ledger.fails
    ledger.check_empty()
    assert ledger.send(1, head(DECLARE, ops.SCATTER, 4, flags=HOME)).is_over()
    assert ledger.fails[0].error == "MismatchError"


def test_a_node_is_gone_when_one_of_its_members_is() -> None:
    ledger = Ledger()
    ledger.join(1, 3, nodes=[1, 0, 0])
    push = head(PUSH, ops.ALL_REDUCE, flags=BY_NODE | WANT)
    complete = [ledger.send(0, push), ledger.send(1, push)]
    ledger.send(0, push._replace(sequence=1))
    ledger.leave(1, 2)
    assert all(frame.answer for frame in complete)
    assert ledger.fails[0].text == "rank 2 left the group (it ended or destroyed it) before all_reduce #1"
    ledger.check_empty()


def test_a_group_is_forgotten_when_all_have_left() -> None:
    ledger = Ledger(fold_at_once=False)
    ledger.join(1, 2)
    for index in range(2):
        ledger.send(index, head(PUSH, ops.ALL_REDUCE))
    (slot,) = ledger.folding()
    ledger.leave(1, 0)
    ledger.leave(1, 1)
    assert ledger.engine.describe()["groups"] == 0
    ledger.fold_done(slot)
    ledger.check_empty()
    with pytest.raises(ProtocolError, match="has ended"):
        ledger.engine.join(1, size=2, index=0, rank=0)


def test_a_group_waits_for_members_that_have_not_joined() -> None:
    ledger = Ledger()
    ledger.join_one(1, 2, 0)
    ledger.leave(1, 0)
    ledger.join_one(1, 2, 1)
    assert ledger.send(1, head(PUSH, ops.ALL_REDUCE)).failed
    ledger.leave(1, 1)
    assert ledger.engine.describe()["groups"] == 0
