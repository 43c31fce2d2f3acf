"""Dump: a compiled step as a folder of files to read."""

from __future__ import annotations

from pathlib import Path

from cotrain_compile import files
from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.graph import StepGraph
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan
from cotrain_compile.viz.graph.drawing import write_picture
from cotrain_compile.viz.graph.picture import picture
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.specification import specify
from cotrain_compile.viz.text.summary import summary


def dump_step(
    folder: Path,
    step: StepGraph,
    problem: Problem,
    plan: Plan,
    placed: StepGraph,
    profile: CostTable | None = None,
) -> None:
    """Write graphs, dataflow, machine and plan, and its summary, report and trace into `folder`.

    Also the `profile` that it was planned with, if any, so that the folder is all that a reader of
    the plan needs.
    """
    # Bokeh takes a while to import, and is needed for dumps alone.
    from cotrain_compile.viz.report.page import write_report

    dataflow = problem.dataflow
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(folder / "captured.py.txt", step.text())
    files.write_whole(folder / "placed.py.txt", placed.text())
    files.write_whole(folder / "summary.txt", summary(plan, dataflow) + "\n")
    files.save(problem.step, folder / "step.json")
    files.save(plan, folder / "plan.json")
    files.save(problem.machine, folder / "machine.json")
    if profile is not None:
        files.save(profile, folder / "profile.json")
    save_trace(specify([plan.predicted], plan, dataflow), folder / "predicted.trace.json")
    write_picture(picture(dataflow, plan), folder / "placed.dot")
    write_report(folder / "report.html", problem, plan)
