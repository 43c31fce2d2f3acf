"""How good are plans of steps that nobody tuned for? Simulated steps, bounds, users' ways, work.

Saved steps on machines, each within budgets of so many times the least that any plan needs, or any
plan of whole ops, or of a part of what all of it takes. Every plan is checked, and compared with
checkpoints of every layer and of every other one under each simple rule. With `--beside`, each is
searched for again while so many processes compute, and has to be the same plan. Rows that the
output has are kept.

    python -m bench.plans.campaign -o bench/results/campaign.json gpt2.json bert_large.json
    python -m bench.plans.campaign -o bench/results/busy.json --beside 6 --machine a40 t5_base.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.plans.stopwatch import stopwatch
from bench.plans.tight import least_bytes
from bench.report import write_report
from bench.results_page.tables import markdown, percent
from cotrain_compile import presets
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import RULES, rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.regions import every_layer, every_other_layer
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import draft
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds

MACHINES = ("rtx4090", "a100-40", "h100")
HOST_BYTES = 2 << 40
# Times the least, of any plan and of those with whole ops, and parts of what all takes.
BUDGETS = ("1.1x", "1.1x whole", "0.5")
WHOLE = " whole"


@dataclass(frozen=True)
class Row:
    """A step on a machine within a budget; no plan was found where it has no `step_s`.

    `users_s` is the fastest of users' own ways, None where none fits. `is_same_beside_others` says
    whether a search beside other processes has found the same plan, None where none was made.
    """

    step: str
    machine: str
    budget: str
    budget_bytes: int
    processor_s: float
    wall_s: float
    policy: str = ""
    step_s: float | None = None
    bound_s: float | None = None
    users_s: float | None = None
    work: float | None = None
    ended: str = ""
    is_same_beside_others: bool | None = None

    @property
    def place(self) -> tuple[str, str, str]:
        return self.step, self.machine, self.budget

    @property
    def gap(self) -> float | None:
        """How far the step is above its bound."""
        return self.step_s / self.bound_s - 1 if self.step_s and self.bound_s else None


def budget_bytes(problem: Problem, told: str, least: Mapping[bool, int]) -> int:
    """`told` as "1.1x" of the least, "1.1x whole" of that of whole ops, or "0.5" of what all takes.

    `least` is by whether ops run in parts.
    """
    times, x, whole = told.partition("x")
    if x:
        return int(float(times) * least[whole != WHOLE])
    return int(float(told) * liveness(problem.dataflow).peak_bytes)


def users_s(problem: Problem) -> float | None:
    """The step time of the fastest of users' own ways that fits."""
    step, found = problem.dataflow, list[float]()
    may = recomputable(step)
    for choose in (every_layer, every_other_layer):
        again = choose(step, may)
        names = tuple(b.name for b in step.buffers if b.name in again)
        for name in RULES:
            placement = replace(rule(name)(step), recomputed=names)
            moves = moves_of(problem, placement)
            if max(moves.slot_bytes) > problem.budgets[Tier.DEVICE]:
                continue
            try:
                found.append(draft(problem, placement, moves=moves).step_s)
            except PlacementError:
                continue
    return min(found, default=None)


def row(step: str, problem: Problem, told: str, settings: SolveSettings, beside: int) -> Row:
    """Search for the plan of a cell, and once more beside other processes if there are any."""
    cell = (step, problem.machine.name, told, problem.budgets[Tier.DEVICE])
    try:
        with stopwatch() as took:
            plan = solve(problem, settings)
    except PlacementError as refusal:
        return Row(*cell, took.processor_s, took.wall_s, ended=str(refusal))
    check(problem, plan)
    report = plan.report
    assert report is not None
    return Row(
        *cell,
        took.processor_s,
        took.wall_s,
        plan.placement.policy,
        plan.predicted.makespan_s,
        report.lower_bound_s,
        users_s(problem),
        report.work,
        report.ended,
        is_same(plan, problem, settings, beside) if beside else None,
    )


def is_same(plan: Plan, problem: Problem, settings: SolveSettings, beside: int) -> bool:
    """Whether a search beside so many processes that compute finds the same plan."""
    with _busy(beside):
        again = solve(problem, settings)
    return _without_seconds(again) == _without_seconds(plan)


def _without_seconds(plan: Plan) -> Plan:
    assert plan.report is not None
    return replace(plan, report=replace(plan.report, seconds=0.0))


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    command = [sys.executable, "-c", "while True: sum(range(10**6))"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians and worst cases of gaps and processors, and how plans stand to users' own ways."""
    gaps = [row.gap for row in rows if row.gap is not None]
    seconds = [row.processor_s for row in rows]
    known = [row for row in rows if row.users_s is not None]
    same = [row.is_same_beside_others for row in rows if row.is_same_beside_others is not None]
    return {
        "cells": len(rows),
        "refused": sum(row.step_s is None for row in rows),
        "gap": {"median": statistics.median(gaps), "worst": max(gaps)} if gaps else None,
        "processor_s": {"median": statistics.median(seconds), "worst": max(seconds)},
        "users_fit": len(known),
        "slower_than_users": sum(
            row.step_s is None or row.step_s > (row.users_s or 0.0) * (1 + 1e-9) for row in known
        ),
        "same_beside_others": f"{sum(same)} of {len(same)}",
    }


def table(result: Mapping[str, Any]) -> str:
    """A row for each cell, and what is to be said of all of them."""
    headings = ("step and machine", "budget", "step", "bound", "above", "users", "plan")
    cells = [Row(**row) for row in result["rows"]]
    rows = [
        (
            f"{cell.step}, {cell.machine}",
            f"{cell.budget}, {format_bytes(cell.budget_bytes)}",
            *(_or_none(seconds, format_seconds) for seconds in (cell.step_s, cell.bound_s)),
            _or_none(cell.gap, percent),
            _or_none(cell.users_s, format_seconds),
            cell.policy,
        )
        for cell in cells
    ]
    told, gap = result["summary"], result["summary"]["gap"]
    return (
        markdown(
            (*headings, "processor"),
            [(*row, f"{cell.processor_s:.1f} s") for row, cell in zip(rows, cells, strict=True)],
        )
        + f"\n{told['cells']} cells: {percent(gap['median'])} above the bound in the median, "
        f"{percent(gap['worst'])} at worst; {told['processor_s']['median']:.1f} s of "
        f"processors in the median, {told['processor_s']['worst']:.1f} s at worst. Of users' own "
        "ways, checkpoints of every layer or of every other with any simple rule, some fits in "
        f"{told['users_fit']} of them; {told['slower_than_users']} plans are slower. Searched for "
        f"again beside busy processes, the plan is the same in {told['same_beside_others']}.\n"
    )


def _or_none(value: float | None, tell: Callable[[float], str]) -> str:
    return "-" if value is None else tell(value)


def main() -> None:
    """Search for every cell that the output lacks, and write it as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("steps", type=Path, nargs="+", help="saved steps")
    parser.add_argument("--machine", action="append", help="preset")
    parser.add_argument(
        "--budget",
        action="append",
        help='"1.1x" the least, "1.1x whole" that of whole ops, or "0.5" of all',
    )
    parser.add_argument("--beside", type=int, default=0, help="processes to search beside")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    asked = parser.parse_args()
    # The clock only guards a search, and is no part of what is asked here.
    settings = SolveSettings(work_limit=asked.work_limit, time_limit_s=1e6)
    rows = []
    if asked.output.exists():
        rows = [Row(**kept) for kept in json.loads(asked.output.read_text())["result"]["rows"]]
    for path in asked.steps:
        dataflow, least = load(path, Dataflow), dict[bool, int]()
        for machine in asked.machine or MACHINES:
            budgets = {Tier.DEVICE: 0, Tier.HOST: HOST_BYTES}
            problem = formulate(dataflow, presets.find(machine), budgets)
            least = least or {  # the same on every machine
                split: least_bytes(problem, replace(settings, split=split))
                for split in (True, False)
            }
            for told in asked.budget or BUDGETS:
                if any(kept.place == (path.stem, machine, told) for kept in rows):
                    continue
                cell = problem.with_budget(Tier.DEVICE, budget_bytes(problem, told, least))
                rows.append(row(path.stem, cell, told, settings, asked.beside))
                print(rows[-1], rows[-1].gap, flush=True)
                result = {
                    "work_limit": asked.work_limit,
                    "beside": asked.beside,
                    "summary": summary(rows),
                    "rows": [asdict(each) for each in rows],
                }
                write_report(asked.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
