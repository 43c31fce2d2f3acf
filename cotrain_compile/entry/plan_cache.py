"""Plan cache: plans on disk, for the next process that trains the same step on the same machine.

A plan is kept under a digest of all that it was found from: the dataflow, the machine and the costs
on it, what was asked of the search, the versions of what searches. Budgets are beside it, since
they follow what is free where the user gives none: a plan is used in any budgets that hold its
peaks and are hardly larger than those that it was made for. In larger ones it is what a search has
to beat. The plans used last stay, up to `MOST_BYTES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

from cotrain_compile import files
from cotrain_compile.errors import FormatError, PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.placement.search.solve import SolveSettings
from cotrain_compile.plan import Plan
from cotrain_compile.support.disk_cache import folder_of, keep_at_most, package_digest
from cotrain_compile.support.units import format_bytes, format_seconds

MOST_BYTES = 256 << 20
# What is free differs a little from run to run. With so much more a plan is hardly faster.
HARDLY_MORE = 1.02


def cached(
    problem: Problem, settings: SolveSettings, find: Callable[[Sequence[Plan]], Plan]
) -> Plan:
    """The plan that was found before for `problem`, checked, else what `find` gives, kept.

    `find` is given the plans that were found for less memory, so that more memory never gives a
    slower plan; nor is one used that is slower than these. A file that cannot be read, or holds no
    sound plan for this step, counts as absent; where none can be written nothing is kept.
    """
    folder = folder_of("plans")
    if folder is None:
        return find(())
    digest = digest_of(problem, settings)
    kept = [entry for entry in _kept(folder, digest) if entry.fits(problem)]
    before: list[Plan] = []
    for entry in sorted(kept, key=lambda entry: entry.order):
        if (plan := _checked(problem, entry)) is not None:
            if not before and entry.is_hardly_less_than(problem):
                return plan
            before.append(plan)
    plan = find(before)
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


@dataclass(frozen=True)
class _Entry:
    """A plan on disk."""

    path: Path
    plan: Plan

    @property
    def order(self) -> tuple[float, int]:
        """The fastest first, and of those as fast the one with most memory."""
        return self.plan.predicted.makespan_s, -self.plan.budgets[Tier.DEVICE]

    def fits(self, problem: Problem) -> bool:
        """Whether the budgets of `problem` hold its peaks."""
        peaks = self.plan.predicted.peak_bytes
        return all(nbytes <= problem.budgets.get(tier, 0) for tier, nbytes in peaks.items())

    def is_hardly_less_than(self, problem: Problem) -> bool:
        """Whether it was made for about the budgets of `problem`."""
        made_for = self.plan.budgets
        return all(n <= HARDLY_MORE * made_for.get(tier, 0) for tier, n in problem.budgets.items())


def _kept(folder: Path, digest: str) -> Iterator[_Entry]:
    """The plans that were found before, for any budgets."""
    for path in folder.glob(f"{digest}-*.json"):
        with suppress(FormatError, OSError):
            yield _Entry(path, load_plan(path))


def _checked(problem: Problem, entry: _Entry) -> Plan | None:
    """The plan of `entry` in the budgets of `problem`, None where it is not sound."""
    kept = entry.plan
    plan = replace(kept, budgets=problem.budgets, notes=(*kept.notes, _told(kept, problem)))
    try:
        check(problem, plan)
        entry.path.touch()  # the plans used last stay
    except (PlacementError, PlanError, OSError):
        return None
    return plan


def _told(plan: Plan, problem: Problem) -> str:
    took = f" in {format_seconds(plan.report.seconds)}" if plan.report else ""
    told = f"this plan was found before{took}, and kept on disk"
    if any(nbytes > plan.budgets.get(tier, 0) for tier, nbytes in problem.budgets.items()):
        had = ", ".join(
            f"{format_bytes(plan.budgets[tier])} on the {tier.value}" for tier in plan.tiers
        )
        told += f", for a little less memory than there is ({had}): so is its bound"
    return told


def _keep(plan: Plan, folder: Path, digest: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    budgets = "-".join(str(plan.budgets[tier]) for tier in plan.tiers)
    files.save(plan, folder / f"{digest}-{budgets}.json")
    keep_at_most(folder, MOST_BYTES)
