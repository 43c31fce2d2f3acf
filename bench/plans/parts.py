"""Is a plan with regions in parts ever slower than one without? Real steps, simulated.

Saved steps on machines, each within budgets of so many times the least that the step with whole ops
needs, with the option `split` "off" and "auto", each searched for on its own and checked. Nothing
is run. Rows that the output has are kept; with `--seconds` no cell begins after that time.

    python -m bench.plans.parts -o bench/results/parts.json --work-limit 3 gpt2.json vit_l.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.plans.stopwatch import stopwatch
from bench.plans.tight import least_bytes
from bench.report import runs_before, write_report
from bench.results_page.tables import markdown
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds

MACHINES = ("rtx4090", "h100", "t4")
SHARES = (1.1, 0.95)
HOST_BYTES = 2 << 40


@dataclass(frozen=True)
class Row:
    """A step on a machine in `share` times the least of whole ops; None where no plan was found."""

    step: str
    machine: str
    share: float
    budget_bytes: int
    whole_s: float | None
    auto_s: float | None
    splits: dict[str, int]
    processor_s: float

    @property
    def is_slower(self) -> bool:
        """Whether parts have made it slower, or have lost a plan that there is without."""
        if self.whole_s is None:
            return False
        return self.auto_s is None or self.auto_s > self.whole_s * (1 + 1e-9)

    @property
    def gain(self) -> float | None:
        """By how much of the step without parts the one with them is faster."""
        return 1 - self.auto_s / self.whole_s if self.auto_s and self.whole_s else None


def planned(problem: Problem, settings: SolveSettings) -> Plan | None:
    """The plan, checked; None where there is none."""
    try:
        plan = solve(problem, settings)
    except PlacementError:
        return None
    check(problem, plan)
    return plan


def row(step: str, problem: Problem, share: float, work_limit: float) -> Row:
    """Search for the plans of a cell."""
    whole, auto = (
        SolveSettings(work_limit=work_limit, time_limit_s=1e6, split=split)
        for split in (False, True)
    )
    with stopwatch() as took:
        without, best = planned(problem, whole), planned(problem, auto)
    return Row(
        step,
        problem.machine.name,
        share,
        problem.budgets[Tier.DEVICE],
        without.predicted.makespan_s if without else None,
        best.predicted.makespan_s if best else None,
        dict(best.placement.splits) if best else {},
        took.processor_s,
    )


def rows(paths: Sequence[Path], kept: Sequence[Row], work_limit: float) -> Iterator[Row]:
    """All cells that are not `kept`, a machine and a share after the other."""
    places = {(each.step, each.machine, each.share) for each in kept}
    least: dict[Path, int] = {}
    for share, machine, path in product(SHARES, MACHINES, paths):
        if (path.stem, machine, share) in places:
            continue
        budgets = {Tier.DEVICE: 0, Tier.HOST: HOST_BYTES}
        problem = formulate(load(path, Dataflow), presets.find(machine), budgets)
        if path not in least:  # the same on every machine
            least[path] = least_bytes(problem, SolveSettings(split=False))
        cell = problem.with_budget(Tier.DEVICE, int(share * least[path]))
        yield row(path.stem, cell, share, work_limit)


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """In how many cells parts are slower, faster, or make a plan possible."""
    return {
        "cells": len(found),
        "slower": sum(each.is_slower for each in found),
        "faster": sum((each.gain or 0.0) > 1e-9 for each in found),
        "only_in_parts": sum(each.whole_s is None and each.auto_s is not None for each in found),
        "no_plan": sum(each.whole_s is None and each.auto_s is None for each in found),
    }


def table(result: Mapping[str, Any]) -> str:
    """A row for each cell, and what is to be said of all of them."""
    found = [Row(**each) for each in result["rows"]]
    cells = [
        (
            f"{each.step}, {each.machine}",
            f"{each.share:g} ×, {format_bytes(each.budget_bytes)}",
            format_seconds(each.whole_s) if each.whole_s else "does not fit",
            format_seconds(each.auto_s) if each.auto_s else "does not fit",
            _in_words(each.splits),
        )
        for each in found
    ]
    told = result["summary"]
    return (
        markdown(("step and machine", "budget", "whole", "auto", "in parts"), cells)
        + f"\n{told['cells']} cells: slower in {told['slower']}, faster in {told['faster']}; only "
        f"in parts {told['only_in_parts']} fit, {told['no_plan']} do not fit at all.\n"
    )


def _in_words(splits: Mapping[str, int]) -> str:
    kinds = {name.partition(".")[0]: parts for name, parts in splits.items()}
    return ", ".join(f"{kind} {parts}" for kind, parts in sorted(kinds.items())) or "-"


def main() -> None:
    """Search for every cell that the output lacks, and write it as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("steps", type=Path, nargs="+", help="saved steps")
    parser.add_argument("--seconds", type=float, help="no cell begins after so many")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    asked = parser.parse_args()
    began, found, others = time.monotonic(), list[Row](), list[dict[str, str]]()
    if asked.output.exists():
        kept = json.loads(asked.output.read_text())["result"]["rows"]
        found, others = [Row(**each) for each in kept], runs_before(asked.output)
    for each in rows(asked.steps, tuple(found), asked.work_limit):
        found.append(each)
        print(each, each.gain, "SLOWER" * each.is_slower, flush=True)
        result = {
            "work_limit": asked.work_limit,
            "summary": summary(found),
            "rows": [asdict(one) for one in found],
            "others": others,
        }
        write_report(asked.output, (__doc__ or "").splitlines()[0], result)
        if asked.seconds and time.monotonic() - began > asked.seconds:
            break


if __name__ == "__main__":
    main()
