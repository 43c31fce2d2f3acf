"""Timeline: the picture of a specification. PNG out.

A panel has one row of bars for each lane and the memory of the device below, by kind, with the
budget; several panels (predicted and measured) are above one another on one time axis.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from cotrain_compile.files import write_whole
from cotrain_compile.machine import Tier
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, MEMORY_KINDS
from cotrain_compile.viz.specification import MemoryCurve, Panel, Specification

# A bar narrower than this part of the axis would be invisible.
_NARROWEST = 1 / 1500
_LINE, _BUDGET = "#0A4F80", "#B00020"


def draw_timelines(drawn: Specification, path: Path) -> None:
    """Write a PNG of the panels, one above the other.

    Raises OSError when `path` cannot be written.
    """
    rows = [max(3.0, 0.75 * len(panel.lanes)) for panel in drawn.panels]
    heights = [height for row in rows for height in (row, 2.4)]
    figure = Figure(figsize=(13, 0.95 * sum(heights) + 0.9), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * len(drawn.panels), 1, height_ratios=heights)
    end_s = drawn.end_s
    for number, panel in enumerate(drawn.panels):
        lanes, memory = grid[2 * number], grid[2 * number + 1]
        _draw_lanes(lanes, panel, end_s)
        _draw_memory(memory, panel, drawn.budgets.get(Tier.DEVICE))
        lanes.tick_params(labelbottom=False)
        for axes in (lanes, memory):
            axes.set_xlim(0, end_s * 1.005 or 1)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: _ticked(format_seconds(s))))
            axes.spines[["top", "right"]].set_visible(False)
        memory.set_xlabel("time since the start of the step")
    figure.suptitle(drawn.heading, x=0.01, ha="left", fontweight="bold")
    shown = set[str]().union(*(panel.kinds for panel in drawn.panels))
    legend = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in shown]
    columns = -(-len(legend) // (1 + (len(legend) > 7)))
    figure.legend(handles=legend, loc="outside lower center", ncols=columns, frameon=False)
    image, suffix = BytesIO(), path.suffix.lstrip(".").lower()
    known = figure.canvas.get_supported_filetypes()
    figure.savefig(image, format=suffix if suffix in known else "png")
    write_whole(path, image.getvalue())


def _draw_lanes(axes: Axes, panel: Panel, end_s: float) -> None:
    """Draw the bars, top lane first."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for bar in panel.bars:
        width = max(bar.end_s - bar.start_s, end_s * _NARROWEST)
        bars.setdefault((bar.lane, bar.kind), []).append((bar.start_s, width))
    rows = {lane: len(panel.lanes) - 1 - n for n, lane in enumerate(panel.lanes)}
    for (lane, kind), stretches in bars.items():
        axes.broken_barh(stretches, (rows[lane] - 0.36, 0.72), color=COLOURS[kind], linewidth=0)
    labels = [f"{title}\n{panel.busy_share(n):.0%} busy" for n, title in panel.lanes.items()]
    axes.set_yticks([rows[lane] for lane in panel.lanes], labels)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(f"{panel.title}: {format_seconds(panel.makespan_s)} a step", loc="left")


def _draw_memory(axes: Axes, panel: Panel, budget_bytes: int | None) -> None:
    """The device's memory over time, or its peak where the timeline has no curve."""
    peak = panel.peak_bytes.get(Tier.DEVICE, 0)
    curve = panel.memory[Tier.DEVICE]
    if curve.times_s:
        _stack(axes, curve)
    else:
        axes.text(0.01, 0.08, "only the peak was recorded", transform=axes.transAxes, color="0.4")
    axes.axhline(peak, color=_LINE, linestyle=":", linewidth=1.2)
    _label(axes, peak, f"peak {format_bytes(peak)}", _LINE, below=True)
    if budget_bytes is not None:
        axes.axhline(budget_bytes, color=_BUDGET, linestyle="--", linewidth=1.2)
        _label(axes, budget_bytes, f"budget {format_bytes(budget_bytes)}", _BUDGET, below=False)
    top = max(peak, budget_bytes or 0, 1)
    axes.set_ylim(0, top * 1.25)
    axes.yaxis.set_major_locator(MultipleLocator(2 ** (top.bit_length() - 2)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: _ticked(format_bytes(nbytes))))
    axes.set_ylabel("device memory")


def _stack(axes: Axes, curve: MemoryCurve) -> None:
    """The kinds above one another, under the line of the total."""
    below = [0] * len(curve.times_s)
    for kind, nbytes in (curve.by_kind or {"": curve.total}).items():
        above = [a + b for a, b in zip(below, nbytes, strict=True)]
        colour = COLOURS[MEMORY_KINDS[kind]] if kind else "#9CC7E3"
        label = kind or None
        axes.fill_between(
            curve.times_s, below, above, step="post", color=colour, linewidth=0, label=label
        )
        below = above
    axes.step(curve.times_s, curve.total, where="post", color=_LINE, linewidth=0.8)
    if curve.by_kind:
        columns = len(curve.by_kind)
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), ncols=columns, frameon=False)


def _label(axes: Axes, height: float, text: str, colour: str, *, below: bool) -> None:
    axes.annotate(
        text,
        (0.995, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3 if below else 3),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
        color=colour,
    )


def _ticked(text: str) -> str:
    """A number on an axis: without the zeros that say nothing."""
    number, unit = text.split()
    return f"{float(number):g} {unit}" if float(number) else "0"
