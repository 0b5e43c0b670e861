"""What a rank's process has used so far: processor time of all its threads, and segments that TCP sent again."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

_SNMP = Path("/proc/self/net/snmp")


class Usage(NamedTuple):
    """Since the process began; retransmits are those of its network namespace."""

    user_s: float = 0.0
    system_s: float = 0.0
    retransmits: int = 0

    def since(self, before: Usage) -> Usage:
        """Return what was used after `before`."""
        return Usage(
            self.user_s - before.user_s, self.system_s - before.system_s, self.retransmits - before.retransmits
        )

    def plus(self, more: Usage) -> Usage:
        """Return the sum."""
        return Usage(self.user_s + more.user_s, self.system_s + more.system_s, self.retransmits + more.retransmits)


def usage() -> Usage:
    """Return what this process has used so far. Cost: 0.1 ms."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    try:
        tcp = tcp_counters(_SNMP.read_text())
    except OSError:  # no /proc/net here
        tcp = {}
    return Usage(spent.ru_utime, spent.ru_stime, tcp.get("RetransSegs", 0))


def tcp_counters(snmp: str) -> dict[str, int]:
    """Return the counters of TCP in the text of /proc/net/snmp: {"OutSegs": .., "RetransSegs": .., ..}."""
    names, values = (line.split()[1:] for line in snmp.splitlines() if line.startswith("Tcp:"))
    return dict(zip(names, map(int, values), strict=True))
