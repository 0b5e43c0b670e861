"""Point-to-point: which message goes to which receive."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.server.ledger import Frame, Ledger, head
from torch_bps.errors import ProtocolError
from torch_bps.server.engine import Done, Send
from torch_bps.wire import ops
from torch_bps.wire.dtypes import DTYPE_BY_NAME
from torch_bps.wire.header import PULL, PUSH, Header

TAG = 0xFFFFFFFF
ANY = ops.ANY_SOURCE


def message(src: int, dst: int, number: int, *, tag: int = TAG, **fields: int) -> Header:
    return head(PUSH, ops.SEND, number, **{"stream": ops.stream_of(src, dst, tag), **fields})


def receive(src: int, dst: int, number: int, *, tag: int = TAG, **fields: int) -> Header:
    return head(PULL, ops.SEND, number, **{"stream": ops.stream_of(src, dst, tag), **fields})


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.join(1, 4)
    return ledger


def taken(frame: Frame) -> tuple[int, int]:
    """Return (source, message number) of what a receive got."""
    assert isinstance(frame.answer, Send)
    header = frame.answer.header
    return ops.split_stream(header.stream)[0], header.sequence


def test_either_may_come_first(ledger: Ledger) -> None:
    push = ledger.send(0, message(0, 1, 0))
    pull = ledger.send(1, receive(0, 1, 0))
    later_pull = ledger.send(1, receive(0, 1, 1))
    assert not later_pull.is_over()
    later_push = ledger.send(0, message(0, 1, 1, total=0))
    assert isinstance(push.answer, Done)
    assert taken(pull) == (0, 0)
    assert not later_push.is_over() or later_pull.failed, "another size"
    ledger.check_empty()


def test_the_answer_names_message_and_receive(ledger: Ledger) -> None:
    for number in range(3):
        ledger.send(2, message(2, 1, number))
    ledger.send(0, message(0, 1, 0))
    ledger.send(1, receive(0, 1, 0))
    pull = ledger.send(1, receive(ANY, 1, 1))
    assert isinstance(pull.answer, Send)
    header = pull.answer.header
    assert (header.stream, header.sequence, header.block, header.part) == (ops.stream_of(2, 1, TAG), 0, 1, 0)
    assert (header.total, header.nbytes) == (400, 400)


def test_messages_and_receives_keep_their_order_whatever_the_lanes_do(ledger: Ledger) -> None:
    second_push = ledger.send(0, message(0, 1, 1))
    second_pull = ledger.send(1, receive(0, 1, 1))
    assert not second_pull.is_over()
    assert not second_push.is_over()
    first_pull = ledger.send(1, receive(0, 1, 0))
    assert not first_pull.is_over()
    ledger.send(0, message(0, 1, 0))
    assert (taken(first_pull), taken(second_pull)) == ((0, 0), (0, 1))
    ledger.check_empty()


def test_a_later_receive_may_match_before_an_earlier_one(ledger: Ledger) -> None:
    from_zero = ledger.send(1, receive(0, 1, 0))
    from_two = ledger.send(1, receive(2, 1, 1))
    ledger.send(2, message(2, 1, 0))
    assert taken(from_two) == (2, 0)
    assert not from_zero.is_over()


def test_any_source_takes_the_first_and_posted_order_counts(ledger: Ledger) -> None:
    ledger.send(2, message(2, 1, 0))
    ledger.send(0, message(0, 1, 0))
    assert taken(ledger.send(1, receive(ANY, 1, 0))) == (2, 0)
    assert taken(ledger.send(1, receive(ANY, 1, 1))) == (0, 0)
    anyone = ledger.send(1, receive(ANY, 1, 2))
    zero = ledger.send(1, receive(0, 1, 3))
    ledger.send(0, message(0, 1, 1))
    assert taken(anyone) == (0, 1)
    assert not zero.is_over()


def test_tags_and_directions_are_apart(ledger: Ledger) -> None:
    ledger.send(0, message(0, 1, 0, tag=1))
    assert not ledger.send(1, receive(0, 1, 0, tag=2)).is_over()
    assert not ledger.send(0, receive(1, 0, 0, tag=1)).is_over()
    assert ledger.send(1, receive(0, 1, 0, tag=1)).answer
    assert ledger.engine.describe()["receives"] == 2
    assert not ledger.engine.is_idle()


def reference(events: list[tuple[str, int, int]]) -> dict[int, tuple[int, int]]:
    """Return receive number -> (source, message number) for events in order: ("push", src, n) or ("pull", src, n)."""
    messages: list[tuple[int, int]] = []
    posts: list[tuple[int, int]] = []
    early: dict[tuple[str, int], dict[int, tuple[str, int, int]]] = {}
    following: dict[tuple[str, int], int] = {}
    result: dict[int, tuple[int, int]] = {}
    for event in events:
        line = (event[0], event[1] if event[0] == "push" else -1)
        early.setdefault(line, {})[event[2]] = event
        while (turn := early[line].pop(following.setdefault(line, 0), None)) is not None:
            following[line] += 1
            (messages if turn[0] == "push" else posts).append(turn[1:])
            for post, sent in itertools.product(list(posts), list(messages)):
                if post[0] in (sent[0], ANY):
                    posts.remove(post)
                    messages.remove(sent)
                    result[post[1]] = sent
                    break
    return result


def test_random_orders_match_the_reference() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        ledger = Ledger()
        ledger.join(1, 4)
        events = [("push", src, number) for src in (0, 2, 3) for number in range(rng.randrange(5))]
        events += [("pull", rng.choice([0, 2, 3, ANY]), number) for number in range(rng.randrange(9))]
        rng.shuffle(events)
        pulls = {}
        for kind, src, number in events:
            if kind == "push":
                ledger.send(src, message(src, 1, number))
            else:
                pulls[number] = ledger.send(1, receive(src, 1, number))
        assert {number: taken(frame) for number, frame in pulls.items() if frame.answer} == reference(events)
        assert ledger.engine.describe()["receives"] == len(pulls) - sum(f.answer is not None for f in pulls.values())
        ledger.leave(1, 1)
        ledger.check_empty()


# ---- disagreement, giving up, leaving


@pytest.mark.parametrize("fields", [{"total": 404}, {"dtype": DTYPE_BY_NAME["int32"].code}])
def test_sizes_and_dtypes_are_compared(ledger: Ledger, fields: dict[str, int]) -> None:
    ledger.send(2, receive(ANY, 2, 0, **fields))
    push = ledger.send(0, message(0, 2, 0))
    to_sender, to_receiver = ledger.fails
    assert to_sender[:4] == ((0,), 1, ops.stream_of(0, 2, TAG), 0)
    assert to_receiver[:4] == ((2,), 1, ops.stream_of(ANY, 2, TAG), 0)
    lines = to_sender.text.split("\n")
    assert lines[0] == "the ranks disagree about a message from rank 0 to rank 2:"
    assert lines[1] == "  rank 0: send float32[100]"
    assert lines[2] in ("  rank 2: recv float32[101]", "  rank 2: recv int32[100]")
    assert push.failed
    ledger.check_empty()
    assert ledger.send(2, receive(0, 2, 1)).answer is None
    ledger.send(0, message(0, 2, 1))
    ledger.check_empty()


def test_the_receiver_gives_up(ledger: Ledger) -> None:
    stream = ops.stream_of(0, 1, TAG)
    ledger.send(1, receive(0, 1, 0))
    ledger.send(1, receive(0, 1, 2))
    ledger.cancel(1, 1, 0, stream=stream)
    ledger.cancel(1, 1, 2, stream=stream)  # early
    ledger.cancel(1, 1, 1, stream=stream)  # before it comes
    ledger.cancel(1, 1, 1, stream=stream)
    ledger.send(1, receive(0, 1, 1))
    ledger.check_empty()
    pull = ledger.send(1, receive(0, 1, 3))
    ledger.send(0, message(0, 1, 0))
    assert taken(pull) == (0, 0)
    assert not ledger.fails
    ledger.check_empty()
    with pytest.raises(ProtocolError):
        ledger.send(1, receive(0, 1, 1))


def test_giving_up_lets_a_later_receive_have_its_turn(ledger: Ledger) -> None:
    ledger.send(0, message(0, 1, 0))
    pull = ledger.send(1, receive(0, 1, 1))
    ledger.cancel(1, 1, 0, stream=ops.stream_of(0, 1, TAG))
    assert taken(pull) == (0, 0)


@pytest.mark.parametrize("when", ["waiting", "early", "before"])
def test_the_sender_gives_up(ledger: Ledger, when: str) -> None:
    """The receive that the message was meant for fails: the next message is the wrong data for it."""
    stream = ops.stream_of(0, 1, TAG)
    number = 1 if when == "early" else 0
    if when != "before":
        ledger.send(0, message(0, 1, number))
    ledger.cancel(0, 1, number, stream=stream, text="timeout")
    ledger.cancel(0, 1, number, stream=stream, text="again")
    if when == "before":
        ledger.send(0, message(0, 1, number))
    if when == "early":
        ledger.send(0, message(0, 1, 0))
        assert ledger.send(1, receive(0, 1, 0)).answer
    pull = ledger.send(1, receive(ANY, 1, number))
    (fail,) = ledger.fails
    assert fail[:4] == ((1,), 1, ops.stream_of(ANY, 1, TAG), number)
    assert fail.text == f"rank 0 gave up send #{number}: timeout"
    assert pull.failed
    ledger.send(0, message(0, 1, number + 1))
    assert taken(ledger.send(1, receive(0, 1, number + 1))) == (0, number + 1)
    ledger.check_empty()


def test_others_cannot_cancel(ledger: Ledger) -> None:
    with pytest.raises(ProtocolError):
        ledger.cancel(2, 1, 0, stream=ops.stream_of(0, 1, TAG))


def test_the_source_leaves(ledger: Ledger) -> None:
    kept = ledger.send(0, message(0, 1, 0))
    early = ledger.send(0, message(0, 1, 2))
    other = ledger.send(1, receive(2, 1, 0))
    anyone = ledger.send(3, receive(ANY, 3, 0))
    waiting = ledger.send(2, receive(0, 2, 0))
    ledger.leave(1, 0)
    assert waiting.failed
    (fail,) = ledger.fails
    assert fail.error == "PeerLostError"
    assert fail.text == (
        "rank 0 left the group (it ended or destroyed it) before it sent what rank 2 waits for (recv #0)"
    )
    assert early.payload is not None
    assert early.payload.state == "released"
    assert taken(ledger.send(1, receive(0, 1, 1))) == (0, 0), "what it has sent is still there"
    assert kept.answer
    assert ledger.send(1, receive(0, 1, 2)).failed
    assert not other.is_over()
    ledger.leave(1, 2)
    assert other.failed
    assert not anyone.is_over()
    ledger.leave(1, 1)
    assert anyone.failed
    assert "every other rank left" in ledger.fails[-1].text
    ledger.check_empty()


def test_the_destination_leaves(ledger: Ledger) -> None:
    waiting = ledger.send(0, message(0, 1, 0))
    ledger.send(2, message(2, 1, 1))
    ledger.send(1, receive(3, 1, 0))
    ledger.leave(1, 1)
    assert waiting.failed
    assert ledger.fails[0].text == "rank 1 left the group (it ended or destroyed it) before it received send #0"
    assert ledger.send(0, message(0, 1, 1)).failed
    ledger.check_empty()


def test_a_lost_member_clears_all_boxes(ledger: Ledger) -> None:
    ledger.send(0, message(0, 1, 0))
    ledger.send(0, message(0, 1, 3))
    ledger.send(2, receive(3, 2, 0))
    ledger.leave(1, 3, "PeerLostError")
    assert [fail.sequence for fail in ledger.fails] == [-1]
    for index, header in ((0, message(0, 1, 1)), (1, receive(0, 1, 0))):
        assert ledger.send(index, header).failed
    ledger.check_empty()


# ---- further parts


def test_parts_are_relayed_by_key(ledger: Ledger) -> None:
    for first in (PUSH, PULL):
        for part in (2, 1):
            both = {
                PUSH: (0, message(0, 1, 5, part=part, total=1200, nbytes=400)),
                PULL: (1, receive(0, 1, 5, part=part, total=1200)),
            }
            frames = [ledger.send(*both[kind]) for kind in ((PUSH, PULL) if first == PUSH else (PULL, PUSH))]
            assert all(frame.answer for frame in frames)
    ledger.check_empty()


def test_the_sender_gives_up_between_parts(ledger: Ledger) -> None:
    stream = ops.stream_of(0, 1, TAG)
    pull = ledger.send(1, receive(0, 1, 5, part=1, total=800))
    assert ledger.engine.missing(1, stream, 5) == [0]
    ledger.cancel(0, 1, 5, stream=stream)
    assert pull.failed
    assert ledger.fails[0][:4] == ((1,), 1, stream, 5)
    assert ledger.send(1, receive(0, 1, 5, part=2, total=800)).failed
    ledger.check_empty()


def test_a_receives_number_is_not_a_messages(ledger: Ledger) -> None:
    pull = ledger.send(1, receive(0, 1, 5, part=1, total=800))
    ledger.cancel(1, 1, 5, stream=ops.stream_of(0, 1, TAG))  # gives up receive 5, not message 5
    ledger.send(0, message(0, 1, 5, part=1, total=800, nbytes=400))
    assert pull.answer
    ledger.check_empty()


def test_a_peer_leaves_between_parts(ledger: Ledger) -> None:
    pull = ledger.send(1, receive(0, 1, 5, part=1, total=800))
    push = ledger.send(2, message(2, 0, 1, part=1, total=800, nbytes=400))
    ledger.leave(1, 0)
    assert pull.failed
    assert push.failed
    assert ledger.send(1, receive(0, 1, 5, part=2, total=800)).failed
    ledger.check_empty()


def test_missing(ledger: Ledger) -> None:
    stream = ops.stream_of(0, 1, TAG)
    assert ledger.engine.missing(1, stream, 0) == []
    ledger.send(0, message(0, 1, 0))
    assert ledger.engine.missing(1, stream, 0) == [1]
    ledger.send(1, receive(2, 1, 0))
    assert ledger.engine.missing(1, ops.stream_of(2, 1, TAG), 0) == [2]
    ledger.send(1, receive(ANY, 1, 2))
    assert ledger.engine.missing(1, ops.stream_of(ANY, 1, TAG), 2) == [0, 2, 3]
    assert ledger.engine.describe()["held_nbytes"] == 400


@pytest.mark.parametrize(
    ("index", "header"),
    [
        (0, message(0, 0, 0)),
        (0, message(1, 2, 0)),
        (0, message(0, 4, 0)),
        (0, message(0, ANY, 0)),
        (0, message(ANY, 1, 0)),
        (0, message(0, 1, 0, block=1)),
        (0, message(0, 1, 0, stream=1)),
        (0, message(0, 1, 0)._replace(stream=2**64 - 1)),
        (0, message(0, 1, 0)._replace(op=ops.BROADCAST)),
        (0, message(0, 1, 0, nbytes=404)),
        (0, message(0, 1, 0, part=1, stream=ops.stream_of(ANY, 1, 0))),
        (1, message(0, 1, 0, part=1)),
        (0, receive(0, 1, 0, part=1)),
        (1, receive(ANY, 1, 0, part=1)),
        (1, receive(9, 1, 0)),
        (0, receive(0, 1, 0)),
        (1, receive(1, 1, 0)),
    ],
)
def test_bad_frames(ledger: Ledger, index: int, header: Header) -> None:
    with pytest.raises(ProtocolError):
        ledger.send(index, header)
    ledger.check_empty()
    assert not ledger.fails


def test_numbers_do_not_come_twice(ledger: Ledger) -> None:
    for index, header in ((0, message(0, 1, 0)), (0, message(0, 1, 2)), (1, receive(2, 1, 0)), (1, receive(2, 1, 2))):
        ledger.send(index, header)
        with pytest.raises(ProtocolError, match="twice"):
            ledger.send(index, header)
