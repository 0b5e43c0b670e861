"""How much of the load each server gets so that all links end together. Pure. Called by core.rendezvous, cli.plan.

With M = 1 byte of gradients, n nodes of rates b_i whose co-located servers get the shares g_i, and dedicated servers of
rates c_j that get s_j, the links carry, each way:

    node i      (1 - g_i) + (n - 1) g_i = 1 + (n - 2) g_i      what it pushes elsewhere, and its results for the others
    server j    n s_j

The fullest link sets the time T. A node that ends at T has g_i = (T b_i - 1) / (n - 2), a server s_j = T c_j / n; the T
at which these add up to 1 is the optimum, but for one bound: no node can end before it has pushed everything, so
T >= 1 / min(b_i). Where that bound decides, there is capacity to spare, and dedicated servers are used first.

Source: OSDI'20 "A Unified Architecture for Accelerating Distributed DNN Training", section 4.2, where all rates are
equal: g = (n - k) / (n^2 + k n - 2 k), s = 2 (n - 1) / (n^2 + k n - 2 k) of k servers. Rates of their own are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Split(NamedTuple):
    """Shares of the load, which add up to 1."""

    colocated: list[float]
    """of each node's co-located server"""
    dedicated: list[float]
    """of each dedicated server"""
    time: float
    """of the fullest link, for one unit of gradients: seconds for a Gbit where rates are in Gb/s"""
    sentence: str


def split(nodes: Sequence[float], servers: Sequence[float]) -> Split:
    """Share the load between co-located and dedicated servers so that the fullest link ends as soon as it can.

    Args:
        nodes: rate of each worker node's link, at least one; each node has a co-located server.
        servers: rate of each dedicated server's link, in the same unit.
    """
    n, k = len(nodes), len(servers)
    if n == 1 and k:
        dedicated = _in_proportion(servers, 1.0)
        return Split([0.0], dedicated, max(1 / nodes[0], 1 / sum(servers)), "one node: all on the dedicated servers")
    time = 1 / min(nodes)
    if n > 2:
        time = max(time, (1 + n / (n - 2)) / (sum(nodes) / (n - 2) + sum(servers) / n))
    on_dedicated = min(1.0, time * sum(servers) / n)
    room = nodes if n <= 2 else [max(0.0, time * rate - 1) for rate in nodes]
    colocated = _in_proportion(room, 1 - on_dedicated)
    dedicated = _in_proportion(servers, on_dedicated)
    if k:
        sentence = (
            f"{on_dedicated:.0%} of the load on the dedicated servers, {1 - on_dedicated:.0%} on the co-located ones"
        )
    elif min(nodes) == max(nodes):
        sentence = f"no dedicated servers: 1/{n} on each co-located one"
    else:
        sentence = f"no dedicated servers: {min(colocated):.0%} to {max(colocated):.0%} on each co-located one"
    return Split(colocated, dedicated, time, sentence)


def link_rates(nodes: Sequence[float], servers: Sequence[float]) -> tuple[list[float], list[float], str]:
    """Return the rates to count with, of nodes and of servers, and a sentence; "" where nobody gave any.

    A rate that one host gives says nothing about the others, so they count only where every host gives its own.

    Args:
        nodes, servers: BYTEPS_NIC_GBPS there; 0: not set.
    """
    given = [rate for rate in (*nodes, *servers) if rate > 0]
    if not given:
        return [1.0] * len(nodes), [1.0] * len(servers), ""
    if len(given) < len(nodes) + len(servers):
        return (
            [1.0] * len(nodes),
            [1.0] * len(servers),
            f"BYTEPS_NIC_GBPS is set on {len(given)} of {len(nodes) + len(servers)} hosts: links count as equal",
        )
    low, high = min(given), max(given)
    return list(nodes), list(servers), f"links of {low:g}{f' to {high:g}' if high > low else ''} Gb/s"


def _in_proportion(rates: Sequence[float], total: float) -> list[float]:
    """Return shares of `total` in proportion to the rates; zeros where there are none."""
    whole = sum(rates)
    return [rate / whole * total if whole else 0.0 for rate in rates]
