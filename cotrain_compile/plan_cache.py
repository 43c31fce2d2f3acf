"""Plan cache: plans on disk, for the next process that trains the same step on the same machine.

A plan is kept under a digest of all that it was found from: the dataflow, the machine and the costs
on it, what was asked of the search, the versions of what searches. Budgets are beside it, since
they follow what is free where the user gives none: a plan is used in any budgets that hold its
peaks and are hardly larger than those that it was made for. The plans used last stay, up to
`MOST_BYTES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from cotrain_compile import files
from cotrain_compile.disk_cache import folder_of, keep_at_most, package_digest
from cotrain_compile.errors import FormatError, PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.placement.search.solve import SolveSettings
from cotrain_compile.plan import Plan
from cotrain_compile.units import format_bytes, format_seconds

MOST_BYTES = 256 << 20
# What is free differs a little from run to run. With so much more a plan is hardly faster.
HARDLY_MORE = 1.02


def cached(problem: Problem, settings: SolveSettings, find: Callable[[], Plan]) -> Plan:
    """The plan that was found before for `problem`, checked, else what `find` gives, kept.

    A file that cannot be read, or holds no sound plan for this step, counts as absent; where none
    can be written nothing is kept.
    """
    folder = folder_of("plans")
    if folder is None:
        return find()
    digest = digest_of(problem, settings)
    for path in _fitting(folder, digest, problem):
        if (plan := _read(path, problem)) is not None:
            return plan
    plan = find()
    if plan.tasks or plan.placement.recomputed:  # else there was nothing to search
        with suppress(OSError):
            _keep(plan, folder, digest)
    return plan


def digest_of(problem: Problem, settings: SolveSettings) -> str:
    """Of all that a plan depends on but the budgets."""
    costs = problem.costs
    parts = (
        files.to_json(problem.dataflow.for_machines()),
        files.to_json(problem.machine),
        files.to_json(costs),
        repr((problem.captured, problem.recomputed, settings)),
        _searcher(),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


@cache
def _searcher() -> str:
    """What searches: this package and the solvers."""
    return " ".join((package_digest(), *(version(name) for name in ("highspy", "pulp"))))


def _fitting(folder: Path, digest: str, problem: Problem) -> Iterator[Path]:
    """Plans made for budgets that are hardly less than those at hand, the largest first."""
    found = []
    for path in folder.glob(f"{digest}-*.json"):
        with suppress(ValueError):
            device, host = map(int, path.stem.split("-")[1:])
            made_for = {Tier.DEVICE: device, Tier.HOST: host}
            if all(problem.budgets[tier] <= HARDLY_MORE * made_for[tier] for tier in Tier):
                found.append((device, host, path))
    return (path for *_, path in sorted(found, reverse=True))


def _read(path: Path, problem: Problem) -> Plan | None:
    """The plan at `path` where it fits and is sound."""
    try:
        kept = load_plan(path)
        if any(kept.predicted.peak_bytes[tier] > problem.budgets[tier] for tier in Tier):
            return None
        plan = replace(kept, budgets=problem.budgets, notes=(*kept.notes, _told(kept, problem)))
        check(problem, plan)
        path.touch()  # the plans used last stay
    except (FormatError, PlacementError, PlanError, OSError):
        return None
    return plan


def _told(plan: Plan, problem: Problem) -> str:
    took = f" in {format_seconds(plan.report.seconds)}" if plan.report else ""
    told = f"this plan was found before{took}, and kept on disk"
    if any(problem.budgets[tier] > plan.budgets[tier] for tier in Tier):
        had = ", ".join(f"{format_bytes(plan.budgets[tier])} on the {tier.value}" for tier in Tier)
        told += f", for a little less memory than there is ({had}): so is its bound"
    return told


def _keep(plan: Plan, folder: Path, digest: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    budgets = "-".join(str(plan.budgets[tier]) for tier in (Tier.DEVICE, Tier.HOST))
    files.save(plan, folder / f"{digest}-{budgets}.json")
    keep_at_most(folder, MOST_BYTES)
