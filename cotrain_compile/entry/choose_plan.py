"""Choose a plan: for a problem, the one in the file that the options name, else the solver's, which
may have been found before.

A saved plan is refused where it was made for another step, or for more than the options allow.

Plan cache: plans on disk, for the next process that trains the same step on the same machine.

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
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import FormatError, PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.options import as_option_error
from cotrain_compile.options.parts import PlanningOptions
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.placement.search.reuse_placement import rest_on_host, reuse_placement
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.disk_cache import folder_of, keep_at_most, package_digest
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.text.describe import describe_differences

_ANEW = "homes, updates and what is offloaded are the plan's, and copies are scheduled anew"


def plan_for(
    problem: Problem,
    options: PlanningOptions,
    compiled: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan in the file that `options` name, else what the solver finds for their policy.

    `compiled` is as for `solve_settings`. `progress` is told what is being done.
    Raises `PlacementError` with the shortfall when the policy does not fit the budgets, and as
    `saved_plan` does.
    """
    if options.plan is not None:
        return saved_plan(options.plan, problem, options, compiled)
    settings = solve_settings(options, compiled)

    def find(before: Sequence[Plan] = ()) -> Plan:
        return solve(problem, settings, progress=progress, incumbents=before)

    plan = cached(problem, settings, find) if options.plan_cache else find()
    if options.rests_on == "host":
        return rest_on_host(problem, plan, compiled=bool(settings.compiled))
    return plan


def plan_as_before(
    problem: Problem, options: PlanningOptions, before: Placement, *, compiled: bool
) -> Plan | None:
    """A plan with the placement that the training ran with `before`; None where none is to be had.

    So is a plan in a file used for what the training's step becomes: other sizes, or a learning
    rate that a scheduler has changed and that is an input from then on. For the step that it was
    made for it is read again.
    """
    if options.plan is not None:
        with as_option_error("plan", options.plan):
            saved = load_plan(options.plan)
        if saved.fingerprint == problem.dataflow.fingerprint:
            return None
    plan = reuse_placement(problem, before, compiled=compiled)
    if plan is None or options.plan is None:
        return plan
    told = (
        f"plan {options.plan} was made for this step as it was before sizes, or values that were "
        f"fixed, became others: {_ANEW}"
    )
    return replace(plan, notes=(*plan.notes, told))


def solve_settings(options: PlanningOptions, compiled: bool | None = None) -> SolveSettings:
    """What `options` say of how to look for a plan.

    `compiled` says whether the ops will run as compiled code; None, where no step is at hand: as
    on the machine's device.
    """
    return SolveSettings(
        policy=options.policy,
        solver=options.solver,
        work_limit=options.work_limit,
        time_limit_s=options.time_limit,
        gap=options.gap,
        seed=options.seed,
        overlap_steps=options.overlap_steps,
        speculate=options.speculate != "off",
        hedged=options.speculate == "auto",
        recompute=options.recompute != "off",
        compiled=compiled,
        micro_batch_order=options.micro_batch_order,
        split=options.split != "off",
    )


def saved_plan(
    path: str, problem: Problem, options: PlanningOptions, compiled: bool | None = None
) -> Plan:
    """The plan saved at `path`, made for the step of `problem`, on whichever machine.

    Where only what optimizers compute is another, as with another learning rate or one that is an
    input, its placement is scheduled anew, and a note says so. `compiled` is as for `schedule`.
    Raises `PlanError` when it was made for another step, with up to three differences, for more
    memory than `options` allow, or with overlapping steps, updates on guesses, values made again,
    micro-batches by layer or regions in parts where they do not; `OptionError` and `FormatError`
    when there is no plan in the file.
    """
    with as_option_error("plan", path):
        plan = load_plan(path)
    anew = _with_other_updates(path, plan, problem, compiled=bool(compiled))
    if anew is None:
        _refuse_another_step(path, plan, problem.dataflow)
    if plan.deferred and not options.overlap_steps:
        raise PlanError(
            f"plan {path} lets host updates go on under the next step, which only the option "
            "overlap_steps allows: set it to True, or solve the step again without --overlap-steps"
        )
    if plan.speculations and options.speculate == "off":
        raise PlanError(
            f"plan {path} begins {len(plan.speculations)} updates before the norm is known, which "
            "only the option speculate allows: set it to 'auto' or 'on', or solve the step again "
            "without --speculate"
        )
    if plan.placement.recomputed and options.recompute == "off":
        raise PlanError(
            f"plan {path} makes {len(plan.placement.recomputed)} values again for the backward, "
            "but the option recompute is 'off': leave it out, or solve the step again with "
            "--recompute off"
        )
    if plan.placement.layers_per_pack and options.micro_batch_order == "as-written":
        raise PlanError(
            f"plan {path} runs micro-batches layer by layer, but the option micro_batch_order is "
            "'as-written': leave it out, or solve the step again with "
            "--micro-batch-order as-written"
        )
    if plan.placement.splits and options.split == "off":
        raise PlanError(
            f"plan {path} runs {', '.join(sorted(plan.placement.splits))} in parts, but the option "
            "split is 'off': leave it out, or solve the step again with --split off"
        )
    _refuse_more_memory(path, plan, problem, options)
    return anew or plan


def _with_other_updates(path: str, plan: Plan, problem: Problem, *, compiled: bool) -> Plan | None:
    if not differ_in_updates_alone(plan.fingerprint, problem.dataflow.fingerprint):
        return None
    anew = reuse_placement(problem, plan.placement, compiled=compiled)
    if anew is None:
        return None
    told = (
        f"plan {path} was made for this step with other numbers in its optimizers, as another "
        f"learning rate or a constant one: {_ANEW}"
    )
    return replace(anew, notes=(*anew.notes, told))


def _refuse_another_step(path: str, plan: Plan, dataflow: Dataflow) -> None:
    differences = describe_differences(plan, dataflow)
    if differences or plan.fingerprint != dataflow.fingerprint:
        told = "; ".join(differences[:3]) or "names agree, but shapes or arguments of ops differ"
        raise PlanError(
            f"plan {path} was made for another step ({plan.fingerprint}, this one is "
            f"{dataflow.fingerprint}): {told}; trace and solve this step again"
        )


def _refuse_more_memory(path: str, plan: Plan, problem: Problem, options: PlanningOptions) -> None:
    asked = {
        Tier.DEVICE: ("memory_budget", options.memory_budget),
        Tier.HOST: ("host_memory_budget", options.host_memory_budget),
        Tier.DISK: ("disk_budget", options.disk_budget),
    }
    for tier, (option, size) in asked.items():
        # Where the user set no budget, what counts is what the plan needs of this machine.
        of_plan = plan.predicted.peak_bytes if size is None else plan.budgets
        needed, allowed = of_plan.get(tier, 0), problem.budgets.get(tier, 0)
        if needed > allowed:
            raise PlanError(
                f"plan {path} was made for {format_bytes(needed)} on the {tier.value}, but "
                f"{option} is {format_bytes(allowed)}; raise it, or solve the step "
                f"again with --{option.replace('_', '-')} {allowed}"
            )


def differ_in_updates_alone(fingerprint: str, other: str) -> bool:
    """Whether two steps are the same up to what their optimizers compute, names of nodes aside.

    So are a step whose learning rate is a constant, the same at another rate, and with the rate as
    an input.
    """
    return fingerprint != other and fingerprint.split("-")[0] == other.split("-")[0]


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
