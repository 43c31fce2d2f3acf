"""Report: what a finished demo shows and the files it leaves."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.train import StepResult
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.units import format_bytes, format_seconds
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.report.page import write_report
from cotrain_compile.viz.specification import specify
from cotrain_compile.viz.text.summary import summary
from cotrain_compile.viz.timeline import draw_timelines

ROWS = 10


def show_rules(console: Console, placed: CompiledStep) -> None:
    """What everything on the device, and each simple rule, needs there beside the budget."""
    budget = placed.plan.budgets[Tier.DEVICE]
    table = Table("policy", "needs on the device", "")
    table.columns[1].justify = "right"
    for rule in RULES:
        try:
            plan = solve(placed.problem, SolveSettings(policy=rule))
        except PlacementError as error:
            short = format_bytes(error.shortfall_bytes)
            table.add_row(rule, format_bytes(budget + error.shortfall_bytes), f"{short} short")
        else:
            peak, a_step = plan.predicted.peak_bytes[Tier.DEVICE], plan.predicted.makespan_s
            table.add_row(rule, format_bytes(peak), f"fits, {format_seconds(a_step)} a step")
    console.print(table, soft_wrap=False)


def report(
    console: Console,
    placed: CompiledStep,
    judged: Sequence[StepResult],
    results: Sequence[StepResult],
    eager: Sequence[StepResult],
) -> None:
    """Plan, memory, times and the losses of both runs; the prediction is held to `judged` steps."""
    assert placed.measured is not None
    console.print(summary(placed.plan, placed.problem.dataflow))
    peak, budget = placed.measured.peak_bytes[Tier.DEVICE], placed.plan.budgets[Tier.DEVICE]
    predicted = placed.predicted.peak_bytes[Tier.DEVICE]
    console.print(
        f"device      measured peak {peak:,} bytes, predicted {predicted:,}, budget {budget:,}\n"
        f"            {format_bytes(budget - peak)} to spare",
    )
    console.print(_times(placed.predicted.makespan_s, judged, eager))
    if eager:
        console.print(_losses(results, eager), soft_wrap=False)
        worst = max(abs(a.loss - b.loss) for a, b in zip(results, eager, strict=False))
        console.print(
            f"Largest difference over {len(eager)} steps: {worst:.1e}. What may differ and why: "
            "the documentation's page Architecture, Exactness.",
        )


def write_folder(
    folder: Path,
    placed: CompiledStep,
    results: Sequence[StepResult],
    eager: Sequence[StepResult],
) -> None:
    """Timelines as picture and traces, and the losses; the step's own files are there already."""
    assert placed.measured is not None
    timelines = (placed.predicted, placed.measured)
    plan, dataflow = placed.plan, placed.problem.dataflow
    draw_timelines(specify(timelines, plan, dataflow), folder / "timeline.png")
    write_report(folder / "report.html", placed.problem, placed.plan, [placed.measured])
    for timeline in timelines:
        drawn = specify([timeline], plan, dataflow)
        save_trace(drawn, folder / f"{timeline.source}.trace.json")
    with (folder / "losses.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "loss", "seconds", "eager_loss", "eager_seconds"])
        twins = {result.number: result for result in eager}
        for result in results:
            twin = twins.get(result.number)
            compared = (twin.loss, twin.seconds) if twin else ("", "")
            rows.writerow([result.number + 1, result.loss, result.seconds, *compared])


def _times(predicted_s: float, judged: Sequence[StepResult], eager: Sequence[StepResult]) -> str:
    """The step as predicted, as measured, with its quartiles, and without a budget."""
    # The first step of a plan holds its tracing.
    measured = [result.seconds for result in judged[1:]]
    typical_s = statistics.median(measured)
    lines = [
        f"predicted   {format_seconds(predicted_s)} a step",
        f"measured    {format_seconds(typical_s)} a step, the median of {len(measured)}: "
        f"{predicted_s / typical_s - 1:+.1%} is how far off the prediction is",
    ]
    if len(measured) > 1:
        low, _, high = statistics.quantiles(measured, n=4, method="inclusive")
        lines.append(
            f"            half of them between {format_seconds(low)} and "
            f"{format_seconds(high)}; far apart where others use this computer, too"
        )
    if len(eager) > 1:
        alone_s = statistics.median(result.seconds for result in eager[1:])
        lines.append(
            f"eager       {format_seconds(alone_s)} a step, with all it needs on the device"
        )
    return "\n".join(lines)


def _losses(results: Sequence[StepResult], eager: Sequence[StepResult]) -> Table:
    table = Table("step", "loss", "eager", "difference", title="Losses side by side")
    for column in table.columns:
        column.justify = "right"
    pairs = list(zip(results, eager, strict=False))
    every = max(1, len(pairs) // ROWS)
    for index, (ours, theirs) in enumerate(pairs):
        if index % every == 0 or index == len(pairs) - 1:
            table.add_row(
                str(ours.number + 1),
                f"{ours.loss:.6f}",
                f"{theirs.loss:.6f}",
                f"{ours.loss - theirs.loss:+.1e}",
            )
    return table


def name_the_files(output: Path, console: Console) -> None:
    """Say what is in the folder."""
    console.print(
        f"\nLook into {output}/\n"
        "  report.html             one page to look at: words, timelines, memory, parameters\n"
        "  timeline.png            predicted and measured, on one time axis\n"
        "  predicted.trace.json, measured.trace.json   the same, for https://ui.perfetto.dev\n"
        "  losses.csv              every step of both runs\n"
        "  machine.json            this computer; profile.json: what each op took\n"
        "  step/summary.txt        the plan in words; step/plan.json: all of it\n"
        "  step/placed.py.txt      the step with its offloads, waits and host updates",
    )
