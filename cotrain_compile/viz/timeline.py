"""Timeline: pictures of what a step does when. Timelines in, PNG out.

A picture has one row of bars for each lane and the memory of the device below, with the budget;
several timelines (predicted and measured) are drawn above one another on one time axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Timeline
from cotrain_compile.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, lane_titles, spans_with_kinds

# A bar narrower than this part of the axis would be invisible.
_NARROWEST = 1 / 1500


def draw_timelines(
    timelines: Sequence[Timeline],
    path: Path,
    *,
    kinds: Mapping[str, str] | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Write a PNG of `timelines`, one above the other; `kinds` from `kinds_of` chooses colours.

    Raises OSError when `path` cannot be written.
    """
    figure = Figure(figsize=(13, 4.6 * len(timelines) + 0.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * len(timelines), 1, height_ratios=[3, 2] * len(timelines))
    end_s = max(timeline.makespan_s for timeline in timelines)
    shown: set[str] = set()
    for number, timeline in enumerate(timelines):
        lanes, memory = grid[2 * number], grid[2 * number + 1]
        shown |= _draw_lanes(lanes, timeline, kinds or {}, end_s)
        _draw_memory(memory, timeline, budget_bytes)
        lanes.tick_params(labelbottom=False)
        for axes in (lanes, memory):
            axes.set_xlim(0, end_s * 1.005 or 1)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: _ticked(format_seconds(s))))
            axes.spines[["top", "right"]].set_visible(False)
        memory.set_xlabel("time since the start of the step")
    legend = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in shown]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), frameon=False)
    figure.savefig(path)


def _draw_lanes(axes: Axes, timeline: Timeline, kinds: Mapping[str, str], end_s: float) -> set[str]:
    """Draw the bars, top lane first; returns the kinds that occur."""
    start_s = min((span.start_s for span in timeline.spans), default=0.0)
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span, kind in spans_with_kinds(timeline, kinds):
        width = max(span.end_s - span.start_s, end_s * _NARROWEST)
        bar = (span.start_s - start_s, width)
        bars.setdefault((str(span.lane), kind), []).append(bar)
    titles = lane_titles(timeline)
    rows = {str(lane): len(titles) - 1 - n for n, lane in enumerate(titles)}
    for (lane, kind), stretches in bars.items():
        axes.broken_barh(stretches, (rows[lane] - 0.36, 0.72), color=COLOURS[kind], linewidth=0)
    makespan_s = timeline.makespan_s or 1.0
    labels = [
        f"{title}\n{timeline.busy_s(lane) / makespan_s:.0%} busy" for lane, title in titles.items()
    ]
    axes.set_yticks([rows[str(lane)] for lane in titles], labels)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    title = f"{timeline.source}: {format_seconds(timeline.makespan_s)} a step"
    axes.set_title(title, loc="left", fontweight="bold")
    return {kind for _, kind in bars}


def _draw_memory(axes: Axes, timeline: Timeline, budget_bytes: int | None) -> None:
    """The device's memory over time, or its peak where the timeline has no curve."""
    peak = timeline.peak_bytes.get(Tier.DEVICE, 0)
    points = timeline.memory.get(Tier.DEVICE, ())
    if points:
        seconds, nbytes = zip(*points, strict=True)
        axes.fill_between(seconds, nbytes, step="post", color="#56B4E9", alpha=0.45, linewidth=0)
        axes.step(seconds, nbytes, where="post", color="#0072B2", linewidth=1)
    else:
        axes.text(0.01, 0.08, "only the peak was recorded", transform=axes.transAxes, color="0.4")
    axes.axhline(peak, color="#0072B2", linestyle=":", linewidth=1.2)
    _label(axes, peak, f"peak {format_bytes(peak)}", "#0072B2", below=True)
    if budget_bytes is not None:
        axes.axhline(budget_bytes, color="#B00020", linestyle="--", linewidth=1.2)
        _label(axes, budget_bytes, f"budget {format_bytes(budget_bytes)}", "#B00020", below=False)
    top = max(peak, budget_bytes or 0, 1)
    axes.set_ylim(0, top * 1.25)
    axes.yaxis.set_major_locator(MultipleLocator(2 ** (top.bit_length() - 2)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: _ticked(format_bytes(nbytes))))
    axes.set_ylabel("device memory")


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
