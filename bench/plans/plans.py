"""What do our plans gain over the simple rules? Simulated steps, and the largest model that trains.

For every step and machine up to three budgets: where a plan of ours just fits (5 % above the
least), where the first simple rule does, or, where none fits the device, halfway; and the top: what
`resident` needs, or what the device has, where that is less. Larger batches of a model, and steps
of 13 billion parameters or more, get the top alone. Plans go from tight to roomy, and one for a
smaller budget is an answer for a larger one. The host has room for everything. Then, with what the
device has and so much host memory, the largest of the steps that each rule can train at all.
Nothing is run: times are simulated.

    python -m bench.plans.plans -o bench/results/plans.json --pictures docs/images
    python -m bench.plans.plans -o plans.json --machine h100 --steps traced --model "Llama 1B"

With `--merge` rows of other steps and machines stay, and `others` has the runs they are of.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from bench.plans.jobs import SHAPES, Shape, step_of
from bench.plans.page import draw, table
from bench.plans.placement import COMPARED, Cell, merged, needed_bytes, refused, row, rows_of
from bench.plans.stopwatch import stopwatch
from bench.plans.targets import Row
from bench.report import runs_before, write_report
from cotrain_compile import presets
from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.policies import RULES, fraction, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import draft
from cotrain_compile.placement.search.greedy import least_memory
from cotrain_compile.placement.search.solve import FRACTIONS, SolveSettings, solve
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.units import Size

MACHINES = ("rtx4090", "h100", "a100-80", "gh200")
HOST_MEMORY = "2TiB"
ABOVE_LEAST = 1.05
# A rule or a plan fits at the budget it needs; a little more lets its copies overlap.
ABOVE_RULE = 1.02
OURS = "auto"
PLENTY = 1 << 50
# A step of 13 billion parameters has 19,000 ops, one of 7 billion 15,000.
TOP_ALONE_OPS = 17_000


def budgets_of(
    least_bytes: int, rule_bytes: int, resident_bytes: int, capacity_bytes: int
) -> tuple[int, ...]:
    """Budgets worth comparing, ascending; none where the device is too small for any plan.

    Given what any plan needs at the least, any simple rule, and the step with nothing moved.
    """
    top = min(resident_bytes, capacity_bytes)
    tight, rule_fits = ABOVE_LEAST * least_bytes, ABOVE_RULE * rule_bytes
    middle = rule_fits if rule_fits < top else sqrt(tight * top)
    asked = sorted({int(tight), int(middle), top})
    return tuple(budget for budget in asked if least_bytes <= budget <= top)


@dataclass(frozen=True)
class Step:
    """A shape with its traced step, and the device bytes that each simple rule needs for it.

    Bytes do not depend on a machine.
    """

    shape: Shape
    dataflow: Dataflow
    rule_bytes: Mapping[str, int]


def step(shape: Shape, folder: Path | None) -> Step:
    """Trace or read `shape`, and see what the rules need."""
    dataflow = step_of(shape, folder)
    problem = formulate(dataflow, presets.find(MACHINES[0]), {Tier.DEVICE: 0, Tier.HOST: PLENTY})
    placements = {name: rule(name)(dataflow) for name in RULES}
    # Of fractions, the one that leaves least on the device fits if any does.
    placements["fraction:auto"] = fraction(dataflow, FRACTIONS[-1])
    needs = {name: needed_bytes(problem, placement) for name, placement in placements.items()}
    return Step(shape, dataflow, needs)


def cell(step: Step, machine: Machine, host_bytes: int) -> Cell:
    """A step on a machine, with the budgets to compare at."""
    problem = formulate(step.dataflow, machine, {Tier.DEVICE: 0, Tier.HOST: host_bytes})
    began = time.perf_counter()
    space = decision_space(problem)
    choices_s = time.perf_counter() - began
    needs = step.rule_bytes
    least = needed_bytes(problem, frugal(space))
    capacity = machine.device.capacity_bytes
    budgets = budgets_of(least, min(needs.values()), needs["resident"], capacity)
    if len(step.dataflow.ops) > TOP_ALONE_OPS or not step.shape.is_smallest:
        budgets = budgets[-1:]
    return Cell(step.shape.name, space, choices_s, budgets)


def frugal(space: DecisionSpace) -> Placement:
    """The placement in which everything leaves the device that can."""
    return space.placement("frugal", least_memory(space))


def rows(cell: Cell, settings: SolveSettings) -> Iterator[Row]:
    """One row for each budget of `cell`. Every plan is checked."""
    plans: list[Plan] = []
    for budget_bytes in cell.budgets_bytes:
        given = cell.space.problem
        problem = given.with_budget(Tier.DEVICE, budget_bytes)
        try:
            with stopwatch() as took:
                plan = solve(problem, settings, incumbents=plans)
        except PlacementError as error:
            yield refused(cell, budget_bytes, took, str(error))
            continue
        check(problem, plan)
        plans.append(plan)
        found = row(cell, budget_bytes, took, plan)
        # Where everything fits, no other rule was tried.
        fits = plan.placement.policy == "resident"
        yield replace(found, rules_s=rules_s(problem)) if fits else found


def rules_s(problem: Problem) -> dict[str, float | str]:
    """The simulated step of each simple rule, or that it does not fit."""
    found: dict[str, float | str] = dict.fromkeys(COMPARED, "does not fit")
    for name in RULES:
        with suppress(PlacementError):
            found[name] = draft(problem, rule(name)(problem.dataflow)).step_s
    with suppress(PlacementError):
        plan = solve(problem, SolveSettings("fraction:auto"))
        found["fraction:auto"] = plan.predicted.makespan_s
    return found


def trains(step: Step, machine: Machine, host_bytes: int, policy: str) -> bool:
    """Whether `policy` has a plan in all of the device's memory and `host_bytes`."""
    budgets = {Tier.DEVICE: machine.device.capacity_bytes, Tier.HOST: host_bytes}
    kept = step.dataflow.total_bytes(*PERSISTENT_ROLES)
    if max(kept - host_bytes, step.rule_bytes.get(policy, 0)) > budgets[Tier.DEVICE]:
        return False
    problem = formulate(step.dataflow, machine, budgets)
    with suppress(PlacementError):
        draft(problem, followed(problem, policy))
        return True
    # Not everything that can leave the device has room on the host, but some of it may.
    with suppress(PlacementError, PlanError):
        return policy == OURS and bool(solve(problem, SolveSettings("ilp")))
    return False


def followed(problem: Problem, policy: str) -> Placement:
    """The placement of `policy` that needs least of the device."""
    if policy == OURS:
        return frugal(decision_space(problem))
    name = f"fraction:{FRACTIONS[-1]}" if policy == "fraction:auto" else policy
    return rule(name)(problem.dataflow)


def largest(steps: Sequence[Step], machine: Machine, host_bytes: int) -> dict[str, str | None]:
    """By policy, the last of `steps` that it can train with all of `machine`'s device memory."""
    found: dict[str, str | None] = {}
    for policy in (*COMPARED, OURS):
        fitting = (s for s in reversed(steps) if trains(s, machine, host_bytes, policy))
        found[policy] = next((s.shape.model for s in fitting), None)
    return found


def largest_models(
    steps: Sequence[Step], machine: Machine, host_bytes: int
) -> Iterator[dict[str, Any]]:
    """The largest of `steps` with what `machine`'s host has, and with `host_bytes`."""
    for own_bytes in (machine.host.capacity_bytes, host_bytes):
        models = largest(steps, machine, own_bytes)
        yield {"machine": machine.name, "host_bytes": own_bytes, "models": models}


def largest_of(path: Path) -> list[dict[str, Any]]:
    """The entries of a report on the largest models."""
    kept: list[dict[str, Any]] = json.loads(path.read_text())["result"]["largest"]
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan every step on every machine, and write the report after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, help="folder for one picture a machine")
    parser.add_argument("--machine", action="append", help="preset or machine.json")
    parser.add_argument("--model", action="append", help="as the table names it; else all")
    parser.add_argument("--steps", type=Path, help="folder in which traced steps are kept")
    parser.add_argument("--host-memory", default=HOST_MEMORY, help="budget on the host")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    parser.add_argument("--merge", action="store_true", help="keep the output's other rows")
    given = parser.parse_args(arguments)
    settings = SolveSettings(work_limit=given.work_limit)
    shapes = [shape for shape in SHAPES if not given.model or shape.model in given.model]
    steps = [step(shape, given.steps) for shape in shapes]
    found = rows_of(given.output) if given.merge else []
    entries = largest_of(given.output) if given.merge else []
    others = runs_before(given.output) if given.merge else []
    result: dict[str, Any] = {}
    for machine in map(presets.find, given.machine or MACHINES):
        host_bytes = Size.parse(given.host_memory).of(machine.host.capacity_bytes)
        # Of all models alone: which of some is the largest says nothing of the others.
        if not (given.merge and given.model):
            entries = [entry for entry in entries if entry["machine"] != machine.name]
            entries += largest_models(steps, machine, host_bytes)
        for each in steps:
            own = list(rows(cell(each, machine, host_bytes), settings))
            found = merged(found, own) if own else found  # none where nothing fits
            result = {
                "host_budget": given.host_memory,
                "work_limit": given.work_limit,
                "rows": [asdict(row) | {"seconds": row.seconds} for row in found],
                "largest": entries,
                "others": others,  # by which what is kept was found
            }
            write_report(given.output, (__doc__ or "").splitlines()[0], result)
    print(table(result))
    if given.pictures is not None:
        draw(result, given.pictures)


if __name__ == "__main__":
    main()
