"""Opens one group: what this rank tells, what rank 0 decides, which engines are connected to.

Rendezvous ──> Plan ──> co-located servers ──> links ──> Join ──> Group ──> ready
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch_bps
from torch_bps import topology
from torch_bps.config import Config
from torch_bps.core import rendezvous
from torch_bps.core.group import Group
from torch_bps.core.link import Link
from torch_bps.core.plan import Plane
from torch_bps.errors import BytePSError, OperationTimeout, PeerLostError
from torch_bps.local import futex
from torch_bps.wire import announcement, control

if TYPE_CHECKING:
    from torch_bps.core.runtime import Runtime

log = logging.getLogger("torch_bps.core")

_SERVERS_TIMEOUT_S = 15.0
"""for servers that BYTEPS_SERVERS lists: they should be up already"""


class Opening:
    """Opens a group once. Thread safety: one thread.

    Args:
        store, rank, size, timeout_s, name, config: as for core.runtime.open_group.
    """

    def __init__(
        self, runtime: Runtime, store: Any, rank: int, size: int, timeout_s: float, name: str, config: Config
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._name = name
        self._config = config
        self._meeting = rendezvous.Rendezvous(store, rank, size, name, timeout_s)

    def open(self) -> Group:
        """Open it (see core.runtime.open_group)."""
        try:
            return self._open()
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks fail too; the store itself may be what failed."""
        try:
            self._meeting.fail(error)
        except RuntimeError as store_error:
            log.warning("could not tell the other ranks: %s", store_error)

    def _open(self) -> Group:
        runtime, meeting, rank = self._runtime, self._meeting, self._rank
        member = rendezvous.Member(
            meeting.nonce,
            rank,
            runtime.host,
            os.getpid(),
            runtime.node,
            runtime.local_address,
            self._addresses()[0],
            runtime.node_server,
            torch_bps.__version__,
            futex.AVAILABLE and self._config.local_boards,
            self._config.nic_gbps,
        )
        plan = meeting.lead(member, self._decide) if rank == 0 else meeting.follow(member)
        runtime.world_nodes = runtime.world_nodes or plan.num_nodes
        try:
            group = self._connect(plan, self._colocated(plan) + plan.dedicated)
            runtime.groups[group.id] = group  # before `ready`: from then on a peer may be lost
            meeting.ready()
            for link in group.links():
                if link.closed is not None:  # it was lost before the group was there to be told
                    group.break_(link.closed)
        except BaseException:
            failed = runtime.groups.pop(plan.group, None)
            if failed is not None and failed.lane is not None:
                failed.lane.close(abort=True)
                failed.lane.release()
            runtime.reactor.call(runtime.boards.give_back, plan.group)
            raise
        log.info("%s, group %s: %s", runtime.who, self._name, group.describe())
        return group

    def _addresses(self) -> list[str]:
        """Return this host's addresses, one for each interface to use, as the others can reach them."""
        if self._runtime.interfaces:
            return [interface.address for interface in self._runtime.interfaces]
        return [topology.address_towards(rendezvous.store_host(self._store) or "127.0.0.1", 1)]

    def _decide(self, members: list[rendezvous.Member]) -> rendezvous.Plan:
        config, timeout_s, connector = self._config, self._timeout_s, self._runtime.connector
        dedicated = [f"zmq://{address}" for address in rendezvous.distinct(config.servers)]
        if dedicated:
            limit_s = min(timeout_s, _SERVERS_TIMEOUT_S)
            try:
                connector.connect(dedicated, time.monotonic() + limit_s, retry=True)
            except (PeerLostError, OperationTimeout) as error:
                raise PeerLostError(
                    f"{error.what} (tried for {limit_s:g} s)",
                    hint=f"see whether the servers of BYTEPS_SERVERS={','.join(config.servers)} run and can be reached",
                    **error.facts,
                ) from None
        if config.num_servers > len(dedicated):
            dedicated += rendezvous.announced_servers(
                self._store, config.num_servers - len(dedicated), self._meeting.deadline_s, self._alive, timeout_s
            )
        return rendezvous.decide(
            members,
            group=secrets.randbits(63) | 1,
            dedicated=dedicated,
            dedicated_gbps=[link.nic_gbps for link in connector.connect(dedicated, self._meeting.deadline_s)],
            force=config.force_distributed,
            mixed=config.enable_mixed_mode,
            one_node_world=self._runtime.world_nodes <= 1,
            partition_bytes=config.partition_bytes,
            credit=config.scheduling_credit,
        )

    def _alive(self, address: str) -> bool:
        try:
            self._runtime.connector.connect([address], time.monotonic() + 5.0)
        except BytePSError as error:
            log.info("an announced server does not answer: %s", error.what)
            return False
        return True

    def _colocated(self, plan: rendezvous.Plan) -> list[str]:
        """Return the addresses of the nodes' co-located servers; start this node's if it is this rank's to start."""
        meeting, rank = self._meeting, self._rank
        addresses = []
        for node, address in enumerate(plan.colocated):
            if not address and plan.starters[node] == rank:
                value = self._runtime.start_server(self._server_hosts(plan))
                meeting.publish(f"server/{node}", announcement.encode(value))
        for node, known in enumerate(plan.colocated):
            address = known
            if not address:
                text = meeting.read(f"server/{node}", f"the co-located server that rank {plan.starters[node]} starts")
                address = f"zmq://{announcement.decode(text).address}"
            addresses.append(address)
            if plan.members[plan.starters[node]].node == self._runtime.node:
                self._runtime.node_server = address
        return addresses

    def _server_hosts(self, plan: rendezvous.Plan) -> list[str]:
        """Return where the co-located server listens: addresses that the other nodes can reach."""
        own = self._addresses()
        if topology.is_loopback(own[0]):
            for member in plan.members:
                if member.node != self._runtime.node and not topology.is_loopback(member.address):
                    return [topology.address_towards(member.address, 1)]
        return own

    def _connect(self, plan: rendezvous.Plan, servers: Sequence[str]) -> Group:
        """Connect to the engines of this rank's plan and join the group there."""
        runtime, rank, size, deadline_s = self._runtime, self._rank, self._size, self._meeting.deadline_s
        node = plan.nodes[rank]
        local_ranks = plan.ranks_on(node)
        names = {member.local: f"rank {member.rank} (host {member.host}, pid {member.pid})" for member in plan.members}
        local = plan.mode != "flat"
        if servers:
            runtime.hold_near(self._addresses())
        check = self._meeting.check_failed
        local_addresses = [
            "inproc://self" if peer == rank else plan.members[peer].local for peer in local_ranks if local
        ]
        links = runtime.connector.connect(
            [*local_addresses, *servers], deadline_s, names=names, retry=True, check=check
        )
        local_links, server_links = links[: len(local_addresses)], links[len(local_addresses) :]

        def join(index: int, members: int, uplink: bool) -> control.Join:
            return control.Join(plan.group, members, index, rank, plan.num_nodes, node, uplink)

        uplink = plan.mode == "hierarchical"
        joins = [(link, join(local_ranks.index(rank), len(local_ranks), uplink)) for link in local_links]
        joins += [(link, join(rank, size, False)) for link in server_links]
        runtime.connector.join(joins, deadline_s, check)
        server_plane = Plane(server_links, plan.weights)
        local_plane = Plane(local_links, [1.0] * len(local_links))
        reduce_plane = server_plane if plan.mode == "flat" else local_plane
        lane = None
        if plan.boards:
            lane = runtime.boards.lane(plan.group, self._name, rank, local_links, deadline_s, check)
        return Group(
            runtime,
            plan.group,
            self._name,
            rank,
            size,
            reduce_plane=reduce_plane,
            relay_plane=local_plane if plan.mode == "local" else server_plane,
            uplink_plane=server_plane if uplink else None,
            is_local=plan.mode == "local",
            round_length=server_plane.placement.round_length or size,
            partition_bytes=plan.partition_bytes,
            charge_nbytes=0 if plan.mode == "local" else runtime.config.credit_bytes // plan.credit,
            description=_describe(plan, server_links),
            lane=lane,
        )


def _describe(plan: rendezvous.Plan, servers: Sequence[Link]) -> str:
    parts = [plan.why]
    for link in servers:
        reason = f" ({link.reason})" if link.reason else ""
        parts.append(f"{link.describe()}{reason}")
    parts.append(f"partitions of {plan.partition_bytes} bytes, credit {plan.credit}")
    return "; ".join(parts)
