"""Solve report: how a plan was found, in figures and in words.

In: the plan, and what the solver of the integer program came back with, if one ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite

from cotrain_compile.analysis.costs import unknown_words
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.dataflow.guesses import guesses_of, second_bytes
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import has_recasts
from cotrain_compile.placement.milp.solvers import Solution, pick
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.placement.simulate.works import issuing_s, starts_of
from cotrain_compile.plan import Milestone, Plan, SolveReport, UpdateMode
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_bytes, format_seconds


def report_of(
    problem: Problem,
    plan: Plan,
    solution: Solution | None,
    *,
    solver: str,
    seed: int,
    seconds: float,
    bound_s: float,
    rounds: int,
    simulated_s: Mapping[str, float],
    work: float,
    bound_work: float,
    course: Sequence[Milestone],
    ended: str,
) -> SolveReport:
    """The figures of a plan. `bound_s` is certified, 0 where there is none.

    `solver` is the one that was asked for, `simulated_s` the step time of each way that fits;
    `work` and what follows are as in a report.
    """
    step_s = plan.predicted.makespan_s
    claim = solution if solution is not None and solution.decisions is not None else None
    return SolveReport(
        solver="rules" if solution is None or solution.failure else pick(solver),
        status=solution.status if solution else "not needed",
        seed=seed,
        seconds=seconds,
        objective_s=_finite(claim.step_s) if claim else None,
        bound_s=_finite(claim.bound_s) if claim else None,
        lower_bound_s=min(bound_s, step_s),
        gap=step_s / bound_s - 1.0 if bound_s else 0.0,
        rounds=rounds,
        simulated_s=simulated_s,
        unknown_ops=len(problem.unknown_ops),
        unknown_bytes=sum(op.bytes_moved for op in problem.unknown_ops),
        work=work,
        bound_work=bound_work,
        course=tuple(course),
        ended=ended,
    )


def notes_of(
    problem: Problem,
    plan: Plan,
    name: str,
    solution: Solution | None,
    *,
    asked: str,
    solver: str,
) -> tuple[str, ...]:
    """All that is to be said of a plan found by the way called `name`, where `asked` was for."""
    return (
        *note_on_budget(problem),
        *notes_on(name, solution, asked=asked, solver=solver),
        *notes_on_step(problem),
        *note_on_checkpoints(problem, plan),
        *note_on_casts(problem, plan),
        *note_on_loops(problem, plan),
        *note_on_issuing(problem, plan),
        *note_on_guesses(problem, plan),
        *note_on_early_updates(problem, plan),
    )


def note_on_guesses(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """What it brings to begin updates before the norm is known, and what if it is wrong."""
    if not plan.speculations:
        return ()
    found, dataflow = outcomes(problem, plan), problem.dataflow
    groups = [dataflow.update[task.param] for task in plan.speculations]
    saved = format_bytes(sum(second_bytes(dataflow, group) for group in groups))
    return (
        f"{len(groups)} updates on the host begin before the gradients' norm, or a scaler's flag, "
        f"is known, and save {saved} on the host: {format_seconds(found.right_s)} a step, "
        f"{format_seconds(found.wrong_s)} where it clips or skips after all, "
        f"{format_seconds(found.held_back_s)} where they wait. That pays while fewer than "
        f"{found.pays_below:.0%} of steps do",
    )


def note_on_early_updates(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Where the rule that begins updates early cannot, as all of them wait for all gradients."""
    placement = plan.placement
    early = placement.policy == "coarse" or placement.policy.startswith("fraction")
    hosted = {p for p, mode in placement.updates.items() if mode is UpdateMode.HOST}
    if not early or plan.speculations or not hosted or hosted - guesses_of(problem.dataflow).keys():
        return ()
    return (
        "updates on the host wait for the gradients' norm, or a scaler's flag, so that none begins "
        f"with its gradient: {placement.policy} does what zero-offload does with as many of them. "
        "speculate='on' begins them before",
    )


def notes_on_step(problem: Problem) -> tuple[str, ...]:
    """What of the step costs more than it has to, and what of its cost is not known."""
    unknown = problem.unknown_ops
    if not unknown:
        return problem.dataflow.notes
    return (
        *problem.dataflow.notes,
        f"{unknown_words(unknown)}: their seconds are those of their bytes, the least that they "
        "can take. Measure them (option `profile`), or register a formula with "
        "torch.utils.flop_counter",
    )


def note_on_checkpoints(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """What became of the user's checkpoints, where the step has any."""
    dataflow, checkpoints = problem.dataflow, problem.dataflow.checkpoints
    if not checkpoints.values:
        return ()
    told = _values_in_words(dataflow, checkpoints.values)
    if not checkpoints.dissolved:
        return (
            f"torch.utils.checkpoint is respected: it has {told} recomputed; "
            "checkpoints='dissolve' leaves that to the plan",
        )
    again = frozenset(plan.placement.recomputed).intersection(checkpoints.values)
    kept = "none of them" if not again else _values_in_words(dataflow, again)
    return (f"torch.utils.checkpoint is dissolved: of its {told} the plan recomputes {kept}",)


def _values_in_words(dataflow: Dataflow, names: Collection[str]) -> str:
    nbytes = sum(dataflow.buffer[name].nbytes for name in names)
    return f"{len(names)} values ({format_bytes(nbytes)})"


def note_on_casts(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Weights that come up whole since they are cast more than once."""
    dataflow, placement = problem.step, plan.placement
    if placement.casts_once or not has_recasts(dataflow):
        return ()
    once, buffer = low_precision_copies(dataflow), dataflow.buffer
    again = [
        buffer[group.param].nbytes - buffer[group.low_precision].nbytes
        for group in dataflow.updates
        if group.low_precision and group.param not in once and placement.is_off_device(group.param)
    ]
    if not again:
        return ()
    return (
        f"{len(again)} weights are cast for each micro-batch, or again by a checkpoint, so that "
        f"they come up whole, {format_bytes(sum(again))} more than in low precision: one copy for "
        "all uses takes more memory, or is slower",
    )


def note_on_loops(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Where the host updates parameters without a fused loop."""
    updates = [problem.dataflow.update[region.param] for region in plan.host_updates]
    if problem.captured and updates:
        return (
            f'{len(updates)} updates on the host run op by op, as host_kernels asks; "fused" is '
            "faster",
        )
    captured = [group for group in updates if not group.has_loop]
    if not captured:
        return ()
    return (
        f"{len(captured)} of {len(updates)} updates on the host have no fused loop: they run op by "
        "op, and are priced by the elements that their ops read and write",
    )


def note_on_issuing(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """What Python takes to start the tasks, and how much of it the device waits for."""
    python_s = problem.machine.issue_s * starts_of(plan.tasks)
    if not python_s:
        return ()
    held_s = issuing_s(place_plan(problem, plan))
    waits = f"for {format_seconds(held_s)} of it" if held_s else "for none of it"
    return (
        f"Python takes {format_seconds(python_s)} of a step to start {len(plan.tasks)} tasks; the "
        f"device waits {waits}",
    )


def notes_on(name: str, solution: Solution | None, *, asked: str, solver: str) -> tuple[str, ...]:
    """Where the plan, by the way called `name`, is not by the policy or the solver asked for."""
    if solution is None:
        return ()
    words = plan_words(name)
    if solution.failure:
        return (f"the solver {solver} failed ({solution.failure}); the plan is: {words}",)
    notes = []
    if asked in ("ilp", "lp-round") and name != asked:
        notes.append(f"nothing that {asked} decided fits in the budget; the plan is: {words}")
    if pick(solver) != solver:
        notes.append(f"the solver {solver} is not installed; {pick(solver)} has taken its place")
    if "limit" in solution.status:
        notes.append(f"the solver stopped at its limit; the plan is: {words}")
    return tuple(notes)


def note_on_limit(limit: str, gap: float) -> str:
    """The way on where `limit` ended the search and the plan is `gap`, a fraction, above its bound.

    It begins with the name of an option. `gap` is 0 where there is no bound.
    """
    name = limit.split()[0]
    above = f", and the plan is {gap:.0%} above the bound" if gap else ""
    return f"the search ended at its {limit}{above}: a larger {name} may find a faster one"


def note_on_budget(problem: Problem) -> tuple[str, ...]:
    """Where the device was given more memory than it has."""
    allowed, has = problem.budgets[Tier.DEVICE], problem.machine.device.capacity_bytes
    if allowed <= has:
        return ()
    return (
        f"memory_budget is {format_bytes(allowed)}, above the {format_bytes(has)} that the device "
        f"of {problem.machine.name} has",
    )


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None
