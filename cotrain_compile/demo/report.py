"""Report: what a finished demo shows and the files it leaves."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.outcome import Outcome
from cotrain_compile.demo.train import StepResult
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import write_whole
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.support.units import format_bytes, format_seconds
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


def report(console: Console, outcome: Outcome) -> None:
    """Plan, memory, times and the losses of both runs."""
    placed, results, eager = outcome.placed, outcome.results, outcome.eager
    console.print(summary(placed.plan, placed.problem.dataflow))
    peak = max(timeline.peak_bytes[Tier.DEVICE] for timeline in outcome.timelines)
    predicted, budget = placed.predicted.peak_bytes[Tier.DEVICE], placed.plan.budgets[Tier.DEVICE]
    console.print(
        f"device      measured peak {peak:,} bytes, predicted {predicted:,}, budget {budget:,}\n"
        f"            {format_bytes(budget - peak)} to spare",
    )
    console.print("\n".join(_times(outcome)))
    if eager:
        console.print(_losses(results, eager), soft_wrap=False)
        worst = max(abs(a.loss - b.loss) for a, b in zip(results, eager, strict=False))
        console.print(
            f"Largest difference over {len(eager)} steps: {worst:.1e}. What may differ and why: "
            "the documentation's page Architecture, Exactness.",
        )


def write_folder(folder: Path, outcome: Outcome) -> None:
    """Timelines as picture and traces, and the losses; the step's own files are there already."""
    placed = outcome.placed
    plan, dataflow = placed.plan, placed.problem.dataflow
    timelines = (placed.predicted, outcome.typical)
    draw_timelines(specify(timelines, plan, dataflow), folder / "timeline.png")
    write_report(folder / "report.html", placed.problem, plan, [outcome.typical])
    for timeline in timelines:
        drawn = specify([timeline], plan, dataflow)
        save_trace(drawn, folder / f"{timeline.source}.trace.json")
    write_whole(folder / "losses.csv", _losses_csv(outcome))


def _losses_csv(outcome: Outcome) -> str:
    table = io.StringIO(newline="")
    rows = csv.writer(table)
    rows.writerow(["step", "loss", "seconds", "eager_loss", "eager_seconds"])
    twins = {result.number: result for result in outcome.eager}
    for result in outcome.results:
        twin = twins.get(result.number)
        compared = (twin.loss, twin.seconds) if twin else ("", "")
        rows.writerow([result.number + 1, result.loss, result.seconds, *compared])
    return table.getvalue()


def _times(outcome: Outcome) -> Iterator[str]:
    """The step as predicted, as measured, with its quartiles, and without a budget."""
    yield f"predicted   {format_seconds(outcome.placed.predicted.makespan_s)} a step"
    seconds = outcome.seconds
    between = ""
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        between = f", half of them between {format_seconds(low)} and {format_seconds(high)}"
    yield (
        f"measured    {format_seconds(statistics.median(seconds))} a step, the median of "
        f"{len(seconds)}{between}"
    )
    yield (
        f"off by      {outcome.error:+.1%}; {outcome.error_at_own_times:+.1%} had each op been "
        "known to take what it took in these steps:\n            on a computer that others use, "
        "too, they take longer than in the first ones, or less"
    )
    if len(outcome.eager) > 1:
        alone_s = statistics.median(result.seconds for result in outcome.eager[1:])
        yield f"eager       {format_seconds(alone_s)} a step, with all it needs on the device"


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
