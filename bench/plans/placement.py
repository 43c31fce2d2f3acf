"""How good are the plans of `auto`? Simulated steps against the certified bound and simple rules.

For every step and machine: four budgets, spread geometrically from 5 % above the least that any
plan needs to just below what `resident` needs (or what the device has, where that is less). Each
is solved on its own; plans of other budgets do not help. The host has room for everything: its
memory is given here, not by the machine. Nothing is run: times are those of the simulator.

    python -m bench.plans.placement -o bench/results/placement.json
    python -m bench.plans.placement -o placement.json --machine h100 gpt2.json llama_1b.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.plans.stopwatch import Took, stopwatch
from bench.plans.targets import Row, summary
from bench.report import runs_before, write_report
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load
from cotrain_compile.jobs import load_job
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.policies import RULES, resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import shortfall_bytes
from cotrain_compile.placement.search.greedy import least_memory
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.units import Size, format_bytes, format_seconds

STEPS = (
    "docs/examples/gpt2.py:gpt2_124m",
    "docs/examples/llama.py:llama_1b",
    "docs/examples/llama.py:llama_7b",
)
MACHINES = ("rtx4090", "a100-80", "h100", "gh200")
COMPARED = (*RULES, "fraction:auto")
BUDGETS, QUICK_BUDGETS = 4, 2
ABOVE_LEAST, BELOW_RESIDENT = 1.05, 0.98


@dataclass(frozen=True)
class Cell:
    """A step on a machine: what can be decided, how long finding that took, budgets to try."""

    model: str
    space: DecisionSpace
    choices_s: float
    budgets_bytes: tuple[int, ...]


def read_step(source: str) -> tuple[str, Dataflow]:
    """Name and dataflow of a saved step (`*.json`) or of a job (`FILE.py:FUNCTION`)."""
    if source.endswith(".json"):
        return Path(source).stem, load(source, Dataflow)
    return source.rpartition(":")[2], trace(load_job(source))


def cell(model: str, dataflow: Dataflow, machine: Machine, host_bytes: int, count: int) -> Cell:
    """`count` budgets for a step on a machine; none where it does not fit the device at all."""
    problem = formulate(dataflow, machine, {Tier.DEVICE: 0, Tier.HOST: host_bytes})
    began = time.perf_counter()
    space = decision_space(problem)
    choices_s = time.perf_counter() - began
    least = needed_bytes(problem, space.placement("least", least_memory(space)))
    first = ABOVE_LEAST * least
    enough = BELOW_RESIDENT * needed_bytes(problem, resident(dataflow))
    last = min(enough, machine.device.capacity_bytes)
    budgets = np.geomspace(first, last, count) if first < last else ()
    return Cell(model, space, choices_s, tuple(int(budget) for budget in budgets))


def needed_bytes(problem: Problem, placement: Placement) -> int:
    """The least device budget that `placement` can be scheduled in."""
    nothing = problem.with_budget(Tier.DEVICE, 0)
    return shortfall_bytes(nothing, moves_of(nothing, placement))


def rows(cell: Cell, settings: SolveSettings) -> Iterator[Row]:
    """One row for each budget of `cell`, from tight to roomy. Every plan is checked."""
    for budget_bytes in cell.budgets_bytes:
        given = cell.space.problem
        problem = given.with_budget(Tier.DEVICE, budget_bytes)
        try:
            with stopwatch() as took:
                plan = solve(problem, settings)
        except PlacementError as error:
            yield refused(cell, budget_bytes, took, str(error))
            continue
        check(problem, plan)
        yield row(cell, budget_bytes, took, plan)


def rows_of(path: Path) -> list[Row]:
    """The rows of a report."""
    kept = json.loads(path.read_text())["result"]["rows"]
    names = {field.name for field in fields(Row)}
    return [Row(**{name: r[name] for name in r if name in names}) for r in kept]


def merged(kept: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """`kept` with those `found` in the places of the rows of the same step and machine."""
    case = (found[0].model, found[0].machine)
    same = [at for at, row in enumerate(kept) if (row.model, row.machine) == case]
    at = same[0] if same else len(kept)
    others = [row for row in kept if (row.model, row.machine) != case]
    return [*others[:at], *found, *others[at:]]


def row(cell: Cell, budget_bytes: int, took: Took, plan: Plan) -> Row:
    """What there is to say about a plan, and what finding it `took`."""
    report = plan.report
    assert report is not None
    certified = report.lower_bound_s > 0
    # The claim is about the integer program's own plan, which may not be the fastest.
    simulated_s, claimed_s = report.simulated_s.get("ilp"), report.objective_s
    return Row(
        **place(cell, budget_bytes),
        solve_s=took.wall_s,
        processor_s=took.processor_s,
        policy=plan.placement.policy,
        step_s=plan.predicted.makespan_s,
        bound_s=report.lower_bound_s if certified else None,
        gap=report.gap if certified else None,
        claimed_s=claimed_s,
        claim_difference=simulated_s / claimed_s - 1 if simulated_s and claimed_s else None,
        status=report.status,
        rules_s={name: report.simulated_s.get(name, "does not fit") for name in COMPARED},
        peak_bytes=plan.predicted.peak_bytes[Tier.DEVICE],
    )


def refused(cell: Cell, budget_bytes: int, took: Took, why: str) -> Row:
    """A budget at which no plan was found, although there is one."""
    return Row(
        **place(cell, budget_bytes),
        solve_s=took.wall_s,
        processor_s=took.processor_s,
        policy="none",
        status=why,
    )


def place(cell: Cell, budget_bytes: int) -> dict[str, Any]:
    """The part of a row that is known before solving."""
    problem = cell.space.problem
    return {
        "model": cell.model,
        "machine": problem.machine.name,
        "ops": len(problem.dataflow.ops),
        "budget_bytes": budget_bytes,
        "choices_s": cell.choices_s,
    }


def table(results: Sequence[Row]) -> Table:
    """The rows of one step on one machine."""
    result = Table(title=f"{results[0].model} on {results[0].machine}", box=None)
    for heading in (
        "budget",
        "policy",
        "step",
        "bound",
        "gap",
        "claim off",
        "solved in",
        "best rule",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        times = [_text(r.step_s, format_seconds), _text(r.bound_s, format_seconds)]
        shares = [_text(r.gap, "{:+.1%}".format), _text(r.claim_difference, "{:+.1%}".format)]
        name, rule_s = r.best_rule or ("none fits", None)
        rule = name if rule_s is None else f"{name} {format_seconds(rule_s)}"
        size, seconds = format_bytes(r.budget_bytes), f"{r.seconds:.1f} s"
        result.add_row(size, r.policy, *times, *shares, seconds, rule)
    return result


def summary_table(targets: Mapping[str, Mapping[str, Any]]) -> Table:
    """Median, worst and limits of each target."""
    result = Table(title="summary", box=None)
    for heading in ("target", "median", "worst", "limits", "missing", "met"):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, target in targets.items():
        show = "{:.1f} s".format if name.endswith("_s") else "{:.2%}".format
        median, worst, *limits = (
            _text(target[key], show) for key in ("median", "worst", "median_limit", "worst_limit")
        )
        met = "yes" if target["met"] else "no"
        result.add_row(name, median, worst, " / ".join(limits), str(target["missing"]), met)
    return result


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve every cell, print its table, and write the report after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", default=STEPS, help="saved steps, or jobs to trace")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--machine", action="append", help="preset or machine.json")
    parser.add_argument("--host-memory", default="1TiB", help="budget on the host, or a share")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    parser.add_argument("--merge", action="store_true", help="keep the output's other rows")
    parser.add_argument("--quick", action="store_true", help="two budgets on one machine")
    given = parser.parse_args(arguments)
    names = given.machine or (MACHINES[:1] if given.quick else MACHINES)
    settings = SolveSettings(work_limit=given.work_limit)
    # A file is wide enough for every column, whatever the terminal's default.
    console = Console(width=None if sys.stdout.isatty() else 120)
    results = rows_of(given.output) if given.merge else []
    others = runs_before(given.output) if given.merge else []
    for source in given.steps:
        model, dataflow = read_step(source)
        for machine in map(presets.find, names):
            host_bytes = Size.parse(given.host_memory).of(machine.host.capacity_bytes)
            count = QUICK_BUDGETS if given.quick else BUDGETS
            found = cell(model, dataflow, machine, host_bytes, count)
            if not found.budgets_bytes:
                console.print(f"{model} needs more than {machine.name} has")
                continue
            own = list(rows(found, settings))
            console.print(table(own))
            results = merged(results, own)
            result = {
                "host_budget": given.host_memory,
                "summary": summary(results),
                "rows": [asdict(r) | {"seconds": r.seconds} for r in results],
                "others": others,  # by which what is kept was found
            }
            write_report(given.output, (__doc__ or "").splitlines()[0], result)
    console.print(summary_table(summary(results)["targets"]))


if __name__ == "__main__":
    main()
