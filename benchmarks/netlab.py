"""Hosts on one machine: network namespaces joined by a bridge, each with its own addresses and a link of a given rate.

    with NetLab(3, rate_mbit=500) as lab:
        lab.run(0, ["ping", "-c1", lab.hosts[1].ipv4])
        rig.run_ranks(train, 3, prefix=lambda rank: lab.prefix(rank))

    python benchmarks/netlab.py --hosts 4 --rate 500 -- \\
        torchrun --nnodes 4 --node-rank {host} --master-addr {host0} --nproc-per-node 1 examples/train_digits.py

A link passes its rate in both directions at once: a token bucket (tbf) at either end of each host's veth pair. What
goes to a host waits 50 ms at most and is then dropped, as at a switch's port. What leaves a host is not, up to 16 MiB:
its own queue is longer than what TCP puts into it (a thousand packets, of up to 64 KiB before the card cuts them).
TCP uses reno: bbr, the default of some kernels, falls apart when several hosts send to one. A bucket lets its burst
(128 KiB) through at once: look at bandwidth from 4 MiB on, at latency up to 64 KiB. Goodput is 95 to 96 % of the rate.

Clouds cap what one TCP connection may carry: with `flow_mbit` each host sends through one of 256 classes (htb) of that
rate, picked by bits of the receiver's address and of both ports (IPv4 only). Two connections that agree in all of these
bits share a class, as two that a cloud's switches hash alike.

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
_SWITCH = ("latency", "50ms")
_SENDER = ("limit", str(16 << 20))
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace; the addresses can be reached from the others."""

    name: str
    number: int

    @property
    def ipv4(self) -> str:
        """Address of eth0."""
        return self.ipv4_of(0)

    @property
    def ipv6(self) -> str:
        """Address of eth0."""
        return self.ipv6_of(0)

    def ipv4_of(self, link: int) -> str:
        """Return the address of eth0, eth1, ..."""
        return f"10.77.{link}.{self.number + 1}"

    def ipv6_of(self, link: int) -> str:
        """Return the address of eth0, eth1, ..."""
        return f"fd77:0:0:{link:x}::{self.number + 1:x}" if link else f"fd77::{self.number + 1:x}"


class NetLab:
    """`num_hosts` namespaces joined by a bridge, from `with` to its end.

    Cost: about 20 ms a host.

    Args:
        rate_mbit: of each link, both ways at once; 0: no limit.
        num_links: of each host, eth0, eth1, ...; each to a bridge and in a subnet of its own.
        flow_mbit: what one connection may carry of a link; 0: all.
    """

    def __init__(self, num_hosts: int, rate_mbit: int = 0, *, num_links: int = 1, flow_mbit: int = 0) -> None:
        if flow_mbit and flow_mbit > rate_mbit:
            raise ValueError(f"a connection cannot carry {flow_mbit} of a link's {rate_mbit} Mbit/s")
        self._rate_mbit = rate_mbit
        self._num_links = num_links
        self._flow_mbit = flow_mbit
        base = f"bps-{os.getpid()}-{next(_numbers)}"
        self._hub = f"{base}-hub"
        self.hosts = [Host(f"{base}-{i}", i) for i in range(num_hosts)]

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
        return _drops(self._hub, f"port{host}.0"), _drops(self.hosts[host].name, "eth0")

    def close(self) -> None:
        """End what still runs in the namespaces and remove them; harmless when repeated."""
        for name in (*(host.name for host in self.hosts), self._hub):
            _remove(name)

    def _create(self) -> None:
        _call("ip", "netns", "add", self._hub)
        for link in range(self._num_links):
            _call("ip", "-n", self._hub, "link", "add", f"br{link}", "type", "bridge")
            _call("ip", "-n", self._hub, "link", "set", f"br{link}", "up")
        for host in self.hosts:
            _call("ip", "netns", "add", host.name)
            _call("ip", "-n", host.name, "link", "set", "lo", "up")
            for link in range(self._num_links):
                self._join(host, link)
            _call(*self.prefix(host.number), "sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")

    def _join(self, host: Host, link: int) -> None:
        """Give a host an interface at a bridge."""
        in_hub, in_host = ("ip", "-n", self._hub), ("ip", "-n", host.name)
        port, device = f"port{host.number}.{link}", f"eth{link}"
        _call(*in_hub, "link", "add", port, "type", "veth", "peer", "name", device, "netns", host.name)
        _call(*in_hub, "link", "set", port, "master", f"br{link}", "up")
        _call(*in_host, "addr", "add", f"{host.ipv4_of(link)}/24", "dev", device)
        _call(*in_host, "addr", "add", f"{host.ipv6_of(link)}/64", "dev", device, "nodad")
        _call(*in_host, "link", "set", device, "up")
        if self._rate_mbit:
            _limit(self._hub, port, self._rate_mbit, _SWITCH)
            if self._flow_mbit:
                _limit_flows(host.name, device, self._rate_mbit, self._flow_mbit)
            else:
                _limit(host.name, device, self._rate_mbit, _SENDER)


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


def _limit(namespace: str, device: str, rate_mbit: int, queue: tuple[str, str]) -> None:
    """Let a device send no faster than `rate_mbit`; `queue` says how much may wait."""
    bucket = ("tbf", "rate", f"{rate_mbit}mbit", "burst", str(BURST_BYTES), *queue)
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _drops(namespace: str, device: str) -> int:
    """Return what a device's token bucket has dropped; 0 where there is none."""
    queues = json.loads(_call("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device) or "[]")
    return sum(int(queue.get("drops", 0)) for queue in queues)


def _limit_flows(namespace: str, device: str, rate_mbit: int, flow_mbit: int) -> None:
    """Let a device send no faster than `rate_mbit`, and each connection no faster than `flow_mbit`.

    A class may borrow up to its ceiling, from a parent that has no more than the link's rate: classes whose own rates
    added up to more would overdraw the parent. Bit 0 of the ports is left out: ephemeral ports are of one parity.
    """
    numbers = list(itertools.product(range(4), range(8), range(8)))
    add = f"class add dev {device} parent 1:"
    link = f"rate {rate_mbit}mbit burst {BURST_BYTES} cburst {BURST_BYTES}"
    borrower = f"rate {rate_mbit * 1000 // (len(numbers) + 1)}kbit burst 16k cburst {BURST_BYTES} quantum 60000"
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 1000",
        f"{add} classid 1:1 htb {link}",
        f"{add}1 classid 1:1000 htb {borrower} ceil {rate_mbit}mbit",
    ]
    for minor, (host, source, target) in enumerate(numbers, 2):
        match = f"match u32 {host:#x} 0x3 at 16 match ip sport {source << 1} 0xe match ip dport {target << 1} 0xe"
        lines += [
            f"{add}1 classid 1:{minor:x} htb {borrower} ceil {flow_mbit}mbit",
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 {match} flowid 1:{minor:x}",
        ]
    _call("tc", "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def _call(*command: str, timeout_s: float = COMMAND_TIMEOUT_S, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=True)
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
    parser.add_argument("--flow", type=int, default=0, help="what one connection may carry of it, Mbit/s; 0: all")
    parser.add_argument("command", nargs="+", help="{host}: the host's number, {host0}: the first one's address")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    with NetLab(options.hosts, options.rate, flow_mbit=options.flow) as lab:
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
