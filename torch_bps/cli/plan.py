"""`byteps plan`: how the load is shared among servers, what an all_reduce takes, and what that gains over a ring.

A worker's link carries all that it pushes, M, but for what stays in its own co-located server, and the results of its
co-located share to the n - 1 others; a dedicated server's link carries its share n times. The fullest link sets the
time. A ring all-reduce passes 2(n-1)/n M through every link (core.placement.split has the source of the optimum).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_bps.core.placement import split


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="byteps plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="worker machines")
    parser.add_argument("--servers", type=int, default=0, help="dedicated CPU machines")
    parser.add_argument("--gbps", type=float, default=10.0, help="rate of a worker's link")
    parser.add_argument("--server-gbps", type=float, default=0.0, help="of a server's; default: as a worker's")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the gradients")
    options = parser.parse_args(arguments)
    for name, value, least in (
        ("nodes", options.nodes, 2),
        ("servers", options.servers, 0),
        ("gbps", options.gbps, 1e-3),
        ("server-gbps", options.server_gbps or options.gbps, 1e-3),
        ("megabytes", options.megabytes, 1e-6),
    ):
        if value < least:
            parser.error(f"--{name} {value}: must be at least {least:g}")
    print("\n".join(plan(options.nodes, options.servers, options.gbps, options.server_gbps, options.megabytes)))
    return 0


def plan(nodes: int, servers: int, gbps: float, server_gbps: float, megabytes: float) -> list[str]:
    """Return the lines of the plan."""
    server_gbps = server_gbps or gbps
    colocated, dedicated, sentence = split(nodes, servers, gbps, server_gbps)
    seconds = megabytes / 1000 * 8 * slowest_link(nodes, servers, colocated, dedicated, gbps, server_gbps)
    ring_s = megabytes / 1000 * 8 * 2 * (nodes - 1) / nodes / gbps
    gain = ring_s / seconds
    lines = [
        f"{nodes} nodes at {gbps:g} Gb/s, {servers} servers at {server_gbps:g} Gb/s: {sentence}",
        f"all_reduce of {megabytes:g} MB: {seconds * 1e3:.1f} ms, ring all-reduce {ring_s * 1e3:.1f} ms: {gain:.2f}x",
    ]
    if nodes == 2:
        lines.append("no gain from servers at 2 nodes: in a ring each sends and receives every byte once already")
    elif gain < 1.005:
        lines.append("no gain: add dedicated servers")
    elif colocated:
        more = -(-nodes * gbps // server_gbps)
        lines.append(f"{more:.0f} servers would reach {2 * (nodes - 1) / nodes:.2f}x, which is all that there is")
    return lines


def slowest_link(
    nodes: int, servers: int, colocated: float, dedicated: float, gbps: float, server_gbps: float
) -> float:
    """Return the seconds for each Gbit of gradients: the time of the fullest link.

    Args:
        colocated, dedicated: share of the load of each co-located, and each dedicated server.
    """
    worker = (1.0 - colocated + (nodes - 1) * colocated) / gbps
    server = nodes * dedicated / server_gbps if servers else 0.0
    return max(worker, server)
