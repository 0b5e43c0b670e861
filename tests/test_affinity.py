"""CPUs and interfaces that are near, on fake /sys trees: hosts of one and two sockets, containers, bonds, GPUs."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from torch_bps.affinity import cpus_near, hold_near, nearest_first

BRIDGES = {"pci0000:00": 0, "pci0000:3a": 0, "pci0000:80": 1}
"""host bridge -> NUMA node of what hangs there"""
DEVICES = {
    "eth0": "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0",  # at a switch with gpu0
    "eth1": "pci0000:3a/0000:3a:02.0/0000:40:00.0",
    "eth2": "pci0000:00/0000:00:03.0/virtio2",
    "eth3": "pci0000:80/0000:80:01.0/0000:81:00.0",
    "gpu0": "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3e:00.0",
    "gpu1": "pci0000:80/0000:80:03.0/0000:83:00.0",
}
GPU0, GPU1 = "0000:3e:00.0", "0000:83:00.0"


class Host:
    """A fake file system with what Linux says of NUMA nodes, interfaces and PCI devices."""

    def __init__(self, root: Path, cpulists: dict[int, str], numa: bool = True) -> None:
        self.root = str(root)
        self._sys = root / "sys"
        for node, cpulist in cpulists.items():
            self._write(f"devices/system/node/node{node}/cpulist", f"{cpulist}\n")
        self._write("devices/system/node/online", "0-1\n")
        for name, path in DEVICES.items():
            pci = "/".join(part for part in path.split("/") if part != "virtio2")
            self._write(f"devices/{pci}/numa_node", f"{BRIDGES[path.split('/')[0]] if numa else -1}\n")
            if name.startswith("eth"):
                self._link(f"class/net/{name}", f"devices/{path}/net/{name}")
            else:
                self._link(f"bus/pci/devices/{pci.split('/')[-1]}", f"devices/{pci}")
        self.virtual("lo")

    def virtual(self, name: str, *lower: str) -> None:
        """Add an interface without a device: a bond or bridge of the `lower` ones."""
        self._link(f"class/net/{name}", f"devices/virtual/net/{name}")
        for inner in lower:
            self._link(f"devices/virtual/net/{name}/lower_{inner}", f"class/net/{inner}")

    def _write(self, path: str, text: str) -> None:
        file = self._sys / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def _link(self, path: str, target: str) -> None:
        link, real = self._sys / path, self._sys / target
        link.parent.mkdir(parents=True, exist_ok=True)
        real.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(real, link.parent))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two sockets of four cores with two threads each."""
    return Host(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"})


EVERY = range(16)


@pytest.mark.parametrize(
    ("interface", "cpus", "listed"),
    [
        ("eth0", {0, 1, 2, 3, 8, 9, 10, 11}, "0-3,8-11"),
        ("eth2", {0, 1, 2, 3, 8, 9, 10, 11}, "0-3,8-11"),  # the virtio device says nothing, the PCI device above does
        ("eth3", {4, 5, 6, 7, 12, 13, 14, 15}, "4-7,12-15"),
    ],
)
def test_threads_run_on_the_node_of_the_interface(host: Host, interface: str, cpus: set[int], listed: str) -> None:
    near, why = cpus_near([interface], EVERY, host.root)
    assert near == cpus
    assert f"CPUs {listed}, of NUMA node {BRIDGES[DEVICES[interface].split('/')[0]]}, where {interface} is" in why


def test_a_container_uses_those_of_its_cpus_that_are_near(host: Host) -> None:
    near, why = cpus_near(["eth3"], {1, 2, 5, 7, 12}, host.root)
    assert near == {5, 7, 12}
    assert "CPUs 5,7,12" in why


def test_interfaces_of_two_nodes_leave_both(host: Host) -> None:
    assert cpus_near(["eth1", "eth2"], EVERY, host.root)[0] == set(range(4)) | set(range(8, 12))
    assert cpus_near(["eth1", "eth3"], {0, 1, 4}, host.root)[0] == set()
    assert "NUMA nodes 0, 1, where eth1, eth3 are" in cpus_near(["eth1", "eth3"], {0, 1, 4}, host.root)[1]


@pytest.mark.parametrize(
    ("interfaces", "allowed", "why"),
    [
        (["eth3"], {0, 1}, "this process may not use those of NUMA node 1, where eth3 is"),
        (["eth3"], {4, 5}, "all that this process may use are of NUMA node 1, where eth3 is"),
        (["lo"], EVERY, "the system does not say where lo is"),
        (["ib9"], EVERY, "the system does not say where ib9 is"),
        ([], EVERY, "the system does not say where the interface is"),
    ],
)
def test_where_there_is_no_choice_threads_run_anywhere(
    host: Host, interfaces: list[str], allowed: set[int], why: str
) -> None:
    assert cpus_near(interfaces, allowed, host.root) == (set(), f"IO and engine threads run on any CPU: {why}")


@pytest.mark.parametrize("cpulists", [{0: "0-15"}, {0: "0-15", 1: ""}, {}], ids=["one", "one with CPUs", "unknown"])
def test_one_node_is_no_choice(tmp_path: Path, cpulists: dict[int, str]) -> None:
    host = Host(tmp_path, cpulists)
    assert cpus_near(["eth0"], EVERY, host.root) == (
        set(),
        "IO and engine threads run on any CPU: this host has one NUMA node",
    )


def test_a_device_of_no_node_is_nowhere(tmp_path: Path) -> None:
    host = Host(tmp_path, {0: "0-7", 1: "8-15"}, numa=False)
    assert cpus_near(["eth0"], EVERY, host.root)[1].endswith("does not say where eth0 is")


def test_a_bond_is_where_its_parts_are(host: Host) -> None:
    host.virtual("bond0", "eth0", "eth1")
    host.virtual("vlan7", "bond0")
    assert cpus_near(["vlan7"], EVERY, host.root)[0] == set(range(4)) | set(range(8, 12))
    host.virtual("bond1", "eth0", "eth3")
    assert cpus_near(["bond1"], EVERY, host.root)[0] == set()


# ---- holding a thread


def test_a_thread_is_held_and_its_starter_is_not(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    first = min(mine)
    host = Host(tmp_path, {0: f"{first}", 1: f"{max(mine) + 1}"})
    seen: list[set[int]] = []

    def work() -> None:
        hold_near(["eth0"], host.root, allowed=lambda _: {*mine, max(mine) + 1})
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [{first}]
    assert os.sched_getaffinity(0) == mine


def test_what_is_done_is_said(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    held: list[tuple[int, set[int]]] = []
    with caplog.at_level(logging.INFO, "torch_bps"):
        hold_near(["eth3"], host.root, lambda _: EVERY, lambda pid, cpus: held.append((pid, set(cpus))))
        hold_near(["lo"], host.root, lambda _: EVERY, lambda *_: pytest.fail("nothing to hold"))
    assert held == [(0, {4, 5, 6, 7, 12, 13, 14, 15})]
    assert [record.getMessage() for record in caplog.records] == [
        "IO and engine threads run on CPUs 4-7,12-15, of NUMA node 1, where eth3 is"
    ]


def test_denied_it_is_one_line_and_no_error(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    hold_near(["eth3"], host.root, lambda _: EVERY, deny)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("it is not allowed to hold them (Operation not permitted)")


# ---- GPUs


@pytest.mark.parametrize(
    ("gpu", "order"),
    [
        # the same switch, the same host bridge, another one of the same node, the other node, no PCI device
        (GPU0, ["eth0", "eth1", "eth2", "eth3", "lo"]),
        (GPU1, ["eth3", "eth2", "eth1", "eth0", "lo"]),
        (f"0000{GPU1}".upper(), ["eth3", "eth2", "eth1", "eth0", "lo"]),  # as nvidia-smi says it
        ("0000:99:00.0", ["lo", "eth3", "eth2", "eth1", "eth0"]),
    ],
)
def test_the_interface_nearest_to_a_gpu_comes_first(host: Host, gpu: str, order: list[str]) -> None:
    assert nearest_first(["lo", "eth3", "eth2", "eth1", "eth0"], gpu, host.root) == order


def test_as_near_stays_in_order(host: Host) -> None:
    host.virtual("bond0", "eth0")
    assert nearest_first(["lo", "bond0"], GPU0, host.root) == ["lo", "bond0"]
