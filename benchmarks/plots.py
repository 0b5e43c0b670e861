"""Pictures of what benchmarks/headline.py measured: bars, the gain over the link's rate, the timeline of a step.

    python benchmarks/plots.py benchmarks/results/headline.json      writes headline_bars.png, ... beside it

A picture is made of each kind that the file holds cells for. Needs matplotlib: pip install torch_bps[plot].
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import CROSS, OURS, RING, Cell, profile_of, theory_s

COLOURS = {RING: "#888888", OURS: "#4c8bf5", CROSS: "#0b3d91"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    options = parser.parse_args(arguments)
    try:
        import matplotlib as mpl
    except ImportError:
        print("pictures need matplotlib: pip install torch_bps[plot]", file=sys.stderr)
        return 2
    mpl.use("Agg")
    cells = json.loads(options.results.read_text())["cells"]
    for kind, draw in (("bars", bars), ("curve", curve), ("timeline", timeline)):
        figure = draw(cells)
        if figure is not None:
            path = options.results.with_name(f"{options.results.stem}_{kind}.png")
            figure.savefig(path, dpi=120, bbox_inches="tight")
            print(path)
    return 0


def bars(results: Sequence[dict[str, Any]]) -> Any:
    """Images/s of each variant, cell by cell; a line over each bar is what theory allows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.2 * len(results)), 4.5))
    axes = figure.add_subplot()
    variants = list(dict.fromkeys(row["variant"] for result in results for row in result["rows"]))
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        places, heights, limits = [], [], []
        for place, result in enumerate(results):
            for row in result["rows"]:
                if row["variant"] == variant:
                    places.append(place + (number - (len(variants) - 1) / 2) * width)
                    heights.append(row["images_per_s"])
                    limits.append(row["images_per_s"] * row["step_s"] / row["limit_s"])
        axes.bar(places, heights, width, label=variant, color=COLOURS.get(variant))
        axes.hlines(
            limits,
            [place - width / 2 for place in places],
            [place + width / 2 for place in places],
            colors="black",
            label="theory" if number == 0 else None,
        )
    axes.set_xticks(range(len(results)), [Cell.of(result).title() for result in results], rotation=30, ha="right")
    axes.set_ylabel("samples/s (testbed's time)")
    axes.legend()
    return figure


def curve(results: Sequence[dict[str, Any]]) -> Any:
    """The gain over the ring by the link's rate: theory as a line, measured points on it; None without rates."""
    from matplotlib.figure import Figure

    families: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for result in results:
        cell = Cell.of(result)
        if not (cell.flow_gbps or cell.label):
            families.setdefault((cell.model, cell.nodes, cell.servers), []).append(result)
    families = {family: found for family, found in families.items() if len(found) > 1}
    if not families:
        return None
    figure = Figure(figsize=(7, 4.5))
    axes = figure.add_subplot()
    for number, ((model, nodes, servers), found) in enumerate(families.items()):
        profile = profile_of(model)
        for variant, style in ((OURS, "--"), (CROSS, "-")):
            rates = [10 ** (step / 40) for step in range(81)]
            allowed = []
            for gbps in rates:
                cell = Cell(model, nodes, servers, gbps)
                allowed.append(theory_s(cell, RING, profile) / theory_s(cell, variant, profile))
            colour = f"C{number}"
            axes.plot(rates, allowed, style, color=colour, label=f"{model} {nodes}+{servers} {variant}, theory")
            points = [
                (Cell.of(result).gbps, row["gain"])
                for result in found
                for row in result["rows"]
                if row["variant"] == variant and row["gain"]
            ]
            if points:
                marker = "o" if variant == CROSS else "s"
                axes.plot(*zip(*points, strict=True), marker, color=colour, label=f"{variant}, measured")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("rate of the links (Gb/s)")
    axes.set_ylabel(f"images/s over {RING}'s ring")
    axes.legend(fontsize="small")
    return figure


def timeline(results: Sequence[dict[str, Any]]) -> Any:
    """When one step computed, and when each bucket or partition was on its way; None where nothing was recorded."""
    from matplotlib.figure import Figure

    panels = [
        (Cell.of(result).title(), variant, events)
        for result in results
        for variant, events in result.get("timeline", {}).items()
        if events
    ]
    if not panels:
        return None
    figure = Figure(figsize=(11, 2.6 * len(panels)))
    longest_s = max(event["end_s"] for _, _, events in panels for event in events)
    for axes, (title, variant, events) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        rows = rows_of(events)
        for place, (row, found) in enumerate(rows.items()):
            axes.broken_barh(
                [(1e3 * event["begin_s"], 1e3 * (event["end_s"] - event["begin_s"])) for event in found],
                (place - 0.4, 0.8),
                facecolor="#4c8bf5" if row in ("forward", "backward") else "#e8710a",
                alpha=1.0 if row in ("forward", "backward") else 0.35,
                edgecolor="white" if row in ("forward", "backward") else None,
                linewidth=0.3,
            )
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * longest_s)
        axes.set_title(f"{title}: {variant}", fontsize="small")
        axes.set_xlabel("ms from the beginning of the backward pass")
    figure.tight_layout()
    return figure


def rows_of(events: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Sort events into rows: backward, forward, then one for each bucket, or operation that partitions are of.

    Where partitions were recorded the bucket's own event would only repeat them.
    """
    rows: dict[str, list[dict[str, Any]]] = {"backward": [], "forward": []}
    partitions = any(event["row"] == "partition" for event in events)
    for event in events:
        if event["row"] in rows:
            rows[event["row"]].append(event)
        elif event["row"] == "partition":
            rows.setdefault(f"all_reduce {event['name'].split('/')[0]}", []).append(event)
        elif not partitions:
            rows.setdefault(f"bucket {event['name']}", []).append(event)
    return rows


if __name__ == "__main__":
    sys.exit(main())
