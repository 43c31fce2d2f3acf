"""Show: the commands that look at saved files: show, explain, diff and graph.

What a file holds in words, as figures, as pictures or as a page; why a parameter is where it is;
what differs between two plans; a step as boxes and arrows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotrain_compile import files
from cotrain_compile.cli.cluster import print_answer
from cotrain_compile.cli.figures import (
    difference_figures,
    plan_figures,
    step_figures,
    timeline_figures,
)
from cotrain_compile.cli.parameters import StepFile, refuse_outputs, with_those_beside
from cotrain_compile.cli.reading import (
    PlanMachine,
    Profile,
    Step,
    read_problem,
    read_step,
    step_beside,
)
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json, say_doing
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.machine import Machine
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.saved import load_measured, load_plan, load_timeline
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.viz.graph.drawing import as_text, write_picture
from cotrain_compile.viz.graph.picture import MOST_BOXES, picture
from cotrain_compile.viz.graph.picture import Level as BoxLevel
from cotrain_compile.viz.graph.rows import LayerRow, rows, rows_text, write_rows
from cotrain_compile.viz.text.describe import describe_machine, describe_step, describe_timeline
from cotrain_compile.viz.text.diff import describe_diff
from cotrain_compile.viz.text.summary import summary

if TYPE_CHECKING:
    from cotrain_compile.viz.specification import Specification


_READERS: Mapping[str, Callable[[Path], object]] = {
    "plan": load_plan,
    "dataflow": lambda path: files.load(path, Dataflow),
    "machine": lambda path: files.load(path, Machine),
    "timeline": load_timeline,
    "answer": lambda path: files.load(path, Answer),
}


def show(
    file: Annotated[
        Path, typer.Argument(help="A plan.json, step.json, machine.json or cluster-plan.json.")
    ],
    timeline: Annotated[
        Path | None, typer.Option(help="Also draw the timeline of a plan into this PNG file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write the report of a plan into this HTML file.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Also write its trace into this file, for https://ui.perfetto.dev."),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            help="A measured timeline.json to show beside it. Repeat it for several ranks."
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="A sweep.json of the step, so that --html says what memory buys."),
    ] = None,
    profiled: Annotated[
        Path | None,
        typer.Option(help="A trace of that step by torch.profiler, to add to --perfetto."),
    ] = None,
    step: Step = None,
    machine: PlanMachine = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Say in words what a file holds; draw it, or write a report."""
    refuse_outputs(
        {"--timeline": timeline, "--html": html, "--perfetto": perfetto},
        (*with_those_beside(file), *(measured or ()), sweep, profiled, step, machine, profile),
    )
    keep_stdout_for(as_json, timeline, html, perfetto)
    value: object = _READERS[_kind_of(file)](file)
    if as_json:
        print_json(_figures(value))
    elif isinstance(value, Answer):
        print_answer(value)
    else:
        console.print(_describe(value, file))
    if timeline is not None:
        _draw(value, file, timeline)
        console.print(f"drew {timeline}")
    if perfetto is not None:
        _write_trace(perfetto, value, file, measured or (), profiled)
        console.print(f"wrote {perfetto}")
    if html is not None:
        plan = _plan_for(value, file, "--html")
        problem = read_problem(plan, file, step, machine, profile)
        _write_report(html, problem, plan, measured or (), sweep)
        console.print(f"wrote {html}")


def _kind_of(file: Path) -> str:
    """The kind of document in `file`. Raises `FormatError` when it is none of ours."""
    kind = files.kind_of(file)
    if kind not in _READERS:
        found = f"kind is {kind!r}" if kind else "it does not say what kind it is"
        raise FormatError(f"{file}: {found}; show reads {', '.join(_READERS)}")
    return kind


def _figures(value: object) -> object:
    match value:
        case Plan():
            return plan_figures(value)
        case Dataflow():
            return step_figures(value)
        case Timeline():
            return timeline_figures(value)
        case Answer():
            return value.figures()
        case _:
            return value


def _describe(value: object, file: Path) -> str:
    match value:
        case Plan():
            return summary(value, step_beside(file, value))
        case Dataflow():
            return describe_step(value)
        case Machine():
            return describe_machine(value)
        case _:
            assert isinstance(value, Timeline)
            return describe_timeline(value)


def _draw(value: object, file: Path, picture: Path) -> None:
    from cotrain_compile.viz.timeline import draw_timelines

    if not isinstance(value, Timeline | Plan):
        raise OptionError(f"{file} has no timeline; give --timeline with a plan.json")
    draw_timelines(_specified(value, file), picture)


def _specified(
    value: Timeline | Plan, file: Path, measured: Sequence[Timeline] = ()
) -> Specification:
    from cotrain_compile.viz.specification import specify

    if isinstance(value, Timeline):
        return specify([value, *measured])
    return specify([value.predicted, *measured], value, step_beside(file, value))


def _write_trace(
    path: Path, value: object, file: Path, measured: Sequence[Path], profiled: Path | None
) -> None:
    from cotrain_compile.viz.perfetto import save_trace

    drawn = value if isinstance(value, Timeline) else _plan_for(value, file, "--perfetto")
    save_trace(_specified(drawn, file, load_measured(measured)), path, profiled=profiled)


def _plan_for(value: object, file: Path, option: str) -> Plan:
    if not isinstance(value, Plan):
        raise OptionError(f"{file} is no plan; give {option} with a plan.json")
    return value


def _write_report(
    path: Path, problem: Problem, plan: Plan, measured: Sequence[Path], sweep: Path | None
) -> None:
    from cotrain_compile.placement.explain.sweep import Sweep
    from cotrain_compile.viz.report.page import write_report

    found = files.load(sweep, Sweep) if sweep else None
    if found is not None and found.fingerprint != plan.fingerprint:
        raise OptionError(f"--sweep {sweep} is of another step than the plan")
    write_report(path, problem, plan, load_measured(measured), found.points if found else ())


def explain(
    file: Annotated[Path, typer.Argument(help="plan.json.")],
    param: Annotated[str, typer.Argument(help="A parameter, as layers.17.mlp.weight.")],
    step: Step = None,
    machine: PlanMachine = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Say why a parameter is where it is, and what the step would take with it kept otherwise."""
    from cotrain_compile.placement.explain.explain import explain as explained

    keep_stdout_for(as_json)
    with console.status("reading") as status:

        def tell(doing: str) -> None:
            status.update(doing)
            say_doing(doing)

        plan = load_plan(file)
        problem = read_problem(plan, file, step, machine, profile)
        said = explained(problem, plan, param, progress=tell)
    if as_json:
        print_json(said)
    else:
        console.print(str(said))


def diff(
    before: Annotated[Path, typer.Argument(help="plan.json.")],
    after: Annotated[Path, typer.Argument(help="plan.json to compare with it.")],
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Say what differs between two plans, and what that does to time and memory."""
    old, new = load_plan(before), load_plan(after)
    dataflow = read_step(old, before, step) if step else step_beside(before, old)
    if as_json:
        print_json(difference_figures(old, new))
        return
    console.print(describe_diff(old, new, dataflow))


class GraphLevel(StrEnum):
    """How far a step is folded."""

    KIND = "kind"
    MODEL = "model"
    LAYER = "layer"
    OP = "op"


_BOXED: Mapping[GraphLevel, BoxLevel] = {
    GraphLevel.MODEL: "model",
    GraphLevel.LAYER: "layer",
    GraphLevel.OP: "op",
}


def graph(
    file: StepFile,
    plan: Annotated[
        Path | None, typer.Option(help="Draw the step as this plan.json places it.")
    ] = None,
    level: Annotated[
        GraphLevel | None,
        typer.Option(
            help="kind: a row for each kind of layers, with what the plan does to it as marks. "
            "Else boxes and arrows: a box is a phase of the model, a layer or an op. "
            "Default: kind; layer with --layer, --boxes or a .dot."
        ),
    ] = None,
    layer: Annotated[
        str, typer.Option(help="Open this layer, as model.layers.3; at level op, show all its ops.")
    ] = "",
    boxes: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Fold layers until there are at most so many boxes; default: {MOST_BOXES}."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .txt, .dot or .svg to write; default: print it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a step: its kinds of layers, and what a plan offloads, recomputes, splits, updates."""
    keep_stdout_for(as_json, output)
    refuse_outputs({"--output": output}, (file, plan))
    placed = load_plan(plan) if plan else None
    dataflow = read_step(placed, plan, file) if placed and plan else files.load(file, Dataflow)
    is_dot = output is not None and output.suffix == ".dot"
    level = level or (GraphLevel.LAYER if layer or boxes or is_dot else GraphLevel.KIND)
    if level is GraphLevel.KIND:
        _draw_rows(rows(dataflow, placed), output, as_json=as_json)
        return
    most = boxes or MOST_BOXES
    drawn = picture(dataflow, placed, level=_BOXED[level], layer=layer, most_boxes=most)
    if as_json:
        print_json(drawn)
    elif output is None:
        console.print(as_text(drawn))
    if output is not None:
        write_picture(drawn, output)
        console.print(f"wrote {output}: {len(drawn.boxes)} boxes, {len(drawn.arrows)} arrows")


def _draw_rows(drawn: Sequence[LayerRow], output: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(drawn)
    elif output is None:
        console.print(rows_text(drawn))
    if output is not None:
        write_rows(drawn, output)
        console.print(f"wrote {output}: {len(drawn)} kinds of layers")
