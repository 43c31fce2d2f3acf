"""Charts: timelines and memory as Bokeh figures on one time axis. Bars in, figures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    HoverTool,
    PanTool,
    Range1d,
    ResetTool,
    WheelZoomTool,
)
from bokeh.models.annotations import Span
from bokeh.models.glyphs import Quad
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Timeline
from cotrain_compile.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, LANE_TITLES
from cotrain_compile.viz.report.bars import Bar, merged

# Single bars are drawn while at most about so many are in view.
DRAWN = 2500
BUDGET, PREDICTED, MEASURED = "#C4314B", "#0072B2", "#E69F00"
_SWITCH = """
const near = axis.end - axis.start < below;
single.visible = near;
whole.visible = !near;
"""
_TIMES = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# From below; that of the network, where it has one, is under all others.
_ROWS = {str(lane): 3 - number for number, lane in enumerate(LANE_TITLES)}


@dataclass(frozen=True)
class TimeAxis:
    """What all charts have in common: a range, in a `unit` that is `unit_s` seconds long."""

    range: Range1d
    unit: str
    unit_s: float


def time_axis(end_s: float) -> TimeAxis:
    """From 0 to `end_s`."""
    end_s = end_s or 1.0
    unit_s, unit = next((u for u in _TIMES if end_s >= u[0]), _TIMES[-1])
    end = end_s / unit_s
    extent = Range1d(start=0, end=1.01 * end, bounds=(-0.02 * end, 1.1 * end), name="time")
    return TimeAxis(extent, unit, unit_s)


def lanes_chart(name: str, bars: Sequence[Bar], axis: TimeAxis) -> figure:
    """The bars of one timeline, a row for each lane; merged where they are many."""
    chart = _figure(name, axis, height=230)
    used = {bar.lane for bar in bars}
    rows = {lane: row for lane, row in _ROWS.items() if row >= 0 or lane in used}
    chart.y_range = Range1d(start=min(rows.values()) - 0.6, end=max(rows.values()) + 0.6)
    chart.yaxis.ticker = list(rows.values())
    chart.yaxis.major_label_overrides = {row: LANE_TITLES[lane] for lane, row in rows.items()}
    chart.ygrid.visible = False
    single = _draw_bars(chart, bars, axis)
    if len(bars) > DRAWN:
        whole = _draw_bars(chart, merged(bars), axis)
        single.visible = False
        single.name, whole.name = "each", "merged"
        below = DRAWN / len(bars) * max(bar.end_s for bar in bars) / axis.unit_s
        switch = CustomJS(
            args={"axis": axis.range, "single": single, "whole": whole, "below": below},
            code=_SWITCH,
        )
        axis.range.js_on_change("end", switch)
        axis.range.js_on_change("start", switch)
    return chart


def memory_chart(
    tier: Tier, timelines: Sequence[Timeline], budget_bytes: int, axis: TimeAxis
) -> figure:
    """Bytes alive on `tier` over time in each timeline, with the budget as a line."""
    peaks = [timeline.peak_bytes.get(tier, 0) for timeline in timelines]
    # A budget far above what is used would flatten the curve: it is then named in the title alone.
    near = budget_bytes <= 3 * max(peaks, default=0)
    top = max(*peaks, budget_bytes if near else 0, 1)
    scale, unit = next((u for u in _UNITS if top >= u[0]), (1, "B"))
    chart = _figure(f"{tier.value}-memory", axis, height=190)
    chart.y_range = Range1d(start=0, end=1.15 * top / scale)
    chart.yaxis.axis_label = unit
    for timeline in timelines:
        _draw_memory(chart, tier, timeline, axis, scale)
    if near:
        line = Span(
            location=budget_bytes / scale, dimension="width", line_color=BUDGET, line_width=1.5
        )
        line.line_dash = "dashed"
        chart.add_layout(line)
    return chart


def _figure(name: str, axis: TimeAxis, *, height: int) -> figure:
    zoom = BoxZoomTool(dimensions="width")
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    chart = figure(
        name=name,
        x_range=axis.range,
        height=height,
        sizing_mode="stretch_width",
        tools=[zoom, PanTool(dimensions="width"), wheel, ResetTool()],
        active_drag=zoom,
        active_scroll=wheel,
        toolbar_location="above",
        output_backend="canvas",
        min_border_left=96,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0.15,
    )
    chart.toolbar.logo = None
    chart.xaxis.axis_label = f"{axis.unit} since the start of the step"
    chart.grid.grid_line_alpha = 0.25
    return chart


def _draw_bars(chart: figure, bars: Sequence[Bar], axis: TimeAxis) -> GlyphRenderer[Quad]:
    """One quad for each bar; what is equal in many is sent once, as an index."""
    texts: dict[str, int] = {}

    def index(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = np.array([_ROWS[bar.lane] for bar in bars])
    source = ColumnDataSource(
        {
            "left": np.array([bar.start_s for bar in bars]) / axis.unit_s,
            "right": np.array([bar.end_s for bar in bars]) / axis.unit_s,
            "bottom": rows - 0.38,
            "top": rows + 0.38,
            "colour": [COLOURS[bar.kind] for bar in bars],
            "name": [_name(bar) for bar in bars],
            "where": np.array([index(f"{bar.kind}, {bar.layer}") for bar in bars], np.int32),
            "what": np.array([index(_what(bar)) for bar in bars], np.int32),
            "lasts": [format_seconds(bar.busy_s) for bar in bars],
        }
    )
    drawn = chart.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        fill_color="colour",
        line_color="colour",
        line_width=0.5,
        source=source,
    )
    lookup = CustomJSHover(args={"texts": list(texts)}, code="return texts[value]")
    hover = HoverTool(
        renderers=[drawn],
        tooltips=[
            ("", "@name"),
            ("what", "@what{custom}"),
            ("in", "@where{custom}"),
            ("works", "@lasts"),
            ("from", f"@left{{0.000[000]}} {axis.unit}"),
            ("to", f"@right{{0.000[000]}} {axis.unit}"),
        ],
        formatters={"@what": lookup, "@where": lookup},
    )
    chart.add_tools(hover)
    return drawn


def _name(bar: Bar) -> str:
    return bar.name if bar.count == 1 else f"{bar.count} one after the other"


def _what(bar: Bar) -> str:
    return bar.what if bar.count == 1 else "zoom in to see each"


def _draw_memory(chart: figure, tier: Tier, timeline: Timeline, axis: TimeAxis, scale: int) -> None:
    points = timeline.memory.get(tier, ()) or ((0.0, timeline.peak_bytes.get(tier, 0)),)
    points = (*points, (max(timeline.makespan_s, points[-1][0]), points[-1][1]))
    colour = PREDICTED if timeline.source == "predicted" else MEASURED
    source = ColumnDataSource(
        {
            "time": np.array([seconds for seconds, _ in points]) / axis.unit_s,
            "amount": np.array([nbytes / scale for _, nbytes in points]),
            "words": [format_bytes(nbytes) for _, nbytes in points],
        }
    )
    line = chart.step(
        "time", "amount", source=source, mode="after", line_color=colour, line_width=1.6
    )
    if timeline.source == "predicted":
        chart.varea_step(
            "time",
            0,
            "amount",
            source=source,
            step_mode="after",
            fill_color=colour,
            fill_alpha=0.18,
        )
    chart.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            line_policy="prev",
            tooltips=[(timeline.title, "@words"), ("at", f"@time{{0.000[000]}} {axis.unit}")],
        )
    )
