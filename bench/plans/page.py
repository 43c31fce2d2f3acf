"""What `bench.plans.plans` found, as Markdown tables and as one picture a machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cotrain_compile.support.units import format_bytes, format_seconds

Row = Mapping[str, Any]

# Okabe and Ito's colours; one rule, one colour and one shape.
STYLES: Mapping[str, tuple[str, str, str]] = {
    "resident": ("all resident", "#000000", "*"),
    "zero-offload": ("ZeRO-Offload", "#E69F00", "s"),
    "coarse": ("CoTrain coarse", "#009E73", "D"),
    "fraction:auto": ("best fraction", "#CC79A7", "^"),
    "streamed": ("all streamed", "#D55E00", "v"),
}
OURS = "#0072B2"


def table(result: Mapping[str, Any]) -> str:
    """The section: what is gained in a few lines, and the largest models."""
    rows: Sequence[Row] = result["rows"]
    parts = [_summary(rows, result["host_budget"])]
    if result["largest"]:
        parts.append(_largest(result["largest"]))
    return "\n\n".join(parts) + "\n"


def _summary(rows: Sequence[Row], host_budget: str) -> str:
    planned = [row for row in rows if row["step_s"] is not None]
    moving = [row for row in planned if row["policy"] != "resident"]
    beside = [(row, best) for row in moving if (best := _best_rule(row)) is not None]
    ratios = [best / row["step_s"] for row, best in beside]
    gaps = [row["gap"] for row in moving if row["gap"] is not None]
    fits = [row for row in planned if row["policy"] == "resident"]
    overtaken = [row for row in fits if (_best_rule(row) or row["step_s"]) < row["step_s"]]
    lines = [
        f"{len(planned)} plans, {host_budget} of host memory. In {len(fits)} everything fits and "
        f"our plan moves nothing; a simple rule that moves something is faster in {len(overtaken)} "
        f"of them. In {len(moving) - len(beside)} something has to move and no simple rule fits.",
    ]
    if ratios:
        lines.append(
            f"In the other {len(ratios)} the fastest simple rule that fits takes "
            f"{statistics.median(ratios):.2f} times as long as our plan in the median, "
            f"{max(ratios):.2f} times at the most, {min(ratios):.2f} at the least."
        )
    if gaps:
        lines.append(
            f"Our plans are {statistics.median(gaps):.1%} above their certified bounds in the "
            f"median, {max(gaps):.0%} at worst, and took "
            f"{statistics.median(row['seconds'] for row in moving):.0f} s of processors to find in "
            f"the median, {max(row['seconds'] for row in moving):.0f} s at worst."
        )
    return "\n".join(lines)


def _best_rule(row: Row) -> float | None:
    return min((s for s in row["rules_s"].values() if isinstance(s, float)), default=None)


def _largest(entries: Iterable[Mapping[str, Any]]) -> str:
    """The largest of the models that trains at all, ours against each rule."""
    columns = ["machine", "host memory", "ours", *(style[0] for style in STYLES.values())]
    lines = []
    for entry in entries:
        models = entry["models"]
        names = [models[policy] or "none" for policy in ("auto", *STYLES)]
        lines.append([entry["machine"], format_bytes(entry["host_bytes"]), *names])
    return "The largest model that trains in all of the device's memory:\n\n" + _markdown(
        columns, lines
    )


def _markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `plans-MACHINE.png` for each machine into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for machine in dict.fromkeys(row["machine"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["machine"] == machine]
        paths.append(folder / f"plans-{machine}.png")
        _figure(machine, rows).savefig(paths[-1], dpi=110, facecolor="white")
    return paths


def _figure(machine: str, rows: Sequence[Row]) -> Figure:
    """A line for each step and budget: what everyone takes, as a multiple of our plan."""
    found = [row for row in rows if row["step_s"] is not None]
    figure = Figure(figsize=(10, 1.7 + 0.33 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for policy, (label, colour, shape) in STYLES.items():
        # ZeRO-Offload and coarse are often equal: the larger mark stays visible under the other.
        size = 9 if policy in ("zero-offload", "resident") else 6
        points = [
            (row["rules_s"][policy] / row["step_s"], y)
            for y, row in enumerate(found)
            if isinstance(row["rules_s"].get(policy), float)
        ]
        axes.plot(*_columns(points), shape, color=colour, label=label, markersize=size)
    axes.axvline(1.0, color=OURS, linewidth=1.2, label="our plan", zorder=0)
    bounds = [(1 / (1 + row["gap"]), y) for y, row in enumerate(found) if row["gap"] is not None]
    axes.plot(*_columns(bounds), "|", color=OURS, label="certified bound", markersize=12)
    for y, row in enumerate(found):
        if _best_rule(row) is None:
            axes.annotate("no simple rule fits", (1.0, y), (8, -3), textcoords="offset points")
    _finish(axes, found)
    figure.suptitle(f"Simulated steps on {machine}")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(axes: Axes, rows: Sequence[Row]) -> None:
    labels = [
        f"{row['model']} in {format_bytes(row['budget_bytes'])}, {format_seconds(row['step_s'])}"
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(right=max(2.0, axes.get_xlim()[1]))
    axes.set_xlabel("times as long as our plan; less is faster")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
