"""Alternatives: one parameter kept in every other way, scheduled and simulated again.

In: a Problem, a plan of it and the name of a parameter. Out: what the step would take with that
parameter alone changed, or how many bytes are missing. The rest of the placement stays, so an
alternative that only pays together with another change looks worse here than to the solver.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cotrain_compile.dataflow import Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.choices import Way, keep
from cotrain_compile.placement.find_choices import choices_of
from cotrain_compile.placement.predict import step_s
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import device_bytes, device_program, thin_copies
from cotrain_compile.placement.schedule import Draft, draft
from cotrain_compile.placement.solve import TACTICS
from cotrain_compile.plan import Placement, Plan, Transfer

STAYS = Way(mode=None, trips=0)


@dataclass(frozen=True)
class Alternative:
    """A parameter kept in `way`.

    `step_s`, `peak_bytes` on the device and `traffic_bytes` over the link both ways are of the
    whole step, None where it does not fit; `shortfall_bytes` are missing then.
    """

    way: Way
    step_s: float | None
    peak_bytes: int | None
    traffic_bytes: int | None
    shortfall_bytes: int = 0


def current(problem: Problem, plan: Plan, param: str) -> Alternative:
    """`param` as `plan` keeps it: the plan's own tasks, simulated with the costs of `problem`."""
    own_s = step_s(problem, plan.placement, plan.tasks, plan.moved)
    own = Draft(plan.placement, plan.tasks, plan.moved, own_s)
    return _of(problem, way_of(problem, plan.placement, param), own)


def alternatives(
    problem: Problem,
    plan: Plan,
    param: str,
    *,
    progress: Callable[[Way], None] = lambda way: None,
) -> tuple[Alternative, ...]:
    """`param` in every other way that a plan knows, fastest first, what does not fit last.

    Raises `PlanError` when the step has no such parameter. `progress` is told each way before it is
    tried.
    """
    now = way_of(problem, plan.placement, param)
    found = []
    for way in ways_of(problem, param):
        if way != now:
            progress(way)
            found.append(_tried(problem, plan.placement, param, way))
    return tuple(sorted(found, key=lambda a: (a.step_s is None, a.step_s or 0, a.shortfall_bytes)))


def ways_of(problem: Problem, param: str) -> tuple[Way, ...]:
    """The ways in which a plan can keep `param`; raises `PlanError` when there is no such one.

    There is none but to stay for what the step does not use, or writes without an update group.
    """
    for bundle in choices_of(problem).weights:
        if param in bundle.params:
            return bundle.ways
    if any(b.name == param and b.role is Role.PARAM for b in problem.dataflow.buffers):
        return (STAYS,)
    raise PlanError(_unknown(problem, param))


def way_of(problem: Problem, placement: Placement, param: str) -> Way:
    """The way in which `placement` keeps `param`; raises `PlanError` when there is no such one."""
    try:
        return every_way(problem, placement)[param]
    except KeyError:
        raise PlanError(_unknown(problem, param)) from None


def every_way(problem: Problem, placement: Placement) -> Mapping[str, Way]:
    """The way in which `placement` keeps each parameter."""
    dataflow, thin, away = problem.dataflow, thin_copies(problem.dataflow), set(placement.away)
    ways = {}
    for buffer in dataflow.buffers:
        if buffer.role is not Role.PARAM:
            continue
        param, trips = buffer.name, 0
        if placement.homes.get(param) is Tier.HOST:
            trips = 2 if thin.get(param, param) in away else 1
        group = dataflow.update.get(param)
        gradient_away = group is not None and group.gradient in away
        ways[param] = Way(placement.updates.get(param), trips, gradient_away)
    return ways


def with_way(problem: Problem, placement: Placement, param: str, way: Way) -> Placement:
    """`placement` with `param`, its states and its gradient kept in `way`, all else as it is."""
    dataflow = problem.dataflow
    fetched = thin_copies(dataflow).get(param, param)
    kept = keep(dataflow, param, fetched, way)
    group = dataflow.update.get(param)
    own = {fetched, group.gradient} if group else {fetched}
    return replace(
        placement,
        homes={**placement.homes, **kept.homes},
        updates={**placement.updates, **kept.updates},
        away=(*(name for name in placement.away if name not in own), *kept.away),
    )


def _tried(problem: Problem, placement: Placement, param: str, way: Way) -> Alternative:
    """The faster of the ways to schedule it, as the ladder does with what it decides."""
    changed = with_way(problem, placement, param, way)
    drafts: list[Draft] = []
    shortfall_bytes = 0
    for tactics in TACTICS:
        try:
            drafts.append(draft(problem, changed, tactics=tactics))
        except PlacementError as refusal:
            shortfall_bytes = refusal.shortfall_bytes
    if not drafts:
        return Alternative(way, None, None, None, shortfall_bytes)
    return _of(problem, way, min(drafts, key=lambda found: found.step_s))


def _of(problem: Problem, way: Way, found: Draft) -> Alternative:
    program = device_program(problem.dataflow, found.placement, found.moved)
    used = device_bytes(program, found.placement, found.tasks)
    traffic = sum(task.nbytes for task in found.tasks if isinstance(task, Transfer))
    return Alternative(way, found.step_s, max(used, default=0), traffic)


def _unknown(problem: Problem, param: str) -> str:
    params = [b.name for b in problem.dataflow.buffers if b.role is Role.PARAM]
    near = difflib.get_close_matches(param, params, n=3, cutoff=0.4)
    hint = f"near are {', '.join(near)}" if near else f"it has {', '.join(params[:3])}, ..."
    return f"the step has no parameter {param!r}; {hint}"
