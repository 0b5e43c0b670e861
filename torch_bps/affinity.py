"""Which CPUs are near a network interface, and which interface is near a GPU. Called by core and server; reads /sys.

    /sys/class/net/eth0 ──> /sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/net/eth0      a PCI path, from the host
                                                    └─ numa_node: 1                           bridge to the device
    /sys/devices/system/node/node1/cpulist: 16-31,48-63

A thread that moves bytes runs on the CPUs of its interface's NUMA node. So does its memory, without further ado: the
kernel takes a page from the node of the thread that first touches it. Only threads of our own are held, never the
user's, and where holding them is not allowed (containers) they run as they did.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger("torch_bps.topology")

_PCI: Final = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ANYWHERE: Final = "IO and engine threads run on any CPU: "
_SAME_BRIDGE, _SAME_NODE, _ELSEWHERE = range(3)


def hold_near(
    interfaces: Sequence[str],
    root: str = "/",
    allowed: Callable[[int], Iterable[int]] = os.sched_getaffinity,
    hold: Callable[[int, Iterable[int]], None] = os.sched_setaffinity,
) -> None:
    """Let the calling thread, and those that it starts, run only near these interfaces, if that makes sense; log it.

    Args:
        root: of the file system, for tests.
        allowed, hold: the two system calls, for tests.
    """
    try:
        cpus, why = cpus_near(interfaces, allowed(0), root)
        if cpus:
            hold(0, cpus)
    except OSError as error:
        log.warning("%sit is not allowed to hold them (%s)", _ANYWHERE, error.strerror or error)
    else:
        log.log(logging.INFO if cpus else logging.DEBUG, "%s", why)


def cpus_near(interfaces: Sequence[str], allowed: Iterable[int], root: str = "/") -> tuple[set[int], str]:
    """Return the CPUs to run on, none where there is nothing to choose, and the sentence that says why.

    Args:
        allowed: CPUs of this thread: a container's, or what taskset or numactl left.
    """
    allowed = set(allowed)
    cpus_of = _numa_nodes(root)
    if len(cpus_of) < 2:
        return set(), f"{_ANYWHERE}this host has one NUMA node"
    nodes = {node for name in interfaces for node in _nodes_of_interface(name, root)} & set(cpus_of)
    names, numbers = ", ".join(interfaces) or "the interface", ", ".join(map(str, sorted(nodes)))
    if not nodes:
        return set(), f"{_ANYWHERE}the system does not say where {names} is"
    where = f"NUMA node{'s' if len(nodes) > 1 else ''} {numbers}, where {names} {'are' if ', ' in names else 'is'}"
    near = set[int]().union(*(cpus_of[node] for node in nodes)) & allowed
    if not near:
        return set(), f"{_ANYWHERE}this process may not use those of {where}"
    if near == allowed:
        return set(), f"{_ANYWHERE}all that this process may use are of {where}"
    return near, f"IO and engine threads run on CPUs {_listed(near)}, of {where}"


def nearest_first(interfaces: Sequence[str], gpu: str, root: str = "/") -> list[str]:
    """Return the interfaces in order of their PCIe distance to a GPU; those that are as near stay in their order.

    Nearest is what shares most of the way up to the host bridge (the same switch), then what hangs at another bridge of
    the same NUMA node, then the rest, virtual interfaces last. An unknown GPU changes nothing.

    Args:
        gpu: its PCI address, "0000:3b:00.0" (or nvidia-smi's "00000000:3B:00.0").
    """
    device = Path(root, "sys/bus/pci/devices", gpu.lower()[-12:])
    gpu_path, gpu_node = _pci_path(device), _numa_node(device)
    if not gpu_path:
        return list(interfaces)

    def distance(name: str) -> tuple[int, int]:
        link = Path(root, "sys/class/net", name)
        path = _pci_path(link)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(gpu_path, path, strict=False)))
        hops = len(gpu_path) + len(path) - 2 * shared if path else 1 << 30
        if shared:
            return _SAME_BRIDGE, hops
        return (_SAME_NODE if gpu_node is not None and _numa_node(link) == gpu_node else _ELSEWHERE), hops

    return sorted(interfaces, key=distance)


# ---- /sys


def _numa_nodes(root: str) -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node that has any."""
    nodes = {}
    for folder in Path(root, "sys/devices/system/node").glob("node[0-9]*"):
        try:
            cpus = _cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _nodes_of_interface(name: str, root: str) -> set[int]:
    """Return the NUMA nodes of an interface; of those that it is made of, for a bond, a bridge or a VLAN."""
    link = Path(root, "sys/class/net", name)
    node = _numa_node(link)
    if node is not None:
        return {node}
    lower = [path.name.removeprefix("lower_") for path in link.glob("lower_*")]
    return {node for inner in lower if inner != name for node in _nodes_of_interface(inner, root)}


def _numa_node(link: Path) -> int | None:
    """Return what the device behind a link in /sys, or else the next above it, says; None if none says anything."""
    real = Path(os.path.realpath(link))
    for folder in (real, *real.parents):
        if folder.name == "devices":
            return None
        try:
            node = int((folder / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        return node if node >= 0 else None
    return None


def _pci_path(link: Path) -> list[str]:
    """Return the PCI parts of the path of the device behind a link in /sys, from the host bridge on."""
    return [part for part in Path(os.path.realpath(link)).parts if _PCI.fullmatch(part)] if link.exists() else []


def _cpus(text: str) -> set[int]:
    """Return the numbers of "0-3,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low:
            cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def _listed(cpus: set[int]) -> str:
    """Return "0-3,8" of the numbers."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in ranges)
