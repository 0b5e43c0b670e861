"""How the ranks of a group find each other and agree on a plan, over the Store that PyTorch already has.

    rank 0:  offer = nonce ──────────────────> reads all hello/{r} ──> decides ──> go ──> ready
    rank r:  reads offer ──> writes hello/{r} (nonce, host, addresses) ──> reads go ──> ready

The Store outlives restarts and keeps old keys, so nothing in it is believed by its name alone: every rank makes a new
nonce for each group it opens, and accepts only a `go` that lists its own; otherwise it reads the offer again.
The decision itself (`decide`) is a pure function that also returns the sentence that explains it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from torch_bps.core.split import link_rates, split
from torch_bps.errors import BY_NAME, BytePSError, ConfigError, OperationTimeout, ProtocolError
from torch_bps.wire import announcement

log = logging.getLogger("torch_bps.core")

_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.02
_SAY_EVERY_S = 5.0
_GRACE_S = 3.0
_CREDIT_PER_SERVER = 3
_LEAST_CREDIT = 6
"""Partitions in flight. More meet in one server's link and are dropped; fewer leave it idle (docs/design.md)."""


class Member(msgspec.Struct, frozen=True):
    """What a rank tells about itself."""

    nonce: str
    rank: int
    host: str
    pid: int
    node: str
    """identity of the host: ranks with equal ones share memory"""
    local: str
    """address of the rank's own service ("shm://...")"""
    address: str
    """IP address of the host as the others can reach it"""
    server: str = ""
    """address of a co-located server that already runs on this host"""
    release: str = ""
    boards: bool = False
    """can run a group of one host on boards (torch_bps.local)"""
    nic_gbps: float = 0.0
    """BYTEPS_NIC_GBPS; 0: not set"""


class Plan(msgspec.Struct, frozen=True):
    """What rank 0 decided for the group."""

    group: int
    """random id of the group"""
    members: list[Member]
    nodes: list[int]
    """node of each rank, counted from 0 in order of first appearance"""
    mode: str
    """local, flat or hierarchical (core.plan)"""
    colocated: list[str]
    """address of each node's co-located server; "" where rank starters[node] is to start it"""
    starters: list[int]
    dedicated: list[str]
    weights: list[float]
    """share of the load of each server, co-located ones first"""
    partition_bytes: int
    credit: int
    why: str
    boards: bool = False
    """the collectives of this local group run on boards, without engines"""
    error: str = ""
    """name of an error class: the group cannot be opened, `why` says why"""

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return max(self.nodes) + 1 if self.nodes else 0

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks of one node, in order."""
        return [rank for rank, its_node in enumerate(self.nodes) if its_node == node]


def decide(
    members: list[Member],
    *,
    group: int,
    dedicated: list[str],
    dedicated_gbps: list[float],
    force: bool,
    mixed: bool,
    one_node_world: bool,
    partition_bytes: int,
    credit: int,
) -> Plan:
    """Choose the mode and the servers of a group.

    Args:
        members: by rank.
        dedicated: control addresses of the dedicated servers.
        dedicated_gbps: BYTEPS_NIC_GBPS of each; 0: not set.
        force: BYTEPS_FORCE_DISTRIBUTED: every rank pushes for itself, through servers, also on one node.
        mixed: BYTEPS_ENABLE_MIXED_MODE: co-located servers beside the dedicated ones.
        credit: partitions in flight; 0: by the number of servers.
        one_node_world: the first group of the job was on one node (then servers that the user named are used for
            groups of one node too: nothing else would use them).
    """
    identities = list(dict.fromkeys(member.node for member in members))
    nodes = [identities.index(member.node) for member in members]
    num_nodes = len(identities)
    per_node = [nodes.count(node) for node in range(num_nodes)]
    through_servers = force or num_nodes > 1 or (bool(dedicated) and one_node_world)
    colocated: list[str] = []
    starters: list[int] = []
    weights: list[float] = []
    if not through_servers:
        mode = "local"
        why = f"{len(members)} ranks on one node: they sum in shared memory, without a server"
    else:
        with_colocated = mixed or not dedicated
        if with_colocated:
            for node in range(num_nodes):
                known = [member.server for member in members if nodes[member.rank] == node and member.server]
                colocated.append(known[0] if known else "")
                starters.append(nodes.index(node))
        mode = "hierarchical" if num_nodes > 1 and max(per_node) > 1 and not force else "flat"
        node_gbps = [
            max(member.nic_gbps for member in members if nodes[member.rank] == node) for node in range(num_nodes)
        ]
        node_rates, dedicated_rates, rates = link_rates(node_gbps, dedicated_gbps)
        shares = split(node_rates, dedicated_rates)
        weights = shares.colocated + shares.dedicated if colocated else dedicated_rates
        servers = " and ".join(
            text
            for text in (
                f"{len(colocated)} co-located" if colocated else "",
                f"{len(dedicated)} dedicated" if dedicated else "",
            )
            if text
        )
        ranks = "+".join(map(str, per_node))
        why = f"{num_nodes} node{'s' if num_nodes > 1 else ''} ({ranks} ranks), {servers} server"
        why += "s" if len(weights) > 1 else ""
        if mode == "hierarchical":
            why += "; ranks of a node sum in shared memory first"
        if force:
            why += "; BYTEPS_FORCE_DISTRIBUTED: every rank pushes for itself"
        if rates:
            why += f"; {rates}"
        if colocated and (dedicated or len({*node_rates}) > 1):
            why += f"; {shares.sentence}"
    credit = credit or max(_CREDIT_PER_SERVER * len(weights), _LEAST_CREDIT)
    boards = mode == "local" and all(member.boards for member in members)
    return Plan(
        group, members, nodes, mode, colocated, starters, dedicated, weights, partition_bytes, credit, why, boards
    )


class Rendezvous:
    """One group's meeting in a Store.

    Thread safety: one thread. Raises KeyboardInterrupt at once when it comes.

    Args:
        store: torch.distributed.Store, with a prefix of the group's own.
        name: the group's, for messages.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._name = name
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._offer = ""
        self.nonce = uuid.uuid4().hex

    @property
    def deadline_s(self) -> float:
        """time.monotonic() when the group must stand."""
        return self._deadline_s

    def lead(self, member: Member, decide_plan: Callable[[list[Member]], Plan]) -> Plan:
        """Rank 0: gather everybody, decide, publish. A BytePSError of `decide_plan` reaches all ranks."""
        self._offer = self.nonce
        self._store.set("byteps/offer", self._offer)
        members = [member]
        for rank in range(1, self._size):
            text = self._wait_for(
                f"{self._offer}/hello/{rank}",
                lambda seen=rank: f"ranks {self._missing(seen)}",  # type: ignore[misc]
            )
            members.append(_decode(text, Member))
        try:
            plan = decide_plan(members)
        except BytePSError as error:
            plan = Plan(0, members, [], "", [], [], [], [], 0, 0, str(error), False, type(error).__name__)
            self._store.set(f"{self._offer}/go", msgspec.json.encode(plan).decode())
            raise
        self._store.set(f"{self._offer}/go", msgspec.json.encode(plan).decode())
        return plan

    def follow(self, member: Member) -> Plan:
        """Rank r: say hello, return rank 0's plan."""
        text = msgspec.json.encode(member).decode()
        offer = ""
        self._deadline_s += _GRACE_S  # rank 0 knows why it takes so long, and says so by its own deadline
        poll = _Poll(self._deadline_s)
        while True:
            if self._store.check(["byteps/offer"]):
                newest = self._store.get("byteps/offer").decode()
                if newest != offer:
                    offer = newest
                    self._store.set(f"{offer}/hello/{self._rank}", text)
                if self._store.check([f"{offer}/go"]):
                    plan: Plan = _decode(self._store.get(f"{offer}/go"), Plan)
                    if any(other.nonce == self.nonce for other in plan.members):
                        break
            poll.wait(lambda: self._text("rank 0's plan"), self._timeout)
        self._offer = offer
        if plan.error:
            raise BY_NAME.get(plan.error, BytePSError)(plan.why.splitlines()[0], **{"rank 0 says": plan.why})
        return plan

    def publish(self, key: str, text: str) -> None:
        """Write a key of this meeting."""
        self._store.set(f"{self._offer}/{key}", text)

    def read(self, key: str, what: str) -> str:
        """Wait for a key of this meeting; the failure of any rank ends the wait."""
        return self._wait_for(f"{self._offer}/{key}", lambda: what).decode()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one could not open the group."""
        if self._offer:
            self._store.set(f"{self._offer}/failed", f"{type(error).__name__}|rank {self._rank}: {error}")

    def ready(self) -> None:
        """Return when every rank has come this far, so that no rank starts alone."""
        key = f"{self._offer}/ready"
        poll = _Poll(self._deadline_s)
        count = self._store.add(key, 1)
        while count < self._size:
            self.check_failed()
            poll.wait(lambda: self._text("the other ranks to be ready"), self._timeout)
            count = self._store.add(key, 0)

    # ---- inside

    def _wait_for(self, key: str, what: Callable[[], str]) -> bytes:
        poll = _Poll(self._deadline_s)
        while not self._store.check([key]):
            if self._offer:
                self.check_failed()
            poll.wait(lambda: self._text(what()), self._timeout)
        value: bytes = self._store.get(key)
        return value

    def check_failed(self) -> None:
        """Raise what another rank failed with, if one did."""
        key = f"{self._offer}/failed"
        if self._store.check([key]):
            name, _, text = self._store.get(key).decode().partition("|")
            cls = BY_NAME.get(name, BytePSError)
            raise cls(f"another rank could not open the group {self._name!r}: {text.splitlines()[0]}", rank=self._rank)

    def _missing(self, first: int) -> str:
        missing = [rank for rank in range(first, self._size) if not self._store.check([f"{self._offer}/hello/{rank}"])]
        shown = ", ".join(map(str, missing[:16]))
        return shown + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")

    def _text(self, what: str) -> str:
        return f"rank {self._rank}, group {self._name!r}: waiting for {what}"

    def _timeout(self, text: str) -> BytePSError:
        return OperationTimeout(
            f"the group {self._name!r} could not be opened within {self._timeout_s:g} s: {text}",
            hint="see whether those ranks started, and whether all ranks call init_process_group or new_group",
            rank=self._rank,
        )


class _Poll:
    """Sleeps between two looks at the Store: short first, then longer; says every few seconds what it waits for."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._sleep_s = _FIRST_POLL_S
        self._say_s = time.monotonic() + _SAY_EVERY_S

    def wait(self, text: Callable[[], str], timeout: Callable[[str], BytePSError]) -> None:
        """Sleep once. Raises what `timeout` makes when the deadline has passed."""
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            raise timeout(text())
        if now_s >= self._say_s:
            self._say_s = now_s + _SAY_EVERY_S
            log.warning("%s", text())
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * 1.5, _LAST_POLL_S)


def announced_servers(
    store: Any, num_servers: int, deadline_s: float, alive: Callable[[str], bool], timeout_s: float
) -> list[str]:
    """Wait until `num_servers` dedicated servers that answer have announced themselves; returns their addresses.

    Args:
        store: the group's; servers write into the store under all its prefixes (server.announce).
        alive: connects and tells whether the server answers (an old run's servers may still be written down).
    """
    root = root_store(store)
    poll = _Poll(deadline_s)
    up: list[str] = []
    dead: set[str] = set()
    seen = 0

    def text() -> str:
        hint = "" if up else " (start them with --rdzv-endpoint and --rdzv-id as given to torchrun)"
        return f"waiting for servers: {len(up)} of {num_servers} up{hint}"

    def timeout(said: str) -> BytePSError:
        return OperationTimeout(
            f"{said} after {timeout_s:g} s",
            hint="start them with `byteps server --rdzv-endpoint HOST:PORT --rdzv-id ID`, or lower BYTEPS_NUM_SERVERS",
        )

    while True:
        total = root.add(announcement.COUNTER, 0)
        for number in range(seen, total):
            if not root.check([announcement.key(number)]):
                break  # counted, not written yet
            seen = number + 1
            value = announcement.decode(root.get(announcement.key(number)))
            address = f"zmq://{value.address}"
            if address in up or address in dead:
                continue
            if alive(address):
                up.append(address)
            else:
                dead.add(address)
        if len(up) >= num_servers:
            return up[:num_servers]
        poll.wait(text, timeout)


def root_store(store: Any) -> Any:
    """Return the store under all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_host(store: Any) -> str | None:
    """Return the host of the TCPStore under all prefixes, None for another kind."""
    host = getattr(root_store(store), "host", None)
    return host if isinstance(host, str) and host else None


def _decode(text: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed {kind.__name__} in the store: {error}") from None


def distinct(addresses: Iterable[str]) -> list[str]:
    """Return the addresses without repetitions, in order. Raises ConfigError when one stands twice."""
    listed = list(addresses)
    unique = list(dict.fromkeys(listed))
    if len(unique) != len(listed):
        raise ConfigError("BYTEPS_SERVERS names a server twice", hint="list each server once")
    return unique
