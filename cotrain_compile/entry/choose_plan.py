"""Choose a plan: for a problem, the one in the file that the options name, else the solver's, which
may have been found before.

A saved plan is refused where it was made for another step, or for more than the options allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.plan_cache import cached
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.options import as_option_error
from cotrain_compile.options.parts import PlanningOptions
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.placement.search.reuse_placement import rest_on_host, reuse_placement
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.units import format_bytes
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
