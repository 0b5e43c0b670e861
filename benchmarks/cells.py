"""What headline.py runs: cells, each a model on a cluster, and what the step model allows for them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Profile, read
from torch_bps.theory.step import BUCKET_NBYTES, FIRST_BUCKET_NBYTES, Cluster, buckets_of, step_s

RING = "gloo"
OURS = "byteps"
CROSS = "byteps+cross-barrier"
BUCKET_MB = BUCKET_NBYTES / (1 << 20)


@dataclass(frozen=True)
class Cell:
    """One job: a model on a cluster.

    Args:
        gbps, flow_gbps: of the testbed's links, and of one connection there; 0: no cap.
        env: settings of the ranks.
        switches: options of replay_rank.py.
        ranks_per_node: of which each takes all of the node's gradients.
        local_sum: False: ranks of a node push each for itself.
    """

    model: str
    nodes: int
    servers: int
    gbps: float
    flow_gbps: float = 0.0
    variants: tuple[str, ...] = (RING, OURS, CROSS)
    label: str = ""
    env: dict[str, str] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    ranks_per_node: int = 1
    local_sum: bool = True

    @classmethod
    def of(cls, result: dict[str, Any]) -> Cell:
        """Return the cell that a result of headline.py is of; it says more about it than this."""
        return cls(**{name: value for name, value in result["cell"].items() if name in cls.__dataclass_fields__})

    def title(self) -> str:
        """Return one line for people."""
        capped = f", {self.flow_gbps:g} a connection" if self.flow_gbps else ""
        label = f": {self.label}" if self.label else ""
        return f"{self.model}, {self.nodes}+{self.servers}, {self.gbps:g} Gb/s{capped}{label}"


TABLE = (
    Cell("", 4, 4, 20.0),
    Cell("", 4, 4, 5.0),
    Cell("", 8, 8, 20.0),
    Cell("", 4, 0, 20.0),
    Cell("", 4, 4, 20.0, flow_gbps=5.0),
)


def ablation() -> list[Cell]:
    """Return all mechanisms together, then one less in each cell."""
    whole = Cell("", 4, 4, 20.0, variants=(RING, CROSS), label="all on")
    capped = replace(whole, flow_gbps=2.5, label="all on, capped")
    double = replace(whole, nodes=2, servers=2, ranks_per_node=2, label="all on, 2 ranks a node")
    return [
        whole,
        replace(whole, servers=0, label="no servers"),
        replace(whole, label="no partitions", env={"BYTEPS_PARTITION_BYTES": "512M"}, switches=("--unpartitioned",)),
        replace(whole, label="no credit limit", env={"BYTEPS_SCHEDULING_CREDIT": "65536"}),
        replace(whole, label="no priority", switches=("--without-priority",)),
        replace(whole, label="no cross-barrier", variants=(RING, OURS)),
        replace(whole, label="cross-barrier alone, on gloo", variants=(RING, f"{RING}+cross-barrier")),
        capped,
        replace(capped, label="one lane, capped", env={"BYTEPS_LANES": "1"}),
        double,
        replace(double, label="no local sum, 2 ranks a node", local_sum=False),
    ]


def theory_s(cell: Cell, variant: str, profile: Profile, bucket_mb: float = BUCKET_MB, lanes: int = 2) -> float:
    """Return the step that the model allows.

    A ring goes through all ranks, one connection from a node to the next; ranks that push each for themselves load a
    link with the gradients of each.
    """
    backend, _, cross = variant.partition("+")
    ring = backend == RING
    members = cell.nodes * cell.ranks_per_node if ring else cell.nodes
    cluster = Cluster(members, cell.servers, cell.gbps, flow_gbps=cell.flow_gbps, lanes=lanes)
    pushes = 1 if cell.local_sum else cell.ranks_per_node
    nbytes = bucket_mb * (1 << 20)
    return step_s(
        profile,
        buckets_of(profile, min(FIRST_BUCKET_NBYTES, nbytes), nbytes),
        cluster.ring_s_per_byte() if ring else cluster.servers_s_per_byte() * pushes,
        cross_barrier=bool(cross),
        priority=not ring and "--without-priority" not in cell.switches,
    )


def profile_of(model: str) -> Profile:
    """Return the profile of a model known by name, or of a file. Raises ConfigError."""
    return MODELS[model]() if model in MODELS else read(Path(model))
