"""What is it worth to make values again? Simulated steps of plans with and without it.

For every step, machine and budget: the plan that makes nothing again, the step with every layer or
every other one made again (as `torch.utils.checkpoint` around layers does) and the rest placed by
the integer program; ProTrain's blocks, each swapped, made again or kept, over simple rules for the
states, the best of a grid; and `auto`, which chooses; with the certified bound of all of them.
Every plan is checked. Nothing is run: times are simulated, op by op.

    python -m bench.plans.recompute -o bench/results/recompute.json
    python -m bench.plans.recompute -o recompute.json --steps traced --only "GPT-2"
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from bench.plans.jobs import SHAPES, step_of
from bench.report import write_report
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.regions import regions_of
from cotrain_compile.placement.recompute.rewrite import recomputable, recomputed_ops
from cotrain_compile.placement.recompute.rules import every_layer, every_other_layer, interleaved
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane, Plan
from cotrain_compile.sizes import Size

HOST_BYTES = 1 << 40
# Steps by the name of their shape, with the machines and the budgets to plan for.
CELLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("GPT-2 124M, 32 × 1024", "rtx4090", ("16GiB", "20GiB", "24GiB")),
    ("Llama 1B, 2 × 2048", "rtx4090", ("9.7GiB", "14GiB", "24GiB")),
    ("Llama 7B, 4 × 2048", "h100", ("30.53GiB",)),
    ("Llama 1B, 2 × 2048", "gh200", ("10.45GiB",)),
    ("Llama 1B, 8 × 2048", "rtx4090", ("24GiB",)),
    ("Llama 7B, 4 × 2048", "rtx4090", ("13.68GiB", "24GiB")),
    ("Llama 7B, 4 × 2048", "h100", ("80GiB",)),
    ("GPT-2 124M, 32 × 1024", "h100", ("20GiB", "40GiB")),
    ("GPT-2 124M, 32 × 1024", "gh200", ("12GiB", "20GiB")),
    ("Llama 1B, 2 × 2048", "h100", ("10.45GiB", "17.69GiB")),
    ("Llama 70B, 1 × 2048", "h100", ("80GiB",)),
)
RULES = {"every layer": every_layer, "every other layer": every_other_layer}
# Shares of the blocks that are swapped, and made again, and where the states are meanwhile.
SHARES = (0, 1 / 3, 2 / 3, 1)
STATES = ("resident", "coarse", "streamed")


@dataclass(frozen=True)
class Cell:
    """One step on one machine in one budget; `steps_s` by way, None where it does not fit.

    `recomputed_bytes` are made again by `auto` in `redo_s` of the device.
    """

    model: str
    machine: str
    budget_bytes: int
    steps_s: Mapping[str, float | None]
    bound_s: float
    policy: str
    recomputed_bytes: int
    redo_s: float
    solve_s: float


def planned(problem: Problem, settings: SolveSettings) -> Plan | None:
    """The checked plan, None where nothing fits."""
    try:
        plan = solve(problem, settings)
    except (PlacementError, PlanError):
        return None
    check(problem, plan)
    return plan


def step_s(plan: Plan | None) -> float | None:
    """The simulated step of a plan, if there is one."""
    return None if plan is None else plan.predicted.makespan_s


def cell(model: str, problem: Problem, settings: SolveSettings) -> Cell:
    """All ways to plan `problem`."""
    steps: dict[str, float | None] = {}
    steps["nothing"] = step_s(planned(problem, replace(settings, recompute=False)))
    for name, choose in RULES.items():
        chosen = choose(problem.dataflow, recomputable(problem.dataflow))
        rewritten = replace(problem.recomputing(sorted(chosen.recomputed)), recomputed=())
        steps[name] = step_s(planned(rewritten, replace(settings, recompute=False)))
    steps["ProTrain's blocks"] = blocks_s(problem)
    began = time.monotonic()
    plan = planned(problem, settings)
    seconds = time.monotonic() - began
    steps["auto"] = step_s(plan)
    nbytes, redo_s = made_again(problem.dataflow, plan)
    return Cell(
        model,
        problem.machine.name,
        problem.budgets[Tier.DEVICE],
        steps,
        plan.report.lower_bound_s if plan is not None and plan.report is not None else 0.0,
        plan.placement.policy if plan is not None else "none",
        nbytes,
        redo_s,
        seconds,
    )


def blocks_s(problem: Problem) -> float | None:
    """The fastest step of ProTrain's blocks that fits; None where none does."""
    dataflow, may = problem.dataflow, recomputable(problem.dataflow)
    count = len(regions_of(dataflow, may))
    found: list[float] = []
    for swapped, again in product((round(share * count) for share in SHARES), repeat=2):
        if swapped + again > count:
            continue
        choice = interleaved(dataflow, may, swapped, again)
        for states in STATES:
            own = {"recomputed": tuple(choice.recomputed), "away": tuple(choice.away)}
            with suppress(PlacementError):
                plan = schedule(problem, replace(rule(states)(dataflow), **own))
                check(problem, plan)
                found.append(plan.predicted.makespan_s)
    return min(found, default=None)


def made_again(dataflow: Dataflow, plan: Plan | None) -> tuple[int, float]:
    """Bytes that a plan makes again, and the seconds of the device that this takes."""
    if plan is None:
        return 0, 0.0
    names = plan.placement.recomputed
    again = recomputed_ops(dataflow, names)
    spans = (span for span in plan.predicted.lane(Lane.DEVICE) if span.name in again)
    nbytes = sum(dataflow.buffer[name].nbytes for name in names)
    return nbytes, sum(span.end_s - span.start_s for span in spans)


def main() -> None:
    """Plan every cell and write what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=Path, help="a folder to keep traced steps in")
    parser.add_argument("--only", default="", help="words in the names of steps")
    parser.add_argument("--minutes", type=float, default=math.inf, help="when to end at the latest")
    asked = parser.parse_args()
    shapes = {shape.name: shape for shape in SHAPES}
    cells: list[Cell] = []
    began = time.monotonic()
    for name, machine, budgets in CELLS:
        if asked.only not in name:
            continue
        step = step_of(shapes[name], asked.steps)
        for budget in budgets:
            if time.monotonic() - began > 60 * asked.minutes:
                break
            target = presets.find(machine)
            nbytes = Size.parse(budget).of(target.device.capacity_bytes)
            allowed = {Tier.DEVICE: nbytes, Tier.HOST: HOST_BYTES}
            found = cell(name, formulate(step, target, allowed), SolveSettings())
            cells.append(found)
            print(found, flush=True)
            result = {"cells": [asdict(each) for each in cells]}
            write_report(asked.output, "What is it worth to make values again?", result)


if __name__ == "__main__":
    main()
