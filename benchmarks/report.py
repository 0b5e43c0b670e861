"""Make all results with one command: run the benchmarks, write tables and plots into benchmarks/results.

    python benchmarks/report.py                 the whole set, half an hour; as root with `ip`, also between hosts
    python benchmarks/report.py --quick         every benchmark, briefly: to see that all run
    python benchmarks/report.py --only local,training
    python benchmarks/report.py --render        run nothing: tables and plots from the JSON files that are there

README.md there has a table for each JSON file that benchmarks.harness or headline.py wrote, also for those that this
command does not run itself. Plots need matplotlib: pip install "torch_bps[plot]".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, headline, netlab
from benchmarks.harness import ROOT, Result

RESULTS = ROOT / "benchmarks" / "results"
RUN_S = 1800.0
_BETWEEN_HOSTS = {
    4: ("--sizes", "64K,1M,25M,100M"),
    2: ("--sizes", "25M,100M"),
    0: ("--sizes", "25M,100M"),
}
FULL: dict[str, tuple[str, ...]] = {
    "engine": ("engine.py",),
    "reducer": ("reducer.py",),
    "transport": ("transport.py",),
    "local": ("local.py",),
    "training": ("training.py",),
    "memory": ("memory.py",),
    **{
        f"network_4_workers_{servers}_servers": ("network.py", "--servers", str(servers), *sizes)
        for servers, sizes in _BETWEEN_HOSTS.items()
    },
    "network_8_workers_8_servers": (
        *("network.py", "--workers", "8", "--servers", "8"),
        *("--rate", "200", "--sizes", "25M"),
    ),
}
QUICK: dict[str, tuple[str, ...]] = {
    "engine": ("engine.py", "--seconds", "0.1"),
    "reducer": ("reducer.py", "--seconds", "0.05", "--sizes", "1M"),
    "transport": ("transport.py", "--seconds", "0.1", "--sizes", "64,1M"),
    "local": ("local.py", "--seconds", "0.1", "--ranks", "2", "--sizes", "1K,1M"),
    "training": ("training.py", "--models", "digits", "--rounds", "2"),
    "memory": ("memory.py", "--ranks", "2", "--megabytes", "50", "--bucket", "5", "--steps", "2"),
    "network_2_workers_2_servers": (
        *("network.py", "--workers", "2", "--servers", "2"),
        *("--sizes", "1M", "--seconds", "0.5"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the set and render; returns 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--only", default="", help=f"of {', '.join(FULL)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args(arguments)
    runs = QUICK if options.quick else FULL
    wanted = options.only.split(",") if options.only else list(runs)
    if unknown := set(wanted) - set(runs):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(runs)}")
    options.results.mkdir(parents=True, exist_ok=True)
    failed = [] if options.render else [name for name in wanted if not run(name, runs[name], options.results)]
    render(options.results)
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, words: Sequence[str], folder: Path) -> bool:
    """Run one benchmark, its result into `folder`; returns whether it went well, or cannot run here."""
    if words[0] == "network.py" and (reason := netlab.why_not()):
        print(f"skipped {name}: {reason}", file=sys.stderr)
        return True
    command = [sys.executable, f"benchmarks/{words[0]}", *words[1:], "--json", str((folder / f"{name}.json").resolve())]
    return subprocess.run(command, cwd=ROOT, timeout=RUN_S, check=False).returncode == 0


def render(folder: Path) -> None:
    """Write README.md and a plot for each result that has one."""
    found = [pair for path in sorted(folder.glob("*.json")) if (pair := harness.read(path)) is not None]
    try:
        import matplotlib
    except ImportError:
        matplotlib = None
        print('no plots: matplotlib is not installed (pip install "torch_bps[plot]")', file=sys.stderr)
    if matplotlib is not None:
        matplotlib.use("Agg")
        for result, _ in found:
            if result.plot is not None:
                draw(result, folder / f"{result.name}.png")
    plots = {path.stem for path in folder.glob("*.png")}
    sections = [section(result, how, result.name in plots) for result, how in found]
    heading = "# Results\n\nMade by `python benchmarks/report.py`: change nothing here. Ratios count, not figures.\n"
    sections += [emulated(path) for path in sorted(folder.glob("headline_*.json"))]
    (folder / "README.md").write_text("\n".join([heading, *sections]))


def section(result: Result, how: dict[str, Any], has_plot: bool) -> str:
    """Return one result as Markdown."""
    environment = "".join(f" {name}={value}" for name, value in how["environment"].items())
    lines = [
        f"## {result.title}",
        f"`{how['command']}`",
        "",
        harness.markdown_table(result.columns, result.rows),
        "",
        *(f"- {note}" for note in result.notes),
        f"- {how['date'][:10]}, commit {how['commit']}, {how['cores']} cores of {how['cpu']}, load {how['load']}, "
        f"kernel {how['kernel']}, Python {how['python']}, torch {how['torch']}, numpy {how['numpy']}{environment}",
    ]
    if has_plot:
        lines += ["", f"![{result.title}]({result.name}.png)"]
    return "\n".join(lines) + "\n"


def emulated(path: Path) -> str:
    """Return what headline.py wrote as Markdown, with the pictures that plots.py made of it."""
    found = json.loads(path.read_text())
    about = found["about"]
    lines = [f"## The published comparison, emulated: {path.stem.removeprefix('headline_')}"]
    lines += [f"`{about['command']}`", "", "```"]
    lines += [line for cell in found["cells"] for line in headline.table(cell)]
    lines += ["```", f"- commit {about['commit'][:12]}, {about['cpus']} cores, torch {about['torch']}", ""]
    lines += [f"![{picture.stem}]({picture.name})" for picture in sorted(path.parent.glob(f"{path.stem}_*.png"))]
    return "\n".join(lines) + "\n"


def draw(result: Result, path: Path) -> None:
    """Plot a result: its `plot` says what."""
    from matplotlib import pyplot

    lines = result.plot
    assert lines is not None
    panels = list(dict.fromkeys(row.get(lines.panel, "") for row in result.rows))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels) + 1, 3.5), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        rows = [row for row in result.rows if row.get(lines.panel, "") == panel and row[lines.y]]
        for name, points in series(rows, lines).items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=lines.x, ylabel=lines.y, title=str(panel))
        axis.grid(True, which="both", alpha=0.2)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def series(rows: Sequence[harness.Row], lines: harness.Lines) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line, by its name: the value of `series`, and the ranks where they differ."""
    several = len({row.get("ranks") for row in rows}) > 1
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row[lines.series]}, {row['ranks']} ranks" if several else str(row[lines.series])
        found.setdefault(name, []).append((row[lines.x], row[lines.y]))
    return {name: sorted(points) for name, points in found.items()}


if __name__ == "__main__":
    sys.exit(main())
