"""How good are plans in the least memory there is? Simulated steps against the certified bound.

For every step and machine: the least device budget that a refusal states, and 3, 10 and 25 % more,
without values made again and with them. Each is solved on its own, with its plan checked; plans of
other budgets do not help. `--budgets` takes those of a report of another version, which is kept
beside; `--merge` keeps the rows that the output has. Nothing is run: times are simulated.

    python -m bench.plans.tight -o bench/results/tight.json --steps traced
    python -m bench.plans.tight -o tight.json --only "ViT-L" --budgets bench/results/tight.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.plans.recompute import traced
from bench.plans.stopwatch import stopwatch
from bench.report import runs_before, write_report
from bench.results_page.tables import markdown, percent
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.support.units import format_bytes, format_seconds

STEPS = ("ViT-L, 128 × 224²", "GPT-2 124M, 8 × 1024", "Llama 1B, 2 × 2048", "U-Net, 16 × 512²")
MACHINES = ("rtx4090", "h100")
HOST_BYTES = 2 << 40
SHARES = (1.0, 1.03, 1.1, 1.25)
GAP_MEDIAN, GAP_WORST = 0.08, 0.15
SOLVE_MEDIAN_S, SOLVE_WORST_S = 5.0, 20.0


@dataclass(frozen=True)
class Row:
    """A step on a machine in a budget, `share` times the least; None where no plan was found.

    `processor_s` is what solving took of all processors, by their own time.
    """

    model: str
    machine: str
    recompute: bool
    share: float
    budget_bytes: int
    solve_s: float
    policy: str
    step_s: float | None = None
    bound_s: float | None = None
    processor_s: float | None = None

    @property
    def gap(self) -> float | None:
        """How far the step is above its bound."""
        return self.step_s / self.bound_s - 1 if self.step_s and self.bound_s else None


def least_bytes(problem: Problem, settings: SolveSettings) -> int:
    """The least device budget, as a refusal of a smaller one states it."""
    try:
        solve(problem.with_budget(Tier.DEVICE, 0), settings)
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    raise AssertionError("a plan in no memory")


def row(model: str, problem: Problem, share: float, settings: SolveSettings) -> Row:
    """Solve one budget, that of `problem`."""
    place = (model, problem.machine.name, settings.recompute, share)
    budget_bytes = problem.budgets[Tier.DEVICE]
    try:
        with stopwatch() as took:
            plan = solve(problem, settings)
    except (PlacementError, PlanError):
        return Row(*place, budget_bytes, took.wall_s, "none", processor_s=took.processor_s)
    check(problem, plan)
    bound_s = plan.report.lower_bound_s if plan.report is not None else None
    step_s, policy = plan.predicted.makespan_s, plan.placement.policy
    return Row(*place, budget_bytes, took.wall_s, policy, step_s, bound_s, took.processor_s)


def rows(
    model: str,
    dataflow: Dataflow,
    machines: Sequence[str],
    recomputes: Sequence[bool],
    work_limit: float,
    given: Mapping[tuple[object, ...], int],
    kept: Mapping[tuple[object, ...], Row],
) -> Iterator[Row]:
    """All rows of a step but those `kept`, by model, machine, recompute and share.

    Budgets are those `given`, if any.
    """
    for machine in machines:
        problem = formulate(
            dataflow, presets.find(machine), {Tier.DEVICE: 0, Tier.HOST: HOST_BYTES}
        )
        for recompute in recomputes:
            settings = SolveSettings(work_limit=work_limit, recompute=recompute)
            least = 0 if given else least_bytes(problem, settings)
            for share in SHARES:
                place = (model, machine, recompute, share)
                if place in kept:
                    continue
                budget = given[place] if given else int(share * least)
                yield row(model, problem.with_budget(Tier.DEVICE, budget), share, settings)


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Medians and worst cases beside their limits; a row without a plan misses them."""
    gaps = [r.gap for r in found if r.gap is not None]
    seconds = [r.solve_s for r in found]
    return {
        "rows": len(found),
        "refused": sum(r.step_s is None for r in found),
        "gap": _target(gaps, GAP_MEDIAN, GAP_WORST),
        "solve_s": _target(seconds, SOLVE_MEDIAN_S, SOLVE_WORST_S),
    }


def _target(values: Sequence[float], median_limit: float, worst_limit: float) -> dict[str, Any]:
    return {
        "median": statistics.median(values) if values else None,
        "median_limit": median_limit,
        "worst": max(values, default=None),
        "worst_limit": worst_limit,
    }


def rows_of(path: Path) -> list[Row]:
    """The rows of a report."""
    kept = json.loads(path.read_text())["result"]["rows"]
    names = {field.name for field in fields(Row)}
    return [Row(**{name: r[name] for name in r if name in names}) for r in kept]


def table(result: Mapping[str, Any]) -> str:
    """A row for each step, machine and share of the least, with what was before beside it."""
    before = {_place(r): r for r in result["before"]}
    rows = [
        (
            f"{r['model']}, {r['machine']}" + ", values made again" * r["recompute"],
            f"{r['share']:g} ×, {format_bytes(r['budget_bytes'])}",
            *(_seconds(r[name]) for name in ("step_s", "bound_s")),
            _percent(r["gap"]),
            _percent(before.get(_place(r), {}).get("gap")),
            r["policy"],
            format_seconds(r["solve_s"]),
            _seconds(r.get("processor_s")),
        )
        for r in result["rows"]
    ]
    headings = (
        "step and machine",
        "budget",
        "step",
        "bound",
        "above",
        "before",
        "plan",
        "solved in",
        "processor",
    )
    told = [
        _told(result[key], name) for key, name in (("rows", "this version"), ("before", "before"))
    ]
    return markdown(headings, rows) + "\n" + " ".join(told) + "\n"


def _told(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Medians and worst cases of the rows without values made again."""
    without = [r for r in rows if not r["recompute"]]
    gaps = [r["gap"] for r in without if r["gap"] is not None]
    above = [r["gap"] for r in without if r["gap"] is not None and r["share"] > 1]
    none = sum(r["step_s"] is None for r in without)
    return (
        f"Without values made again, {name}: {_percent(statistics.median(gaps))} above the bound "
        f"in the median of all budgets with a plan, {_percent(max(gaps))} at worst; above the "
        f"least itself {_percent(statistics.median(above))} and {_percent(max(above))}; no plan in "
        f"{none} of {len(without)} budgets."
    )


def _place(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["model"], row["machine"], row["recompute"], row["share"]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share)


def main() -> None:
    """Solve every row and write what came of it, as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=Path, help="a folder to keep traced steps in")
    parser.add_argument("--only", default="", help="words in the names of steps")
    parser.add_argument("--machine", action="append", help="preset")
    parser.add_argument("--budgets", type=Path, help="a report whose budgets are to be solved")
    parser.add_argument("--merge", action="store_true", help="keep the output's rows")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--without", action="store_true", help="rows without values made again")
    only.add_argument("--again", action="store_true", help="rows with values made again")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    asked = parser.parse_args()
    before = rows_of(asked.budgets) if asked.budgets else []
    given: dict[tuple[object, ...], int] = {
        (r.model, r.machine, r.recompute, r.share): r.budget_bytes for r in before
    }
    found = rows_of(asked.output) if asked.merge else []
    others = runs_before(asked.output) if asked.merge else []
    kept: dict[tuple[object, ...], Row] = {
        (r.model, r.machine, r.recompute, r.share): r for r in found
    }
    recomputes = (False,) if asked.without else (True,) if asked.again else (False, True)
    for model in STEPS:
        if asked.only not in model:
            continue
        dataflow = traced(model, asked.steps)
        machines = asked.machine or MACHINES
        for each in rows(model, dataflow, machines, recomputes, asked.work_limit, given, kept):
            found.append(each)
            print(each, each.gap, flush=True)
            result = {
                "work_limit": asked.work_limit,
                "summary": summary(found),
                "rows": [asdict(r) | {"gap": r.gap} for r in found],
                "before": [asdict(r) | {"gap": r.gap} for r in before],
                "others": others,
            }
            write_report(asked.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()
