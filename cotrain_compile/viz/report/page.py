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
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import COLOURS
from cotrain_compile.viz.report import facts
from cotrain_compile.viz.report.bars import bars_of, kinds_in
from cotrain_compile.viz.report.charts import lanes_chart, memory_chart, time_axis
from cotrain_compile.viz.report.parameters import parameter_rows


def write_report(
    path: Path, problem: Problem, plan: Plan, measured: Sequence[Timeline] = ()
) -> None:
    """Write the report of `plan`, made for `problem`, beside what a step `measured`, to `path`.

    On several ranks it measured a timeline on each; the longest stands for the step.

    Raises OSError when `path` cannot be written.
    """
    write_whole(path, report_html(problem, plan, measured))


def report_html(problem: Problem, plan: Plan, measured: Sequence[Timeline] = ()) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("cotrain_compile.viz.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    script, charts, kinds = _charts(problem, plan, measured)
    library = Resources(mode="inline", components=["bokeh"], minified=True)
    return environment.get_template("page.html").render(
        plan=plan,
        measured=measured,
        measured_s=max((timeline.makespan_s for timeline in measured), default=0.0),
        regime=facts.regime(problem, plan),
        sentences=list(facts.sentences(problem, plan)),
        paces=facts.paces(plan),
        comparison=list(facts.comparison(problem, plan, measured)),
        peak=facts.peak(problem, plan),
        rows=parameter_rows(problem, plan),
        charts=charts,
        kinds={kind: colour for kind, colour in COLOURS.items() if kind in kinds},
        library=Markup(library.render_js()),
        script=Markup(script),
        tiers=list(Tier),
    )


def _charts(
    problem: Problem, plan: Plan, measured: Sequence[Timeline]
) -> tuple[str, Mapping[str, Any], set[str]]:
    """The script that draws the charts, the place of each, and the kinds of bars in them."""
    problem = problem.under(plan.placement)
    timelines = [plan.predicted, *measured]
    # The ranks of a step have one zero.
    zeros = [_start_s([plan.predicted]), *[_start_s(measured)] * len(measured)]
    axis = time_axis(max(map(_end_s, timelines, zeros)))
    figures: dict[str, Model] = {}
    kinds = set[str]()
    for timeline, zero_s in zip(timelines, zeros, strict=True):
        bars = bars_of(timeline, plan, problem.dataflow, zero_s)
        kinds |= kinds_in(bars)
        figures[timeline.title] = lanes_chart(timeline.title, bars, axis)
    for tier in Tier:
        figures[tier.value] = memory_chart(tier, timelines, plan.budgets[tier], axis)
    script, places = components(figures)
    return script, {name: Markup(place) for name, place in places.items()}, kinds


def _start_s(timelines: Sequence[Timeline]) -> float:
    return min((span.start_s for t in timelines for span in t.spans), default=0.0)


def _end_s(timeline: Timeline, zero_s: float) -> float:
    return max((span.end_s for span in timeline.spans), default=zero_s) - zero_s
