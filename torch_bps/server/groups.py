"""A group as the engine knows it: members, operations under way, and what is remembered of those that are over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from torch_bps.errors import ProtocolError
from torch_bps.server.mailbox import Mailbox
from torch_bps.wire.ops import MAX_RANKS

if TYPE_CHECKING:
    from torch_bps.server.slots import Record
    from torch_bps.wire.header import Header

_K = TypeVar("_K")
_V = TypeVar("_V")

REMEMBERED: Final = 1024
"""How many failed (and how many settled) operations of a group are remembered; the oldest are forgotten."""


class Failure(NamedTuple):
    """Why an operation or a group failed. `silent`: a member that need not be told, since it gave up itself."""

    error: str
    text: str
    hint: str = ""
    silent: int = -1


class Group:
    """Members by index, and their operations."""

    __slots__ = (
        "broken",
        "failed",
        "id",
        "left",
        "mailbox",
        "nodes",
        "num_nodes",
        "present",
        "ranks",
        "records",
        "settled",
        "size",
        "uplink",
    )

    def __init__(self, group: int, size: int, num_nodes: int, uplink: bool) -> None:
        if not 0 < size <= MAX_RANKS or not 0 < num_nodes <= MAX_RANKS:
            raise ProtocolError(f"group {group:x} of {size} ranks on {num_nodes} nodes")
        self.id = group
        self.size = size
        self.num_nodes = num_nodes
        self.uplink = uplink
        self.ranks: dict[int, int] = {}
        """index -> rank, of all that ever joined"""
        self.nodes: dict[int, int] = {}
        """index -> node"""
        self.present: set[int] = set()
        self.left: set[int] = set()
        self.records: dict[tuple[int, int], Record] = {}
        self.failed: dict[tuple[int, int], Failure] = {}
        """(stream, sequence) -> why; frames of it that are still on their way are answered with it"""
        self.settled: dict[int, Header] = {}
        """sequence -> statement of relayed operations that all ranks stated here, of which more partitions may come"""
        self.broken: Failure | None = None
        self.mailbox = Mailbox(self)

    def join(self, index: int, rank: int, node: int) -> None:
        """Add a member. Raises ProtocolError if there is no room for it."""
        if not 0 <= index < self.size or not 0 <= node < self.num_nodes or not 0 <= rank < MAX_RANKS:
            raise ProtocolError(f"rank {rank} joins group {self.id:x} with index {index} of {self.size}, node {node}")
        if index in self.ranks:
            raise ProtocolError(f"index {index} of group {self.id:x} is taken by rank {self.ranks[index]}")
        self.ranks[index] = rank
        self.nodes[index] = node
        self.present.add(index)

    def gone(self, by_node: bool) -> set[int]:
        """Return the contributors of which no more statements come: members that left, and the nodes they were on.

        (A rank ends an operation of its node only when the whole node's sum was answered.)
        """
        return {self.nodes[index] for index in self.left} if by_node else self.left

    def rank_of(self, contributor: int, by_node: bool = False) -> int:
        """Return the number of a contributor for people: a member's rank, or the node."""
        return contributor if by_node else self.ranks.get(contributor, contributor)

    def name_of(self, contributor: int, by_node: bool = False) -> str:
        """Return "rank 3" or "node 1"."""
        return f"node {contributor}" if by_node else f"rank {self.rank_of(contributor)}"

    def is_over(self) -> bool:
        """Whether nobody is here and nobody can usefully join any more."""
        return not self.present and (self.broken is not None or len(self.ranks) == self.size)


def remember(memory: dict[_K, _V], key: _K, value: _V, limit: int = REMEMBERED) -> None:
    """Put it into the dict and forget the oldest beyond `limit`."""
    memory[key] = value
    if len(memory) > limit:
        del memory[next(iter(memory))]
