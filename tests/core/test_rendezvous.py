"""The meeting in a Store, with ranks as threads: agreement, stale keys, missing ranks, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from torch_bps.core import rendezvous
from torch_bps.core.rendezvous import Member, Plan, Rendezvous, decide
from torch_bps.errors import BytePSError, ConfigError, OperationTimeout
from torch_bps.wire import announcement


def member(rank: int, node: str = "a", nonce: str = "", server: str = "", nic_gbps: float = 0.0) -> Member:
    nonce = nonce or f"nonce{rank}"
    return Member(nonce, rank, f"host-{node}", 1, node, f"shm://{rank}", "127.0.0.1", server=server, nic_gbps=nic_gbps)


def simple_plan(members: list[Member]) -> Plan:
    return plan_of(members)


def plan_of(members: list[Member], **changes: object) -> Plan:
    arguments: dict[str, object] = {
        "group": 7,
        "dedicated": [],
        "force": False,
        "mixed": False,
        "one_node_world": True,
        "partition_bytes": 1 << 20,
        "credit": 16,
    }
    arguments.update(changes)
    arguments.setdefault("dedicated_gbps", [0.0] * len(arguments["dedicated"]))  # type: ignore[arg-type]
    return decide(members, **arguments)  # type: ignore[arg-type]


def meet(
    store: dist.Store, size: int, timeout_s: float = 10.0, decide_plan: Callable[[list[Member]], Plan] = simple_plan
) -> list[Plan]:
    def one(rank: int) -> Plan:
        meeting = Rendezvous(store, rank, size, "g", timeout_s)
        own = member(rank, nonce=meeting.nonce)
        try:
            plan = meeting.lead(own, decide_plan) if rank == 0 else meeting.follow(own)
            meeting.ready()
        except BytePSError as error:
            meeting.fail(error)
            raise
        return plan

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        return [future.result(30) for future in futures]


def test_all_ranks_get_the_same_plan() -> None:
    plans = meet(dist.HashStore(), 4)
    assert all(plan == plans[0] for plan in plans)
    assert [other.rank for other in plans[0].members] == [0, 1, 2, 3]


def test_keys_of_an_earlier_run_are_not_believed() -> None:
    store = dist.HashStore()
    first = meet(store, 3)
    second = meet(store, 3)
    assert {m.nonce for m in first[0].members}.isdisjoint(m.nonce for m in second[0].members)
    assert all(plan == second[0] for plan in second)


def test_a_follower_that_comes_first_ignores_the_old_plan() -> None:
    """The follower reads the old offer and its `go` before the new rank 0 has written anything."""
    store = dist.HashStore()
    meet(store, 2)
    seen = threading.Event()
    original = store.check

    class Watched:
        """Tells when the follower has looked at the old plan."""

        def check(self, keys: list[str]) -> bool:
            if keys[0].endswith("/go"):
                seen.set()
            return bool(original(keys))

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    follower = Rendezvous(Watched(), 1, 2, "g", 10.0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(follower.follow, member(1, nonce=follower.nonce))
        assert seen.wait(10)
        leader = Rendezvous(store, 0, 2, "g", 10.0)
        plan = leader.lead(member(0, nonce=leader.nonce), simple_plan)
        assert future.result(10) == plan


def test_a_missing_rank_is_named() -> None:
    meeting = Rendezvous(dist.HashStore(), 0, 3, "world", 0.2)
    with pytest.raises(OperationTimeout, match=r"ranks 1, 2") as caught:
        meeting.lead(member(0), simple_plan)
    assert "'world'" in str(caught.value)


def test_rank_zero_is_missing() -> None:
    meeting = Rendezvous(dist.HashStore(), 1, 3, "world", 0.2)
    with pytest.raises(OperationTimeout, match="rank 0's plan"):
        meeting.follow(member(1))


def test_a_failed_decision_reaches_every_rank() -> None:
    def refuse(members: list[Member]) -> Plan:
        raise ConfigError("BYTEPS_SERVERS names a server twice")

    with pytest.raises(ConfigError, match="twice"):
        meet(dist.HashStore(), 3, decide_plan=refuse)


def test_a_rank_that_fails_later_ends_the_wait_of_the_others() -> None:
    store = dist.HashStore()

    def one(rank: int) -> None:
        meeting = Rendezvous(store, rank, 3, "g", 10.0)
        own = member(rank, nonce=meeting.nonce)
        if rank == 0:
            meeting.lead(own, simple_plan)
        else:
            meeting.follow(own)
        if rank == 2:
            meeting.fail(ConfigError("no route to the server"))
        else:
            meeting.ready()

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(one, rank) for rank in range(3)]
        for future in futures[:2]:
            with pytest.raises(ConfigError, match=r"rank 2: no route to the server"):
                future.result(20)


@pytest.mark.parametrize(
    ("nodes", "changes", "mode", "num_colocated", "num_dedicated"),
    [
        ("aa", {}, "local", 0, 0),
        ("aa", {"force": True}, "flat", 1, 0),
        ("ab", {}, "flat", 2, 0),
        ("aab", {}, "hierarchical", 2, 0),
        ("abab", {}, "hierarchical", 2, 0),
        ("abab", {"force": True}, "flat", 2, 0),
        ("aa", {"dedicated": ["zmq://x:1"]}, "flat", 0, 1),
        ("aa", {"dedicated": ["zmq://x:1"], "one_node_world": False}, "local", 0, 1),
        ("abc", {"dedicated": ["zmq://x:1", "zmq://y:1"]}, "flat", 0, 2),
        ("abc", {"dedicated": ["zmq://x:1"], "mixed": True}, "flat", 3, 1),
    ],
)
def test_decide(nodes: str, changes: dict[str, object], mode: str, num_colocated: int, num_dedicated: int) -> None:
    plan = plan_of([member(rank, node) for rank, node in enumerate(nodes)], **changes)
    assert plan.mode == mode
    assert len(plan.colocated) == num_colocated
    if mode != "local":
        assert len(plan.dedicated) == num_dedicated
        assert len(plan.weights) == num_colocated + num_dedicated
    assert plan.why


def test_decide_uses_a_server_that_already_runs_on_the_node() -> None:
    members = [member(0, "a"), member(1, "b", server="zmq://b:5"), member(2, "b")]
    plan = plan_of(members)
    assert plan.colocated == ["", "zmq://b:5"]
    assert plan.starters == [0, 1]


def test_mixed_weights_follow_the_optimum() -> None:
    """n = 4 nodes, k = 2 servers: OSDI'20 gives 2(n-1)/(n^2+kn-2k) a server and (n-k)/(..) a node."""
    plan = plan_of([member(r, n) for r, n in enumerate("abcd")], dedicated=["zmq://x:1", "zmq://y:1"], mixed=True)
    total = sum(plan.weights)
    assert plan.weights[0] / total == pytest.approx(2 / 20)
    assert plan.weights[4] / total == pytest.approx(6 / 20)


def shares(plan: Plan) -> list[float]:
    return [weight / sum(plan.weights) for weight in plan.weights]


def test_rates_that_every_host_gives_set_the_weights() -> None:
    """Nodes of 10, 10 (its second rank does not say) and 30, without servers: T = 2 (n - 1) / sum = 0.08."""
    members = [member(0, "a", nic_gbps=10), member(1, "b", nic_gbps=10), member(2, "b"), member(3, "c", nic_gbps=30)]
    plan = plan_of(members)
    assert shares(plan) == pytest.approx([0, 0, 1])  # 0.08 s is less than a slow node needs to push
    assert "links of 10 to 30 Gb/s" in plan.why
    assert "0% to 100% on each co-located one" in plan.why

    servers = {"dedicated": ["zmq://x:1", "zmq://y:1"], "dedicated_gbps": [20.0, 10.0]}
    assert shares(plan_of(members, **servers)) == pytest.approx([2 / 3, 1 / 3])
    mixed = plan_of(members, mixed=True, **servers)
    assert shares(mixed) == pytest.approx([0, 0, 0, 2 / 3, 1 / 3])
    assert "100% of the load on the dedicated servers" in mixed.why


def test_a_rate_that_some_host_does_not_give_changes_nothing_but_the_banner() -> None:
    members = [member(0, "a", nic_gbps=10), member(1, "b"), member(2, "c", nic_gbps=30)]
    plan = plan_of(members, dedicated=["zmq://x:1"], dedicated_gbps=[40.0], mixed=True)
    assert plan.weights == plan_of([member(r, n) for r, n in enumerate("abc")], dedicated=["z"], mixed=True).weights
    assert "BYTEPS_NIC_GBPS is set on 3 of 4 hosts: links count as equal" in plan.why
    assert "Gb/s" not in plan_of([member(0, "a"), member(1, "b")]).why


class TestAnnouncedServers:
    def announce(self, store: dist.Store, address: str) -> None:
        number = store.add(announcement.COUNTER, 1) - 1
        store.set(announcement.key(number), announcement.encode(announcement.Announcement(address, "s", "h")))

    def test_finds_them_under_all_prefixes_and_skips_the_dead(self) -> None:
        root = dist.HashStore()
        for address in ("a:1", "dead:1", "b:1"):
            self.announce(root, address)
        store = dist.PrefixStore("x", dist.PrefixStore("y", root))
        found = rendezvous.announced_servers(store, 2, _soon(), lambda address: "dead" not in address, 1.0)
        assert found == ["zmq://a:1", "zmq://b:1"]

    def test_says_how_many_are_up(self) -> None:
        root = dist.HashStore()
        self.announce(root, "a:1")
        with pytest.raises(OperationTimeout, match="1 of 2 up"):
            rendezvous.announced_servers(root, 2, _soon(0.2), lambda address: True, 0.2)


def _soon(seconds: float = 5.0) -> float:
    import time

    return time.monotonic() + seconds
