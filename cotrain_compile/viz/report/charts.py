"""Charts: panels as Bokeh figures on one time axis. A specification in, figures out.

Every colour comes twice, for a light page and a dark one, as two tags of the model that has it; the
page's script takes one of them, as a canvas knows no style sheet.

A step of 15,000 ops has more bars than a screen has pixels. What runs one after the other on a
lane, in one layer and of one kind, is one bar until the reader zooms in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    HoverTool,
    LinearColorMapper,
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
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, DARK, MEMORY_KINDS
from cotrain_compile.viz.specification import Bar, MemoryCurve, Panel

# Bars of one layer with less than this part of the step between them are merged.
JOINED = 1 / 1000


def merged(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """`bars`, those of one lane, layer and kind that all but touch made one."""
    gap_s = JOINED * max((bar.end_s for bar in bars), default=0.0)
    result: list[Bar] = []
    for bar in bars:
        last = result[-1] if result else None
        if last is not None and _alike(last, bar) and bar.start_s - last.end_s <= gap_s:
            result[-1] = replace(
                last,
                end_s=max(last.end_s, bar.end_s),
                busy_s=last.busy_s + bar.busy_s,
                count=last.count + bar.count,
                nbytes=last.nbytes + bar.nbytes,
            )
        else:
            result.append(bar)
    return tuple(result)


def _alike(one: Bar, other: Bar) -> bool:
    return (one.lane, one.layer, one.kind) == (other.lane, other.layer, other.kind)


# Single bars are drawn while at most about so many are in view.
DRAWN = 2500
# On a light page and on a dark one.
BUDGET, PREDICTED, MEASURED = ("#C4314B", "#FF8A9B"), ("#0A4F80", "#8FD0F5"), ("#A04000", "#F5884A")
CARD = ("#FFFFFF", "#1C2024")  # what charts are drawn on
_KINDS = {kind: number for number, kind in enumerate(COLOURS)}
_SWITCH = """
const near = axis.end - axis.start < below;
single.visible = near;
whole.visible = !near;
"""
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


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


def lanes_chart(panel: Panel, axis: TimeAxis) -> figure:
    """The bars of one timeline, a row for each lane; merged where they are many."""
    bars = panel.bars
    # A server has six lanes a device: rows of many lanes are as low as their titles allow.
    row = max(18, min(48, 400 // len(panel.lanes)))
    chart = _figure(panel.title, axis, height=90 + row * len(panel.lanes))
    rows = {lane: len(panel.lanes) - 1 - number for number, lane in enumerate(panel.lanes)}
    chart.y_range = Range1d(start=-0.6, end=len(rows) - 0.4)
    chart.yaxis.ticker = list(rows.values())
    chart.yaxis.major_label_overrides = {rows[n]: title for n, title in panel.lanes.items()}
    chart.ygrid.visible = False
    single = _draw_bars(chart, bars, rows, axis)
    if len(bars) > DRAWN:
        whole = _draw_bars(chart, merged(bars), rows, axis)
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


def memory_chart(tier: Tier, panels: Sequence[Panel], budget_bytes: int, axis: TimeAxis) -> figure:
    """Bytes alive on `tier` over time in each timeline, by kind, with the budget as a line."""
    peaks = [panel.peak_bytes.get(tier, 0) for panel in panels]
    # A budget far above what is used would flatten the curve: it is then named in the title alone.
    near = budget_bytes <= 3 * max(peaks, default=0)
    top = max(*peaks, budget_bytes if near else 0, 1)
    scale, unit = next((u for u in _UNITS if top >= u[0]), (1, "B"))
    chart = _figure(f"{tier.value}-memory", axis, height=300 if tier is Tier.DEVICE else 220)
    chart.y_range = Range1d(start=0, end=1.1 * top / scale)
    chart.yaxis.axis_label = unit
    for panel in panels:
        _draw_memory(chart, tier, panel, axis, scale)
    if near:
        line = Span(location=budget_bytes / scale, dimension="width", line_width=1.5)
        line.line_dash, line.line_color, line.tags = "dashed", BUDGET[0], list(BUDGET)
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


def _draw_bars(
    chart: figure, bars: Sequence[Bar], rows: dict[str, int], axis: TimeAxis
) -> GlyphRenderer[Quad]:
    """One quad for each bar; what is equal in many is sent once, as an index into the tags."""
    texts: dict[str, int] = {}

    def index(text: str) -> int:
        return texts.setdefault(text, len(texts))

    at = np.array([rows[bar.lane] for bar in bars])
    source = ColumnDataSource(
        {
            "left": np.array([bar.start_s for bar in bars]) / axis.unit_s,
            "right": np.array([bar.end_s for bar in bars]) / axis.unit_s,
            "bottom": at - 0.38,
            "top": at + 0.38,
            "kind": np.array([_KINDS[bar.kind] for bar in bars], np.int32),
            "name": np.array([index(_name(bar)) for bar in bars], np.int32),
            "where": np.array([index(f"{bar.kind}, {bar.layer}") for bar in bars], np.int32),
            "what": np.array([index(_what(bar)) for bar in bars], np.int32),
            "lasts": np.array([index(_lasts(bar)) for bar in bars], np.int32),
        }
    )
    source.tags = list(texts)
    palettes = [list(COLOURS.values()), list(DARK.values())]
    colours = LinearColorMapper(palette=palettes[0], low=-0.5, high=len(_KINDS) - 0.5)
    colours.tags = palettes
    drawn = chart.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        fill_color={"field": "kind", "transform": colours},
        line_color={"field": "kind", "transform": colours},
        line_width=0.5,
        nonselection_alpha=0.35,
        source=source,
    )
    lookup = CustomJSHover(args={"source": source}, code="return source.tags[value]")
    hover = HoverTool(
        renderers=[drawn],
        tooltips=[
            ("", "@name{custom}"),
            ("what", "@what{custom}"),
            ("in", "@where{custom}"),
            ("works", "@lasts{custom}"),
            ("from", f"@left{{0.000[000]}} {axis.unit}"),
            ("to", f"@right{{0.000[000]}} {axis.unit}"),
        ],
        formatters=dict.fromkeys(("@name", "@what", "@where", "@lasts"), lookup),
    )
    chart.add_tools(hover)
    return drawn


def _name(bar: Bar) -> str:
    return bar.name if bar.count == 1 else f"{bar.count} one after the other"


def _what(bar: Bar) -> str:
    if bar.count > 1:
        return "zoom in to see each"
    return bar.what if bar.span in (bar.name, "") else f"{bar.what} ({bar.span})"


def _lasts(bar: Bar) -> str:
    lasts = format_seconds(bar.busy_s)
    if not bar.nbytes:
        return lasts
    return f"{lasts}, {format_bytes(bar.nbytes)} at {bar.bytes_per_s / 1e9:.1f} GB/s"


def _draw_memory(chart: figure, tier: Tier, panel: Panel, axis: TimeAxis, scale: int) -> None:
    curve = _to_the_end(panel.memory[tier], panel, tier)
    ink = PREDICTED if panel.source == "predicted" else MEASURED
    columns = {
        "time": np.array(curve.times_s, np.float32) / np.float32(axis.unit_s),
        "amount": np.array(curve.total) / scale,
    }
    below = np.zeros(len(curve.times_s))
    for number, nbytes in enumerate(curve.by_kind.values()):
        columns[f"below{number}"] = below.astype(np.float32)
        below = below + np.array(nbytes) / scale
        columns[f"above{number}"] = below.astype(np.float32)
        columns[f"own{number}"] = np.array(nbytes, np.float64).astype(np.float32)
    source = ColumnDataSource(columns)
    for number, kind in enumerate(curve.by_kind):
        colours = [COLOURS[MEMORY_KINDS[kind]], DARK[MEMORY_KINDS[kind]]]
        drawn = chart.varea_step(
            "time",
            f"below{number}",
            f"above{number}",
            source=source,
            step_mode="after",
            fill_color=colours[0],
        )
        drawn.glyph.tags = colours
    if ink is MEASURED:  # over the areas of what is predicted
        edge = chart.step("time", "amount", source=source, mode="after", line_width=4)
        edge.glyph.line_color, edge.glyph.tags = CARD[0], list(CARD)
    line = chart.step("time", "amount", source=source, mode="after", line_width=1.6)
    line.glyph.line_color, line.glyph.tags = ink[0], list(ink)
    size = CustomJSHover(code=_SIZE)
    owns = [(kind, f"@own{number}{{custom}}") for number, kind in enumerate(curve.by_kind)]
    total = (panel.title, f"@amount{{0.0}} {_unit(scale)}")
    chart.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            line_policy="prev",
            tooltips=[total, *owns[::-1], ("at", f"@time{{0.000[000]}} {axis.unit}")],
            formatters=dict.fromkeys((f"@own{n}" for n in range(len(owns))), size),
        )
    )


_SIZE = """
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
let unit = 0;
while (value >= 1024 && unit < 4) { value /= 1024; unit += 1; }
return value.toFixed(unit ? 1 : 0) + " " + units[unit];
"""


def _unit(scale: int) -> str:
    return next((unit for nbytes, unit in _UNITS if nbytes == scale), "B")


def _to_the_end(curve: MemoryCurve, panel: Panel, tier: Tier) -> MemoryCurve:
    """The curve drawn to the end of the step; where there is none, its peak all the time."""
    if not curve.times_s:
        peak = panel.peak_bytes.get(tier, 0)
        return MemoryCurve((0.0, panel.makespan_s), (peak, peak), {})
    if curve.times_s[-1] >= panel.makespan_s:
        return curve
    return MemoryCurve(
        (*curve.times_s, panel.makespan_s),
        (*curve.total, curve.total[-1]),
        {kind: (*nbytes, nbytes[-1]) for kind, nbytes in curve.by_kind.items()},
    )
