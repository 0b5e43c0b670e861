"""How long without any result is a stall, from how long results take. Pure: the caller passes the time.

A smoothed mean of what comes back, as TCP estimates its round trip (RFC 6298); what was under way during a stall does
not count, as what was retransmitted does not there (Karn): else each stall would make the next one longer.

With a constant (50 ms) slow links stalled while all was well: a window of 1.7 MB takes 110 ms at 125 Mbit/s, and the
first of its sums comes back when the last of its partitions has left. The window was then overdrawn until it bound
nothing, and what was urgent waited behind what was not (8 workers, 8 servers: steps 1.1 to 1.7 times as long).
"""

from __future__ import annotations

LEAST_S = 0.05
MOST_S = 1.0
_DOUBT_S = 10.0
_MARGIN = 2.0
_WEIGHT = 1 / 8
"""of the last result in the mean"""


class Patience:
    """Thread safety: one thread.

    Attributes:
        seconds: without a result, after which it is a stall if operations of several groups wait.
        heard_s: when the last result came, or the waiting began; the caller sets it.
    """

    __slots__ = ("_doubt_until_s", "_mean_s", "_stalled_s", "heard_s", "seconds")

    def __init__(self) -> None:
        self.seconds = LEAST_S
        self.heard_s = 0.0
        self._mean_s = 0.0
        self._stalled_s = 0.0
        self._doubt_until_s = 0.0

    def result(self, issued_s: float, now_s: float) -> None:
        """A task that was issued at `issued_s` has its result."""
        if issued_s < self._stalled_s:
            return
        self._mean_s += _WEIGHT * (now_s - issued_s - self._mean_s)
        self.seconds = min(max(_MARGIN * self._mean_s, LEAST_S), MOST_S)

    def is_over(self, now_s: float, groups: int, priorities: int) -> bool:
        """Return whether this is a stall; what is under way then counts no more, and the silence begins anew.

        Operations of several groups may be taken in different orders on each rank, and then only a stall helps. Those
        of one group that differ in priority are not, unless a caller gives the same operation another priority on each
        rank: after one stall that is likely for a while. All others wait for a late rank, within the credit.

        Args:
            groups, priorities: how many differ in what is not done.
        """
        if groups > 1 or (priorities > 1 and now_s < self._doubt_until_s):
            enough_s = self.seconds
        elif priorities > 1:
            enough_s = MOST_S
        else:
            return False
        if now_s - self.heard_s < enough_s:
            return False
        self.heard_s = self._stalled_s = now_s
        self._doubt_until_s = now_s + _DOUBT_S
        return True
