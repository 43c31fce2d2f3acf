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
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import RULES
from cotrain_compile.units import format_bytes, format_seconds
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.report.page import write_report
from cotrain_compile.viz.specification import specify
from cotrain_compile.viz.text.summary import candidates, summary
from cotrain_compile.viz.timeline import draw_timelines

ROWS = 10


def report(
    console: Console,
    placed: CompiledStep,
    results: Sequence[StepResult],
    eager: Sequence[StepResult],
) -> None:
    """Plan, what simpler ones would have cost, memory, times, and the losses of both runs."""
    assert placed.measured is not None
    console.print(summary(placed.plan, placed.problem.dataflow))
    if rules := list(candidates([placed.plan], (*RULES, "fraction:auto"))):
        console.print(_rules(rules), soft_wrap=False)
    peak, budget = placed.measured.peak_bytes[Tier.DEVICE], placed.plan.budgets[Tier.DEVICE]
    predicted = placed.predicted.peak_bytes[Tier.DEVICE]
    console.print(
        f"device      measured peak {peak:,} bytes, predicted {predicted:,}, budget {budget:,}\n"
        f"            {format_bytes(budget - peak)} to spare",
    )
    console.print(
        f"measured    {_typical(results)} a step" + (f", eager {_typical(eager)}" if eager else ""),
    )
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


def _typical(results: Sequence[StepResult]) -> str:
    # The first step holds the tracing.
    return format_seconds(statistics.median(r.seconds for r in results[1:] or results))


def _rules(rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table("policy", "a step", title="What each would cost")
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


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
