"""transport.turns: order, and that nothing waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_bps.transport.turns import PATIENCE_NBYTES, Turns

MIB = 1 << 20


def taken(turns: Turns[str]) -> str:
    """Take all, one letter each."""
    letters = ""
    while turns:
        letters += turns.take()
    return letters


def test_the_most_urgent_goes_first_and_the_earlier_one_within_it() -> None:
    turns: Turns[str] = Turns()
    for letter, priority in zip("abcde", (5, -1, 5, 0, -1), strict=True):
        turns.put(priority, 7, letter)
    assert turns.first() == (-1, "b")
    assert taken(turns) == "bedac"


def test_the_oldest_gets_its_turn_when_enough_went_past_it_and_then_the_next_oldest() -> None:
    turns: Turns[str] = Turns()
    turns.put(9, MIB, "x")
    turns.put(8, MIB, "y")
    for _ in range(40):
        turns.put(0, MIB, "u")
    assert taken(turns) == "u" * 16 + "x" + "u" * 16 + "y" + "u" * 8


def test_the_smallest_things_do_not_overtake_for_ever() -> None:
    turns: Turns[str] = Turns()
    turns.put(9, MIB, "x")
    for _ in range(5000):
        turns.put(0, 0, "u")
    assert taken(turns).index("x") == PATIENCE_NBYTES // 4096


def test_what_was_removed_is_not_waited_for() -> None:
    turns: Turns[str] = Turns()
    for letter, priority in zip("abcabc", (5, -1, 5, 0, -1, -1), strict=True):
        turns.put(priority, 1, letter)
    turns.remove(lambda letter: letter == "b")
    assert taken(turns) == "caac"
    assert not turns


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([0, 1, MIB, 40 * MIB])) | st.none(), max_size=200))
def test_everything_is_overtaken_by_a_bounded_number_of_bytes(steps: list[tuple[int, int] | None]) -> None:
    """Whatever is put and taken (None) in between: the n-th oldest waits for n times the patience at most."""
    turns: Turns[tuple[int, int]] = Turns()
    waiting: dict[int, int] = {}
    """number -> bytes that went past it"""
    ahead: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step is not None:
            priority, nbytes = step
            ahead[number] = len(waiting) + 1
            waiting[number] = 0
            turns.put(priority, nbytes, (number, nbytes))
        elif turns:
            number_taken, nbytes = turns.take()
            del waiting[number_taken]
            for other in waiting:
                if other < number_taken:
                    waiting[other] += nbytes
    for number, nbytes in waiting.items():
        assert nbytes <= ahead[number] * (PATIENCE_NBYTES + 40 * MIB)
    while turns:
        turns.take()
