"""`byteps plan`: how the load is shared among servers, what an all_reduce takes, and what that gains over a ring.

A worker's link carries all that it pushes, M, but for what stays in its own co-located server, and the results of its
co-located share to the n - 1 others; a dedicated server's link carries its share n times. The fullest link sets the
time (core.split). A ring all-reduce passes 2(n-1)/n M through every link, so its slowest sets the time.

With --model, what a training step takes at best (torch_bps.theory), on a node of 8 V100 for the models known by name.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_bps.core.split import split
from torch_bps.errors import ConfigError
from torch_bps.theory.architectures import MODELS
from torch_bps.theory.profile import Profile, read
from torch_bps.theory.step import Cluster, buckets_of, layers_of, step_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="byteps plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="worker machines")
    parser.add_argument("--servers", type=int, default=0, help="dedicated CPU machines")
    parser.add_argument("--gbps", default="10", help="rate of a worker's link; R,R,... where they differ")
    parser.add_argument("--server-gbps", default="", help="of a server's, as --gbps; default: as the slowest worker's")
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
        ("megabytes", options.megabytes, 1e-6),
        ("flow-gbps", options.flow_gbps or 1.0, 1e-3),
        ("lanes", options.lanes, 1),
    ):
        if value < least:
            parser.error(f"--{name} {value}: must be at least {least:g}")
    try:
        nodes = _rates("--gbps", options.gbps, options.nodes)
        servers = _rates("--server-gbps", options.server_gbps or f"{min(nodes)}", options.servers)
    except ValueError as error:
        parser.error(str(error))
    if not options.model:
        print("\n".join(plan(nodes, servers, options.megabytes)))
        return 0
    if len({*nodes}) > 1 or len({*servers}) > 1:
        parser.error(
            f"--model takes one rate for all nodes, and one for all servers, not {options.gbps} {options.server_gbps}"
        )
    try:
        profile = MODELS[options.model]() if options.model in MODELS else read(Path(options.model))
    except ConfigError as error:
        print(f"byteps plan: {error}", file=sys.stderr)
        return 2
    cluster = Cluster(
        len(nodes), len(servers), nodes[0], (servers or nodes)[0], flow_gbps=options.flow_gbps, lanes=options.lanes
    )
    print("\n".join(plan_steps(profile, cluster)))
    return 0


def plan(nodes: Sequence[float], servers: Sequence[float], megabytes: float) -> list[str]:
    """Return the lines of the plan.

    Args:
        nodes, servers: rate of each link, Gb/s.
    """
    n, gigabits = len(nodes), megabytes / 1000 * 8
    shares = split(nodes, servers)
    seconds = gigabits * shares.time
    ring_s = gigabits * 2 * (n - 1) / n / min(nodes)
    gain = ring_s / seconds
    lines = [
        f"{n} nodes at {_text(nodes)} Gb/s, {len(servers)} servers"
        f"{f' at {_text(servers)} Gb/s' if servers else ''}: {shares.sentence}",
        f"all_reduce of {megabytes:g} MB: {seconds * 1e3:.1f} ms, ring all-reduce {ring_s * 1e3:.1f} ms: {gain:.2f}x",
    ]
    if len({*nodes}) > 1 or len({*servers}) > 1:
        lines.append(f"of the load, in %: {_percents(shares.colocated)} on the co-located servers")
        if servers:
            lines.append(f"                  {_percents(shares.dedicated)} on the dedicated ones")
    if n == 2:
        lines.append("no gain from servers at 2 nodes: in a ring each sends and receives every byte once already")
    elif gain < 1.005:
        lines.append("no gain: add dedicated servers")
    elif servers and sum(shares.colocated) > 1e-9 and shares.time > 1 / min(nodes):
        more = math.ceil(n * min(nodes) / (sum(servers) / len(servers)))
        lines.append(f"{more} servers would reach {2 * (n - 1) / n:.2f}x, which is all that there is")
    return lines


def plan_steps(profile: Profile, cluster: Cluster) -> list[str]:
    """Return the lines of the plan for a model."""
    links = f"{cluster.nodes} nodes at {cluster.gbps:g} Gb/s, {cluster.servers} servers at {cluster.server_gbps:g} Gb/s"
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
        f"{links}{capped}: {cluster.split().sentence}",
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


def _rates(option: str, text: str, count: int) -> list[float]:
    """Return `count` rates of "R" or "R,R,...". Raises ValueError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: rates are numbers, one or one for each, separated by commas") from None
    if not all(1e-3 <= rate < math.inf for rate in rates):
        raise ValueError(f"{option} {text}: must be at least 0.001")
    if len(rates) == 1:
        return rates * count
    if len(rates) != count:
        raise ValueError(f"{option} {text}: {len(rates)} rates for {count}")
    return rates


def _text(rates: Sequence[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{low:g} to {high:g}" if high > low else f"{low:g}"


def _percents(shares: Sequence[float]) -> str:
    return ", ".join(f"{share * 100:.1f}" for share in shares)
