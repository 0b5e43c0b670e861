"""A job on netlab's hosts: a rank, or several, on each of the first hosts, a summation server on each of the others.

Used by network.py and headline.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.netlab import NetLab

PORT = 4711
END_S = 20.0
"""for a server to drain"""
POLL_S = 0.1


def run_job(
    lab: NetLab,
    command: Sequence[str],
    *,
    nodes: int,
    servers: int,
    ranks_per_node: int = 1,
    env: Callable[[int], Mapping[str, str]] = lambda rank: {},
    timeout_s: float,
    quiet: bool = False,
) -> int:
    """Run `command` as every rank; returns the first exit code that is not 0, a server's too.

    Fewer servers than nodes: the nodes' co-located servers share the load. What still runs once a process has failed
    is ended.

    Args:
        env: rank -> what it finds in its environment beside this process's and torchrun's.
        quiet: do not let through what the ranks print.

    Raises:
        TimeoutError: ranks still run after `timeout_s`; they are ended.
    """
    running: list[subprocess.Popen[bytes]] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        addresses = []
        for number in range(nodes, nodes + servers):
            host = lab.hosts[number].ipv4
            server = [sys.executable, "-m", "torch_bps.server", "--host", host, "--port", str(PORT)]
            running.append(subprocess.Popen([*lab.prefix(number), *server], stdout=subprocess.DEVNULL))
            addresses.append(f"{host}:{PORT}")
        where = {"BYTEPS_SERVERS": ",".join(addresses), "BYTEPS_ENABLE_MIXED_MODE": "1" if servers < nodes else "0"}
        ranks = []
        for rank in range(nodes * ranks_per_node):
            around = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % ranks_per_node),
                "WORLD_SIZE": str(nodes * ranks_per_node),
                "MASTER_ADDR": lab.hosts[0].ipv4,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                **(where if servers else {}),
                **env(rank),
            }
            place = lab.prefix(rank // ranks_per_node)
            stdout = subprocess.DEVNULL if quiet else None
            ranks.append(subprocess.Popen([*place, *command], env=around, stdout=stdout))
            running.append(ranks[-1])
        while any(process.poll() is None for process in ranks):
            if code := next((code for process in running if (code := process.poll())), 0):
                return code
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"ranks still run after {timeout_s:g} s: {' '.join(command)}")
            time.sleep(POLL_S)
        return next((process.returncode for process in ranks if process.returncode), 0)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
