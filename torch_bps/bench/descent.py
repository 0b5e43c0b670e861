"""Which settings to try next: one setting at a time, the best value kept (coordinate descent). Pure.

A grid of all combinations takes ten times as long; partition size, credit and lanes pull together little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Choice = dict[str, int]
"""setting -> value"""


def descend(
    begin: Choice, values: Mapping[str, Sequence[int]], seconds_of: Callable[[Choice], float]
) -> tuple[Choice, float]:
    """Try values of one setting after another, going on from the best; return the best of all, and its seconds.

    Args:
        begin: where to begin; tried first.
        values: setting -> what to try, in the order in which settings are looked at.
        seconds_of: tries a choice; called once for each.
    """
    best, best_s = begin, seconds_of(begin)
    for name, candidates in values.items():
        middle = best
        for value in candidates:
            if value == middle[name]:
                continue
            choice = {**middle, name: value}
            seconds = seconds_of(choice)
            if seconds < best_s:
                best, best_s = choice, seconds
    return best, best_s
