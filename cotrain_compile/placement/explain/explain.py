"""Explain: one parameter of a plan: where it lives, what that costs, and every alternative.

In: a Problem, a plan of it, a parameter. Out: an `Explanation`; as a string it is what people read.
An alternative is the parameter with another strategy, scheduled and simulated again, never a canned
sentence: what the step would take, or how many bytes are missing. The rest of the placement stays,
so one that only pays together with another change looks worse here than to the solver.

A `PlannedStep` is a plan with its step, whether anything runs it or not: predictions, explanations.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import casts_once
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.strategies import Strategy, strategy_of
from cotrain_compile.placement.explain.sensitivity import Limits, limits, slacks
from cotrain_compile.placement.placed import PlacedStep, place, place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.attempts import TACTICS
from cotrain_compile.placement.simulate.engine import Periodic
from cotrain_compile.placement.simulate.predict import predict_steady_state, step_s
from cotrain_compile.placement.simulate.reserved import Reserved, reserved
from cotrain_compile.plan import Lane, Placement, Plan, Timeline, Transfer
from cotrain_compile.support.collector import collector_off
from cotrain_compile.support.units import format_bytes, format_seconds

LANES: Mapping[str, str] = {
    Lane.DEVICE: "device work",
    Lane.HOST: "updates on the host",
    Lane.D2H: "copies device to host",
    Lane.H2D: "copies host to device",
    Lane.DISK_READ: "reads from disk",
    Lane.DISK_WRITE: "writes to disk",
    Lane.NETWORK: "exchanges with other ranks",
}


@dataclass(frozen=True)
class Explanation:
    """Why a parameter is where it is; sizes in bytes, times in seconds.

    `reuse_distance_s` is the work between its gradient and its next use, None where it has none
    (frozen); `host_update_s` what its update takes on the host; `slack_s` how early its copies and
    updates are done, None where it has none. `alternatives` are the same step with this parameter
    alone kept otherwise.
    """

    param: str
    nbytes: int
    state_bytes: int
    current: Alternative
    alternatives: tuple[Alternative, ...]
    reuse_distance_s: float | None
    host_update_s: float | None
    slack_s: float | None
    limits: Limits

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@collector_off()
def explain(
    problem: Problem,
    plan: Plan,
    param: str,
    *,
    progress: Callable[[str], None] = lambda stage: None,
) -> Explanation:
    """Explain `param` in `plan`, which was made for `problem`.

    Costs are those of `problem`. Raises `PlanError` when the step has no such parameter.
    """
    problem = problem.under(plan.placement)
    dataflow, costs = problem.dataflow, problem.costs
    now = current(problem, plan, param)
    tried = alternatives(
        problem, plan, param, progress=lambda strategy: progress(f"trying {strategy.words}")
    )
    progress("simulating what limits the step")
    group = dataflow.update.get(param)
    distance = reuse_distances(dataflow, costs.device_s).get(param)
    return Explanation(
        param=param,
        nbytes=dataflow.buffer[param].nbytes,
        state_bytes=sum(dataflow.buffer[s].nbytes for s in group.states) if group else 0,
        current=now,
        alternatives=tried,
        reuse_distance_s=distance.seconds if distance else None,
        host_update_s=costs.host_update_s[param] if group else None,
        slack_s=slacks(dataflow, plan).get(param),
        limits=limits(problem, plan),
    )


# What lanes gain together beyond what each gains alone, where it is worth telling.
_TOGETHER = 0.1


def limits_words(found: Limits) -> str:
    """What a step hangs on: lanes by weight, and tiers that are full."""
    ranked = sorted(found.shares.items(), key=lambda item: -item[1])
    told = [f"{LANES[lane]} {share:.0%}" for lane, share in ranked if share >= 0.005]
    if found.beside - sum(found.shares.values()) + found.shares.get(Lane.DEVICE, 0.0) >= _TOGETHER:
        told.append(f"all but the device together {found.beside:.0%}")
    full = [f"{tier.value} memory is full" for tier in found.full]
    return ", ".join([*told, *full])


def _lines(said: Explanation) -> Iterator[str]:
    strategy = said.current.strategy
    home = Tier.HOST if strategy.fetches else Tier.DEVICE
    states = f", with {format_bytes(said.state_bytes)} of optimizer states" * bool(said.state_bytes)
    yield f"parameter   {said.param}: {format_bytes(said.nbytes)}{states}"
    yield f"kept        {strategy.words}; the weight is at home on the {home.value}"
    if said.reuse_distance_s is not None and said.host_update_s is not None:
        yield (
            f"window      {format_seconds(said.reuse_distance_s)} of device work from its gradient "
            f"to its next use; its update takes {format_seconds(said.host_update_s)} on the host"
        )
    if said.slack_s is not None:
        yield f"slack       its copies and updates are done {_early(said.slack_s)}"
    yield f"bottleneck  {limits_words(said.limits)}"
    yield "what a step would take with this parameter alone kept otherwise:"
    rows = [_row(said, alternative) for alternative in (said.current, *said.alternatives)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(("", first, *rest)).rstrip()


def _early(slack_s: float) -> str:
    if not slack_s:
        return "just in time: the step waits for one of them"
    return f"at least {format_seconds(slack_s)} before they are waited for"


def _row(said: Explanation, one: Alternative) -> tuple[str, str, str, str, str]:
    words = one.strategy.words
    now = said.current
    if one.step_s is None or one.peak_bytes is None or one.traffic_bytes is None:
        missing = f"{format_bytes(one.shortfall_bytes)} ({one.shortfall_bytes:,} bytes) missing"
        return words, f"does not fit: {missing}", "", "", ""
    assert now.step_s is not None
    assert now.traffic_bytes is not None
    peak = f"peak {format_bytes(one.peak_bytes)}"
    if one is now:
        traffic = f"{format_bytes(one.traffic_bytes)} moved"
        return words, format_seconds(one.step_s), "as planned", peak, traffic
    change_s = one.step_s - now.step_s
    change = f"{_signed(change_s)}{format_seconds(abs(change_s))} ({change_s / now.step_s:+.2%})"
    moved = one.traffic_bytes - now.traffic_bytes
    traffic = f"{_signed(moved)}{format_bytes(abs(moved))} moved"
    return words, format_seconds(one.step_s), change, peak, traffic


def _signed(number: float) -> str:
    return "-" if number < 0 else "+"


class PlannedStep:
    """`problem` is what had to be decided, `plan` what was."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem = problem
        self.plan = plan

    @property
    def predicted(self) -> Timeline:
        """The simulator's timeline of one step."""
        return self.plan.predicted

    @property
    def predicted_reserved(self) -> Reserved:
        """What torch's caching allocator takes from a card for the plan, op by op, and uses."""
        return reserved(place_plan(self.problem, self.plan))

    def predict_steps(self, count: int = 8) -> Periodic:
        """The step repeated: predicted seconds of the first one, and from one to the next."""
        return predict_steady_state(place_plan(self.problem, self.plan), steps=count)

    def explain(self, param: str) -> Explanation:
        """Why a parameter is where it is, and what the step would take with it kept otherwise.

        Raises `PlanError` when the step has no such parameter.
        """
        return explain(self.problem, self.plan, param)


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


def _cast(problem: Problem, placement: Placement) -> Dataflow:
    return casts_once(problem.dataflow) if placement.casts_once else problem.dataflow


def every_strategy(problem: Problem, placement: Placement) -> Mapping[str, Strategy]:
    """The strategy of each parameter in `placement`."""
    dataflow = _cast(problem, placement)
    copies = low_precision_copies(dataflow)
    params = [buffer.name for buffer in dataflow.buffers if buffer.role is Role.PARAM]
    return {
        param: strategy_of(dataflow, placement, param, copies.get(param, param)) for param in params
    }


def with_strategy(
    problem: Problem, placement: Placement, param: str, strategy: Strategy
) -> Placement:
    """`placement` with `strategy` for `param`, all else as it is."""
    dataflow = _cast(problem, placement)
    fetched = low_precision_copies(dataflow).get(param, param)
    placed = strategy.placed(dataflow, param, fetched)
    group = dataflow.update.get(param)
    own = {fetched, group.gradient} if group else {fetched}
    return replace(
        placement,
        homes={**placement.homes, **placed.homes},
        updates={**placement.updates, **placed.updates},
        offloaded=(*(name for name in placement.offloaded if name not in own), *placed.offloaded),
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
