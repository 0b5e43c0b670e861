"""Hosts on one machine: network namespaces joined by a bridge, each with its own addresses and a link of a given rate.

    with NetLab(3, rate_mbit=500) as lab:
        lab.run(0, ["ping", "-c1", lab.hosts[1].ipv4])
        rig.run_ranks(train, 3, prefix=lambda rank: lab.prefix(rank))

    python benchmarks/netlab.py --hosts 4 --rate 500 -- \\
        torchrun --nnodes 4 --node-rank {host} --master-addr {host0} --nproc-per-node 1 examples/train_digits.py

A link passes its rate in both directions at once: a token bucket (tbf) at either end of each host's veth pair. TCP uses
reno: bbr, the default of some kernels, falls apart when several hosts send to one. A bucket lets its burst (128 KiB)
through at once: look at bandwidth from 4 MiB on, at latency up to 64 KiB. Goodput is 95 to 96 % of the rate.

Nothing outside the namespaces is touched: the bridge lies in one of its own. Needs root and `ip`; mark tests `netns`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

COMMAND_TIMEOUT_S = 20
BURST_BYTES = 128 << 10
"""of a token bucket; less than this and the kernel's large segments do not fit into it"""
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace; the addresses can be reached from the others."""

    name: str
    ipv4: str
    ipv6: str


class NetLab:
    """`num_hosts` namespaces joined by a bridge, from `with` to its end.

    Cost: about 20 ms a host.

    Args:
        rate_mbit: of each host's link, both ways at once; 0: no limit.
    """

    def __init__(self, num_hosts: int, rate_mbit: int = 0) -> None:
        self._rate_mbit = rate_mbit
        base = f"bps-{os.getpid()}-{next(_numbers)}"
        self._hub = f"{base}-hub"
        self.hosts = [Host(f"{base}-{i}", f"10.77.0.{i + 1}", f"fd77::{i + 1:x}") for i in range(num_hosts)]

    def __enter__(self) -> NetLab:
        _remove_stale()
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def prefix(self, host: int) -> list[str]:
        """Return what to put before a command so that it runs on `host`."""
        return ["ip", "netns", "exec", self.hosts[host].name]

    def run(self, host: int, command: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run `command` on `host`, return its output, raise CalledProcessError if it fails."""
        return _call(*self.prefix(host), *command, timeout_s=timeout_s)

    def drops(self, host: int) -> tuple[int, int]:
        """Return how many packets the limits of `host`'s link have dropped so far: (on their way to it, from it)."""
        return _drops(self._hub, f"port{host}"), _drops(self.hosts[host].name, "eth0")

    def close(self) -> None:
        """End what still runs in the namespaces and remove them; harmless when repeated."""
        for name in (*(host.name for host in self.hosts), self._hub):
            _remove(name)

    def _create(self) -> None:
        _call("ip", "netns", "add", self._hub)
        in_hub = ("ip", "-n", self._hub)
        _call(*in_hub, "link", "add", "br0", "type", "bridge")
        _call(*in_hub, "link", "set", "br0", "up")
        for i, host in enumerate(self.hosts):
            _call("ip", "netns", "add", host.name)
            port, in_host = f"port{i}", ("ip", "-n", host.name)
            _call(*in_hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _call(*in_hub, "link", "set", port, "master", "br0", "up")
            _call(*in_host, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            _call(*in_host, "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
            _call(*in_host, "link", "set", "lo", "up")
            _call(*in_host, "link", "set", "eth0", "up")
            _call(*self.prefix(i), "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
            if self._rate_mbit:
                _limit(self._hub, port, self._rate_mbit)
                _limit(host.name, "eth0", self._rate_mbit)


@functools.cache
def why_not() -> str:
    """Return why namespaces cannot be made here, "" if they can."""
    if shutil.which("ip") is None:
        return "no network namespaces: `ip` (iproute2) is not installed"
    if os.geteuid() != 0:
        return "no network namespaces: not root"
    try:
        with NetLab(1):
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        return f"no network namespaces: {getattr(error, 'stderr', '') or error}"


def _limit(namespace: str, device: str, rate_mbit: int) -> None:
    """Let a device send no faster than `rate_mbit`."""
    bucket = ("tbf", "rate", f"{rate_mbit}mbit", "burst", str(BURST_BYTES), "latency", "50ms")
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _drops(namespace: str, device: str) -> int:
    """Return what a device's token bucket has dropped; 0 where there is none."""
    queues = json.loads(_call("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device) or "[]")
    return sum(int(queue.get("drops", 0)) for queue in queues)


def _call(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True
    )
    return done.stdout


def _names() -> list[str]:
    return [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.startswith("bps-")]


def _remove(name: str) -> None:
    if name not in _names():
        return
    for pid in _call("ip", "netns", "pids", name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    _call("ip", "netns", "del", name)


def _remove_stale() -> None:
    """Remove what a killed test run left: labs are named after the process that made them."""
    for name in _names():
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            _remove(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on every host at once; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", type=int, default=0, help="of each link, Mbit/s; 0: no limit")
    parser.add_argument("command", nargs="+", help="{host}: the host's number, {host0}: the first one's address")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    with NetLab(options.hosts, options.rate) as lab:
        first = lab.hosts[0].ipv4
        running = []
        for number in range(options.hosts):
            words = [word.replace("{host}", str(number)).replace("{host0}", first) for word in options.command]
            running.append(subprocess.Popen([*lab.prefix(number), *words]))
        try:
            codes = [process.wait() for process in running]
        except BaseException:
            for process in running:
                process.terminate()
            raise
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
