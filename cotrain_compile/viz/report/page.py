"""Page: puts the report together and writes it: one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.model import Model
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cotrain_compile.files import write_whole
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.explain.sweep import Point
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.graph.rows import rows, rows_svg
from cotrain_compile.viz.kinds import COLOURS, MEMORY_KINDS, css_property, palettes_css
from cotrain_compile.viz.report import facts
from cotrain_compile.viz.report.charts import lanes_chart, memory_chart, time_axis
from cotrain_compile.viz.report.facts import groups, parameter_rows
from cotrain_compile.viz.specification import Specification, specify
from cotrain_compile.viz.text.verdict import verdict


def write_report(
    path: Path,
    problem: Problem,
    plan: Plan,
    measured: Sequence[Timeline] = (),
    points: Sequence[Point] = (),
) -> None:
    """Write the report of `plan`, made for `problem`, beside what a step `measured`, to `path`.

    On several ranks it measured a timeline on each; the longest stands for the step. `points` are
    those of a sweep over the same step, which say what more memory buys.

    Raises OSError when `path` cannot be written.
    """
    write_whole(path, report_html(problem, plan, measured, points))


def report_html(
    problem: Problem,
    plan: Plan,
    measured: Sequence[Timeline] = (),
    points: Sequence[Point] = (),
) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("cotrain_compile.viz.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "property": css_property,
        "breakable": _breakable,
        "plan_words": plan_words,
        "upper_first": lambda text: text[:1].upper() + text[1:],
    }
    drawn = specify([plan.predicted, *measured], plan, problem.dataflow)
    script, charts = _charts(drawn)
    library = Resources(mode="inline", components=["bokeh"], minified=True)
    return environment.get_template("page.html").render(
        plan=plan,
        heading=drawn.heading,
        measured=measured,
        first=verdict(problem, plan, measured, points),
        bound=facts.bound(problem, plan, measured),
        sentences=list(facts.sentences(problem, plan, measured)),
        paces=facts.paces(plan),
        comparison=list(facts.comparison(problem, plan, measured)),
        peak=facts.peak(problem, plan),
        groups=groups(parameter_rows(problem, plan)),
        charts=charts,
        layers=Markup(rows_svg(rows(problem.dataflow, plan))),
        kinds=[kind for kind in COLOURS if any(kind in panel.kinds for panel in drawn.panels)],
        memory_kinds=_memory_kinds(drawn),
        palettes=palettes_css(),
        library=Markup(library.render_js()),
        script=Markup(script),
        tiers=list(MEMORIES),
    )


def _breakable(name: str) -> Markup:
    """A dotted name that may go on in the next line behind its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _memory_kinds(drawn: Specification) -> Mapping[str, str]:
    """What lies in the memories that are drawn, and the property that has its colour."""
    curves = [curve for panel in drawn.panels for curve in panel.memory.values()]
    shown = {kind for curve in curves for kind in curve.by_kind}
    return {kind: css_property(of) for kind, of in MEMORY_KINDS.items() if kind in shown}


def _charts(drawn: Specification) -> tuple[str, Mapping[str, Any]]:
    """The script that draws the charts, and the place of each."""
    axis = time_axis(drawn.end_s)
    figures: dict[str, Model] = {panel.title: lanes_chart(panel, axis) for panel in drawn.panels}
    for tier in MEMORIES:
        figures[tier.value] = memory_chart(tier, drawn.panels, drawn.budgets[tier], axis)
    script, places = components(figures)
    return script, {name: Markup(place) for name, place in places.items()}
