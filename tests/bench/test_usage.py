"""What a process has used: counted, not guessed."""

from __future__ import annotations

import time

from torch_bps.bench.usage import Usage, tcp_counters, usage

SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm MaxConn OutSegs RetransSegs
Tcp: 1 -1 1200 34
Udp: InDatagrams
Udp: 5
"""


def test_counters_of_tcp() -> None:
    assert tcp_counters(SNMP) == {"RtoAlgorithm": 1, "MaxConn": -1, "OutSegs": 1200, "RetransSegs": 34}


def test_what_was_used_in_between() -> None:
    first, second = Usage(1.0, 2.0, 3), Usage(1.5, 2.25, 10)
    assert second.since(first) == (0.5, 0.25, 7)
    assert second.since(first).plus(first) == second


def test_it_counts_this_process() -> None:
    before = usage()
    began = time.process_time()
    while time.process_time() - began < 0.02:
        pass
    used = usage().since(before)
    assert used.user_s + used.system_s > 0.01
    assert used.retransmits >= 0
