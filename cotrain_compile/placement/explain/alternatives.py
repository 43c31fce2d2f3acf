"""Alternatives: one parameter with every other strategy, scheduled and simulated again.

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
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.strategies import Strategy, strategy_of
from cotrain_compile.placement.placed import PlacedStep, place, place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.attempts import TACTICS
from cotrain_compile.placement.simulate.predict import step_s
from cotrain_compile.plan import Placement, Plan, Transfer

STAYS = Strategy(mode=None, fetches=0)


@dataclass(frozen=True)
class Alternative:
    """A parameter with `strategy`.

    `step_s`, `peak_bytes` on the device and `traffic_bytes` over the link both ways are of the
    whole step, None where it does not fit; `shortfall_bytes` are missing then.
    """

    strategy: Strategy
    step_s: float | None
    peak_bytes: int | None
    traffic_bytes: int | None
    shortfall_bytes: int = 0


def current(problem: Problem, plan: Plan, param: str) -> Alternative:
    """`param` as `plan` keeps it: the plan's own tasks, simulated with the costs of `problem`."""
    placed = place_plan(problem, plan)
    return _of(placed, strategy_in(problem, plan.placement, param), step_s(placed))


def alternatives(
    problem: Problem,
    plan: Plan,
    param: str,
    *,
    progress: Callable[[Strategy], None] = lambda strategy: None,
) -> tuple[Alternative, ...]:
    """`param` with every other strategy that fits it, fastest first, what does not fit last.

    Raises `PlanError` when the step has no such parameter. `progress` is told each strategy before
    it is tried.
    """
    now = strategy_in(problem, plan.placement, param)
    found = []
    for strategy in strategies_for(problem, param):
        if strategy != now:
            progress(strategy)
            found.append(_tried(problem, plan.placement, param, strategy))
    return tuple(sorted(found, key=lambda a: (a.step_s is None, a.step_s or 0, a.shortfall_bytes)))


def strategies_for(problem: Problem, param: str) -> tuple[Strategy, ...]:
    """The strategies that fit `param`; raises `PlanError` when there is no such parameter.

    There is none but to stay for what the step does not use, or writes without an update group.
    """
    for decision in decision_space(problem).params:
        if param in decision.cluster.params:
            return decision.strategies
    if any(b.name == param and b.role is Role.PARAM for b in problem.dataflow.buffers):
        return (STAYS,)
    raise PlanError(_unknown(problem, param))


def strategy_in(problem: Problem, placement: Placement, param: str) -> Strategy:
    """The strategy of `param` in `placement`; raises `PlanError` when there is no such one."""
    try:
        return every_strategy(problem, placement)[param]
    except KeyError:
        raise PlanError(_unknown(problem, param)) from None


def every_strategy(problem: Problem, placement: Placement) -> Mapping[str, Strategy]:
    """The strategy of each parameter in `placement`."""
    dataflow, copies = problem.dataflow, low_precision_copies(problem.dataflow)
    params = [buffer.name for buffer in dataflow.buffers if buffer.role is Role.PARAM]
    return {
        param: strategy_of(dataflow, placement, param, copies.get(param, param)) for param in params
    }


def with_strategy(
    problem: Problem, placement: Placement, param: str, strategy: Strategy
) -> Placement:
    """`placement` with `strategy` for `param`, all else as it is."""
    dataflow = problem.dataflow
    fetched = low_precision_copies(dataflow).get(param, param)
    placed = strategy.placed(dataflow, param, fetched)
    group = dataflow.update.get(param)
    own = {fetched, group.gradient} if group else {fetched}
    return replace(
        placement,
        homes={**placement.homes, **placed.homes},
        updates={**placement.updates, **placed.updates},
        away=(*(name for name in placement.away if name not in own), *placed.away),
        speculative=(*(p for p in placement.speculative if p != param), *placed.speculative),
    )


def _tried(problem: Problem, placement: Placement, param: str, strategy: Strategy) -> Alternative:
    """The faster of the ways to schedule it, as the ladder does with what it decides."""
    changed = with_strategy(problem, placement, param, strategy)
    drafts: list[Draft] = []
    shortfall_bytes = 0
    for tactics in TACTICS:
        try:
            drafts.append(draft(problem, changed, tactics=tactics))
        except PlacementError as refusal:
            shortfall_bytes = refusal.shortfall_bytes
    if not drafts:
        return Alternative(strategy, None, None, None, shortfall_bytes)
    best = min(drafts, key=lambda found: found.step_s)
    return _of(place(problem, best.placement, best.tasks, best.moved), strategy, best.step_s)


def _of(placed: PlacedStep, strategy: Strategy, step_s: float) -> Alternative:
    traffic = sum(task.nbytes for task in placed.tasks if isinstance(task, Transfer))
    return Alternative(strategy, step_s, max(placed.device_bytes, default=0), traffic)


def _unknown(problem: Problem, param: str) -> str:
    params = [b.name for b in problem.dataflow.buffers if b.role is Role.PARAM]
    near = difflib.get_close_matches(param, params, n=3, cutoff=0.4)
    hint = f"near are {', '.join(near)}" if near else f"it has {', '.join(params[:3])}, ..."
    return f"the step has no parameter {param!r}; {hint}"
