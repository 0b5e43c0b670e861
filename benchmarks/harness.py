"""What the benchmarks share: spreads, tables, and result files that say how they were made.

    result = Result("reducer", "Adding, beside copying", COLUMNS, rows, {"seconds": 1.0})
    result.print()
    result.write(path)                              benchmarks/report.py makes Markdown and plots of such files

Knows no benchmark. A row is a dict; a column says which of its values is shown, and how.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "numpy", "pyzmq", "msgspec")
_SETTINGS = ("BYTEPS_", "OMP_", "GLOO_")

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        heading: with the unit in it.
        key: of the row's value; a row without it shows nothing there.
        form: a format specification, "" for text.
        scale: what the value is multiplied with, from the row's unit to the heading's.
    """

    heading: str
    key: str
    form: str = ""
    scale: float = 1.0

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the row's value as text."""
        value = row.get(self.key)
        if value is None:
            return ""
        return format(value * self.scale if self.scale != 1.0 else value, self.form)


@dataclass(frozen=True)
class Lines:
    """A plot: one line for each value of `series`, one panel for each value of `panel`, both axes logarithmic."""

    x: str
    y: str
    series: str
    panel: str = ""


@dataclass
class Result:
    """What a benchmark found.

    Args:
        name: of the benchmark, and of its file.
        title: for people.
        columns: of the table.
        rows: with all that was measured, also what no column shows.
        settings: what the benchmark was asked for.
        plot: None where lines would say nothing.
        notes: one sentence each.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    plot: Lines | None = None
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        """Print title, table and notes."""
        print(f"# {self.title}")
        print(text_table(self.columns, self.rows))
        for note in self.notes:
            print(f"# {note}")
        sys.stdout.flush()

    def write(self, path: Path) -> None:
        """Write everything, and where and how it was made, as JSON."""
        path.write_text(json.dumps({**asdict(self), "made": made()}, indent=1) + "\n")


def read(path: Path) -> tuple[Result, dict[str, Any]] | None:
    """Return a result and how it was made; None if the file holds something else."""
    value = json.loads(path.read_text())
    if not isinstance(value, dict) or not {"name", "columns", "rows", "made"} <= value.keys():
        return None
    how = value.pop("made")
    plot = value.pop("plot")
    columns = [Column(**column) for column in value.pop("columns")]
    return Result(**value, columns=columns, plot=Lines(**plot) if plot else None), how


def spread(samples: Sequence[float]) -> Row:
    """Return {"median", "min", "p99", "samples"}; p99 is the largest of fewer than 100."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p99": ordered[int(0.99 * len(ordered))],
        "samples": len(ordered),
    }


def text_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table for the terminal, right-aligned."""
    lines = [[column.heading for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, cells, widths)) for cells in lines)


def markdown_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the same table as Markdown."""
    lines = [[column.heading for column in columns], ["---:"] * len(columns)]
    lines += [[column.cell(row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def made() -> dict[str, Any]:
    """Return where and how this process runs: what a figure needs to be believed, or repeated."""
    return {
        "command": command(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD")[:12] + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def command(argv: Sequence[str]) -> str:
    """Return what to type to repeat this, without where its result goes."""
    words = ["python", os.path.relpath(argv[0], ROOT)]
    rest = iter(argv[1:])
    for word in rest:
        if word == "--json":
            next(rest, None)
        elif not word.startswith("--json="):
            words.append(word)
    return shlex.join(words)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
