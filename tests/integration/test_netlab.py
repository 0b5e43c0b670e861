"""Hosts made of namespaces: what a connection may carry."""

from __future__ import annotations

import re
import sys
import time

import pytest

from benchmarks.netlab import BURST_BYTES, NetLab
from tests.integration.rig import Process

NUM_CONNECTIONS = 3
NBYTES = 1_000_000
FLOW_MBIT = 16

# Takes connections one after another and says on each when it has all.
RECEIVE = f"""
import socket
listener = socket.create_server(("0.0.0.0", 5001))
listener.settimeout(20)
print("ready", flush=True)
for _ in range({NUM_CONNECTIONS}):
    connection = listener.accept()[0]
    connection.settimeout(20)
    while connection.recv(1 << 16):
        pass
    connection.sendall(b".")
"""
SEND = f"""
import socket, sys, time
for number in range({NUM_CONNECTIONS}):
    with socket.create_connection((sys.argv[1], 5001), 20, ("", 40000 + 2 * number)) as connection:
        began_s = time.monotonic()
        connection.sendall(bytes({NBYTES}))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"."
        print(time.monotonic() - began_s)
"""


@pytest.mark.netns
def test_connections_are_capped_each_in_a_class_of_its_own() -> None:
    with NetLab(2, rate_mbit=400, flow_mbit=FLOW_MBIT) as lab:
        with Process([*lab.prefix(1), sys.executable, "-c", RECEIVE]) as receiver:
            receiver.wait_for("ready")
            taken_s = [float(line) for line in lab.run(0, [sys.executable, "-c", SEND, lab.hosts[1].ipv4]).split()]
            assert receiver.wait(time.monotonic() + 20) == 0, receiver.output
        classes = lab.run(0, ["tc", "-s", "class", "show", "dev", "eth0"])
    # never faster than the cap; how much slower is the machine's affair
    least_s = (NBYTES - 2 * BURST_BYTES) * 8 / (FLOW_MBIT * 1e6)
    assert len(taken_s) == NUM_CONNECTIONS
    assert min(taken_s) >= least_s
    sent = re.findall(r"parent 1:1 .* ceil (\w+) .*\n Sent (\d+) bytes", classes)
    assert [ceiling for ceiling, nbytes in sent if int(nbytes) > NBYTES] == [f"{FLOW_MBIT}Mbit"] * NUM_CONNECTIONS


def test_a_cap_above_the_link_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot carry 500 of a link's 400"):
        NetLab(2, rate_mbit=400, flow_mbit=500)
