"""How urgent a call is: the number of the innermost `with priority(number)` of its thread; else the group's, plus the
usual one of its kind. A call whose caller waits goes before all others, whatever their numbers (core.operation).

Called by process_group.
"""

from __future__ import annotations

import threading
from typing import Final

from torch_bps.core.operation import MAX_PRIORITY
from torch_bps.errors import ConfigError

ALL_GATHER: Final = -1
"""An all_gather's usual number: fully sharded training needs it now, its reduce_scatters at the step's end."""


class _Numbers(threading.local):
    def __init__(self) -> None:
        self.stack: list[int] = []


_of_thread = _Numbers()


class priority:  # noqa: N801 # a context manager, read as a word of its `with`
    """Give the collectives and messages that this thread calls inside a priority: smaller is sooner.

        with torch_bps.priority(-5):
            work = dist.all_reduce(tensor, async_op=True)

    It only concerns the order of what waits to be sent: ranks may give one call different priorities. A call whose
    caller waits for it (async_op=False) goes before all others anyhow. May be nested, the innermost counts, and used
    again.

    Args:
        number: from -1000000 to 1000000; calls outside have the group's (`Options(priority=...)`, 0 if there is none),
            all_gathers one less.

    Raises:
        ConfigError: it is no such number (a ValueError too).
    """

    def __init__(self, number: int) -> None:
        if not isinstance(number, int) or isinstance(number, bool) or not -MAX_PRIORITY <= number <= MAX_PRIORITY:
            raise ConfigError(
                f"{number!r} is no priority", hint=f"allowed: a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        self.number = number

    def __enter__(self) -> priority:
        _of_thread.stack.append(self.number)
        return self

    def __exit__(self, *_: object) -> None:
        _of_thread.stack.pop()

    def __repr__(self) -> str:
        return f"priority({self.number})"


def chosen(otherwise: int) -> int:
    """Return the number that the calling thread is in the `with` of, `otherwise` if it is in none."""
    stack = _of_thread.stack
    return stack[-1] if stack else otherwise
