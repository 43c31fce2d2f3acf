"""Sweep: the points of a sweep as a table, as a picture (PNG, SVG) and as an HTML page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
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
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS, palettes_css
from cotrain_compile.viz.specification import job_words

HEADINGS = (
    "machine",
    "sizes",
    "device budget",
    "a step",
    "each GiB",
    "above bound",
    "limited by",
    "traffic",
    "solver",
)
REGIMES: Mapping[str, str] = {
    FITS: "nothing, all fits",
    Lane.DEVICE: "device compute",
    Lane.HOST: "updates on the host",
    Lane.D2H: "link down",
    Lane.H2D: "link up",
    Lane.NETWORK: "network",
    Lane.DISK_READ: "reads from disk",
    Lane.DISK_WRITE: "writes to disk",
}
# By machine; the regime is the shape of a point. The page has each of them for the dark as well.
_KINDS = ("backward", "weight", "update on the host", "optimizer", "gradient", "forward")
_COLOURS = tuple(COLOURS[kind] for kind in _KINDS)
_SHAPES: Mapping[str, str] = {
    FITS: "*",
    Lane.DEVICE: "o",
    Lane.HOST: "s",
    Lane.D2H: "v",
    Lane.H2D: "^",
    Lane.NETWORK: "D",
    Lane.DISK_READ: "p",
    Lane.DISK_WRITE: "P",
}
# Readable on white; the page sets its own.
_INK = "#5d6670"


def sweep_rows(sweep: Sweep) -> Iterator[tuple[str, ...]]:
    """One row for each point, as `HEADINGS` say: "each GiB" is what one more has bought since."""
    before: dict[object, Point] = {}
    for point in sweep.points:
        sizes = ", ".join(f"{name}={size}" for name, size in point.sizes.items())
        budget = format_bytes(point.device_budget_bytes)
        if point.step_s is None:
            lacks = f"{format_bytes(point.shortfall_bytes)} missing on the {point.shortfall_tier}"
            missing = f"does not fit: {lacks}"
            yield point.machine, sizes, budget, "", "", "", missing, "", ""
            continue
        alike = (point.machine, sizes, point.host_budget_bytes)
        bought = _bought(before.get(alike), point)
        before[alike] = point
        bound_s = point.lower_bound_s
        yield (
            point.machine,
            sizes,
            budget,
            format_seconds(point.step_s),
            bought,
            f"{point.step_s / bound_s - 1:.1%}" if bound_s else "",
            REGIMES[point.regime],
            format_bytes(point.traffic_bytes),
            "limit" if point.stopped_early else "",
        )


def _bought(less: Point | None, more: Point) -> str:
    """How much shorter a step is for each GiB that `more` has beyond `less`; "" where it is not."""
    if less is None or less.step_s is None or more.step_s is None:
        return ""
    gib = (more.device_budget_bytes - less.device_budget_bytes) / 2**30
    spared_s = less.step_s - more.step_s
    return f"-{format_seconds(spared_s / gib)}" if gib > 0 and spared_s > 0 else ""


def sweep_table(sweep: Sweep) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows, without columns in which nothing is."""
    rows = list(sweep_rows(sweep))
    used = [n for n in range(len(HEADINGS)) if any(row[n] for row in rows)]
    return tuple(HEADINGS[n] for n in used), [tuple(row[n] for n in used) for row in rows]


def note(points: Sequence[Point]) -> str:
    """What of the points may not be the best, "" where all of them are."""
    early = sum(point.stopped_early for point in points)
    if not early:
        return ""
    return (
        f"The solver stopped at its limit for {early} of {len(points)} points, hollow in the "
        "picture: a larger --work-limit may find faster plans there."
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
    headings, rows = sweep_table(sweep)
    page = environment.get_template("sweep.html").render(
        title=title(sweep),
        fingerprint=sweep.fingerprint,
        headings=headings,
        bound=bound_name(sweep.points),
        note=note(sweep.points),
        rows=rows,
        palettes=palettes_css(),
        picture=_inline(svg.getvalue()),
    )
    write_whole(folder / "sweep.html", page)


def _inline(svg: str) -> Markup:
    """The picture within the page, in the page's colours, light or dark."""
    picture = svg[svg.index("<svg") :]
    colours = {colour: f"var(--{kind.replace(' ', '-')})" for kind, colour in COLOURS.items()}
    for colour, own in (*colours.items(), (_INK, "currentColor")):
        picture = picture.replace(colour.lower(), own)
    return Markup(picture)


def title(sweep: Sweep) -> str:
    """`LlamaForCausalLM, batch 4 × 2048, on rtx4090, 2026-11-24`: what is known."""
    machines = " and ".join(dict.fromkeys(_on(point) for point in sweep.points))
    parts = (job_words(sweep.job), f"on {machines}", date.today().isoformat())
    return ", ".join(filter(None, parts))


def _on(point: Point) -> str:
    return f"{point.machine}{point.rates.words}"


def draw_sweep(sweep: Sweep) -> Figure:
    """Step time against the device budget, and against each symbol that was given sizes."""
    symbols = sorted({name for point in sweep.points for name in point.sizes})
    figure = Figure(figsize=(9, 4.6 * (1 + len(symbols))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(symbols), 1, squeeze=False)[:, 0]
    figure.suptitle(title(sweep), x=0.01, ha="left", color=_INK)
    budgets = [point for point in sweep.points if not point.sizes] or sweep.points
    _draw(axes[0], budgets, None)
    for below, symbol in zip(axes[1:], symbols, strict=True):
        _draw(below, [point for point in sweep.points if symbol in point.sizes], symbol)
    return figure


def _draw(axes: Axes, points: Sequence[Point], symbol: str | None) -> None:
    """Points of each machine in its colour, shaped by their regime; what is proven between them.

    Hollow where the solver stopped early. The line of a machine says what its plans take at most.
    """
    fitting = [point for point in points if point.step_s is not None]
    machines = list(dict.fromkeys(point.machine for point in fitting))
    for number, machine in enumerate(machines):
        colour = _COLOURS[number % len(_COLOURS)]
        own = [point for point in fitting if point.machine == machine]
        own.sort(key=lambda point: _along(point, symbol))
        xs = [_along(point, symbol) for point in own]
        if symbol is None:  # a plan fits larger budgets too, a bound holds for smaller ones
            times = [point.step_s or 0.0 for point in own]
            axes.plot(xs, times, color=colour, linewidth=1.5, drawstyle="steps-post")
        bounds = [point.lower_bound_s or float("nan") for point in own]
        axes.plot(xs, bounds, color=colour, linewidth=1, linestyle=":", drawstyle="steps-pre")
        for x, point in zip(xs, own, strict=True):
            fill = "none" if point.stopped_early else colour
            shape = _SHAPES[point.regime]
            axes.plot(x, point.step_s or 0.0, shape, color=colour, mfc=fill, markersize=8)
    axes.set_xlabel("device budget, GiB" if symbol is None else symbol)
    axes.set_ylabel("step time, s")
    # No marker is cut off at the top.
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.grid(alpha=0.25, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(_INK)
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
    if any(point.stopped_early for point in fitting):
        said = "hollow: stopped at its limit"
        handles.append(Line2D([], [], color=_INK, marker="o", mfc="none", linestyle="", label=said))
    if name := bound_name(fitting):
        handles.append(Line2D([], [], color=_INK, linestyle=":", label=name))
    axes.legend(
        handles=handles,
        frameon=False,
        labelcolor=_INK,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=3,
    )


def bound_name(points: Sequence[Point]) -> str:
    """What the bound of these points may be called, of one step all; "" where none has any."""
    if not any(point.lower_bound_s for point in points):
        return ""
    unknown = max((point.unknown_ops for point in points), default=0)
    return f"bound without {unknown} ops of unknown cost" if unknown else "certified bound"


def _along(point: Point, symbol: str | None) -> float:
    return point.device_budget_bytes / (1 << 30) if symbol is None else point.sizes[symbol]
