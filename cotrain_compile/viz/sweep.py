"""Sweep: the points of a sweep as a table, as a picture (PNG, SVG) and as an HTML page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cotrain_compile.files import write_whole
from cotrain_compile.placement.explain.sweep import FITS, Point, Sweep
from cotrain_compile.plan import Lane
from cotrain_compile.units import format_bytes, format_seconds

HEADINGS = ("machine", "sizes", "device budget", "a step", "above bound", "limited by", "traffic")
REGIMES: Mapping[str, str] = {
    FITS: "nothing, all fits",
    Lane.DEVICE: "device compute",
    Lane.HOST: "updates on the host",
    Lane.D2H: "link down",
    Lane.H2D: "link up",
    Lane.NETWORK: "network",
}
# Okabe and Ito's colours, for machines; the regime is the shape of a point.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_SHAPES: Mapping[str, str] = {
    FITS: "*",
    Lane.DEVICE: "o",
    Lane.HOST: "s",
    Lane.D2H: "v",
    Lane.H2D: "^",
    Lane.NETWORK: "D",
}
# Readable on white and on black.
_INK = "#7d8590"


def sweep_rows(sweep: Sweep) -> Iterator[tuple[str, ...]]:
    """One row for each point, as `HEADINGS` say."""
    for point in sweep.points:
        sizes = ", ".join(f"{name}={size}" for name, size in point.sizes.items())
        budget = format_bytes(point.device_budget_bytes)
        if point.step_s is None:
            lacks = f"{format_bytes(point.shortfall_bytes)} missing on the {point.shortfall_tier}"
            missing = f"does not fit: {lacks}"
            yield point.machine, sizes, budget, "", "", missing, ""
            continue
        bound_s = point.lower_bound_s
        yield (
            point.machine,
            sizes,
            budget,
            format_seconds(point.step_s),
            f"{point.step_s / bound_s - 1:.1%}" if bound_s else "",
            REGIMES[point.regime],
            format_bytes(point.traffic_bytes),
        )


def write_pictures(sweep: Sweep, folder: Path) -> None:
    """Write sweep.png, sweep.svg and sweep.html into `folder`; OSError where that fails."""
    figure = draw_sweep(sweep)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120, facecolor="white")
    write_whole(folder / "sweep.png", png.getvalue())
    svg = io.StringIO()
    # Ids that do not change from run to run.
    with rc_context({"svg.hashsalt": sweep.fingerprint}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    write_whole(folder / "sweep.svg", svg.getvalue())
    environment = Environment(
        loader=PackageLoader("cotrain_compile.viz.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
    )
    page = environment.get_template("sweep.html").render(
        fingerprint=sweep.fingerprint,
        headings=HEADINGS,
        bound=bound_name(sweep.points),
        rows=list(sweep_rows(sweep)),
        picture=Markup(svg.getvalue()[svg.getvalue().index("<svg") :]),
    )
    write_whole(folder / "sweep.html", page)


def draw_sweep(sweep: Sweep) -> Figure:
    """Step time against the device budget, and against each symbol that was given sizes."""
    symbols = sorted({name for point in sweep.points for name in point.sizes})
    figure = Figure(figsize=(9, 4.6 * (1 + len(symbols))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(symbols), 1, squeeze=False)[:, 0]
    budgets = [point for point in sweep.points if not point.sizes] or sweep.points
    _draw(axes[0], budgets, None)
    for below, symbol in zip(axes[1:], symbols, strict=True):
        _draw(below, [point for point in sweep.points if symbol in point.sizes], symbol)
    return figure


def _draw(axes: Axes, points: Sequence[Point], symbol: str | None) -> None:
    """One line for each machine, with the shape of each point for its regime; bounds dashed."""
    fitting = [point for point in points if point.step_s is not None]
    machines = list(dict.fromkeys(point.machine for point in fitting))
    for number, machine in enumerate(machines):
        colour = _COLOURS[number % len(_COLOURS)]
        own = [point for point in fitting if point.machine == machine]
        own.sort(key=lambda point: _along(point, symbol))
        xs = [_along(point, symbol) for point in own]
        axes.plot(xs, [point.step_s or 0.0 for point in own], color=colour, linewidth=1.5)
        bounds = [point.lower_bound_s or float("nan") for point in own]
        axes.plot(xs, bounds, color=colour, linewidth=1, linestyle=":")
        for x, point in zip(xs, own, strict=True):
            axes.plot(x, point.step_s or 0.0, _SHAPES[point.regime], color=colour, markersize=8)
    axes.set_xlabel("device budget, GiB" if symbol is None else symbol)
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color(_INK)
    axes.tick_params(colors=_INK)
    handles = [
        Line2D([], [], color=_COLOURS[n % len(_COLOURS)], label=machine)
        for n, machine in enumerate(machines)
    ]
    if not fitting:
        axes.text(0.5, 0.5, "nothing fits", transform=axes.transAxes, ha="center", color=_INK)
        return
    seen = {point.regime for point in fitting}
    handles += [
        Line2D(
            [], [], color=_INK, marker=shape, linestyle="", label=f"limited by {REGIMES[regime]}"
        )
        for regime, shape in _SHAPES.items()
        if regime in seen
    ]
    handles.append(Line2D([], [], color=_INK, linestyle=":", label=bound_name(fitting)))
    axes.legend(handles=handles, frameon=False, labelcolor=_INK)


def bound_name(points: Sequence[Point]) -> str:
    """What the bound of these points may be called, of one step all."""
    unknown = max((point.unknown_ops for point in points), default=0)
    return f"bound without {unknown} ops of unknown cost" if unknown else "certified bound"


def _along(point: Point, symbol: str | None) -> float:
    return point.device_budget_bytes / (1 << 30) if symbol is None else point.sizes[symbol]
