"""`byteps plan`: how the load is shared among servers, what an all_reduce takes, and what that gains over a ring.

A worker's link carries all that it pushes, M, but for what stays in its own co-located server, and the results of its
co-located share to the n - 1 others; a dedicated server's link carries its share n times. The fullest link sets the
time. A ring all-reduce passes 2(n-1)/n M through every link (core.placement.split has the source of the optimum).

With --model, what a training step takes at best (torch_bps.theory), on a node of 8 V100 for the models known by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_bps.core.placement import split
from torch_bps.errors import ConfigError
from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Profile, read
from torch_bps.theory.step import Cluster, buckets_of, layers_of, slowest_link, step_s


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
    parser.add_argument(
        "--model", default="", help=f"{', '.join(MODELS)}, or a JSON file (torch_bps/theory/profile.py has its form)"
    )
    parser.add_argument("--flow-gbps", type=float, default=0.0, help="with --model: what one connection may carry")
    parser.add_argument("--lanes", type=int, default=2, help="with --model: BYTEPS_LANES")
    options = parser.parse_args(arguments)
    for name, value, least in (
        ("nodes", options.nodes, 2),
        ("servers", options.servers, 0),
        ("gbps", options.gbps, 1e-3),
        ("server-gbps", options.server_gbps or options.gbps, 1e-3),
        ("megabytes", options.megabytes, 1e-6),
        ("flow-gbps", options.flow_gbps or options.gbps, 1e-3),
        ("lanes", options.lanes, 1),
    ):
        if value < least:
            parser.error(f"--{name} {value}: must be at least {least:g}")
    if not options.model:
        print("\n".join(plan(options.nodes, options.servers, options.gbps, options.server_gbps, options.megabytes)))
        return 0
    try:
        profile = MODELS[options.model]() if options.model in MODELS else read(Path(options.model))
    except ConfigError as error:
        print(f"byteps plan: {error}", file=sys.stderr)
        return 2
    cluster = Cluster(
        options.nodes, options.servers, options.gbps, options.server_gbps, options.flow_gbps, options.lanes
    )
    print("\n".join(plan_steps(profile, cluster)))
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


def plan_steps(profile: Profile, cluster: Cluster) -> list[str]:
    """Return the lines of the plan for a model."""
    server_gbps = cluster.server_gbps or cluster.gbps
    where = split(cluster.nodes, cluster.servers, cluster.gbps, server_gbps)[2]
    links = f"{cluster.nodes} nodes at {cluster.gbps:g} Gb/s, {cluster.servers} servers at {server_gbps:g} Gb/s"
    capped = f", {cluster.flow_gbps:g} Gb/s a connection" if cluster.flow_gbps else ""
    buckets, layers = buckets_of(profile), layers_of(profile)
    s_per_byte = cluster.servers_s_per_byte()
    ring_s = step_s(profile, buckets, cluster.ring_s_per_byte())
    rows = (
        ("ring all-reduce", ring_s),
        ("servers", step_s(profile, buckets, s_per_byte)),
        ("servers, cross-barrier", step_s(profile, buckets, s_per_byte, cross_barrier=True, priority=True)),
        ("  with a bucket a layer", step_s(profile, layers, s_per_byte, cross_barrier=True, priority=True)),
        ("computing alone", profile.compute_s),
    )
    lines = [
        f"{profile.name}: {profile.nbytes / 1e6:.0f} MB of gradients in {len(profile.layers)} layers and "
        f"{len(buckets)} buckets; {profile.samples} samples a node and step",
        f"{links}{capped}: {where}",
        f"{'at best':<24}{'step (ms)':>12}{'samples/s':>12}{'gain':>8}",
    ]
    for what, seconds in rows:
        rate = cluster.nodes * profile.samples / seconds
        lines.append(f"{what:<24}{seconds * 1e3:>12.1f}{rate:>12.0f}{f'{ring_s / seconds:.2f}x':>8}")
    if cluster.lanes_to_fill_links() > cluster.lanes:
        lines.append(
            f"connections limit the servers: BYTEPS_LANES={cluster.lanes_to_fill_links()} would fill the links"
        )
    return lines
