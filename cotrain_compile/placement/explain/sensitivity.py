"""Sensitivity: what limits a plan, by simulating it again with one thing a little faster.

In: a Problem and a plan of it. Out: for each lane, by what share of its own speed-up the step
becomes faster: 1 where the step takes as long as that lane works, 0 where the lane does not
matter. The tasks stay as they are. Whether the device's memory limits too is read off the peak.

And how early what a plan moves for each parameter is there (`slacks`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.simulate.engine import Work, simulate
from cotrain_compile.placement.simulate.works import joined_works_of, lanes_of
from cotrain_compile.plan import HostRegion, Lane, Plan, Task, Transfer

# How much faster a lane is made: enough to stand out of rounding, little enough to be a slope.
FASTER = 0.02
# A peak this close to its budget, as a share, leaves no room for another large tensor.
FULL = 0.01


@dataclass(frozen=True)
class Limits:
    """What a plan's step time hangs on.

    `shares` has for each lane the relative gain of the step per relative gain of the lane; `beside`
    is that of all lanes but the device's together, of which each may wait for the others;
    `full` the tiers whose peak is at the budget; none where nothing had to move.
    """

    step_s: float
    shares: Mapping[str, float]
    beside: float
    full: tuple[Tier, ...]

    @property
    def first(self) -> str:
        """The lane that the step hangs on most."""
        return max(self.shares, key=lambda lane: self.shares[lane])


def limits(problem: Problem, plan: Plan) -> Limits:
    """What limits `plan`, simulated again with the costs of `problem`."""
    works = joined_works_of(place_plan(problem, plan))
    step_s = _simulated_s(problem, works)

    def share(lanes: Collection[str]) -> float:
        faster = _sped(works, lanes, 1 / (1 - FASTER))
        gain = 1 - _simulated_s(problem, faster) / step_s if step_s else 0.0
        return max(0.0, gain / FASTER)

    return Limits(
        step_s,
        shares={lane: share((lane,)) for lane in problem.machine.lanes},
        beside=share([lane for lane in problem.machine.lanes if lane != Lane.DEVICE]),
        full=tuple(tier for tier in plan.tiers if _is_full(plan, tier)),
    )


def faster_s(
    problem: Problem, plan: Plan, parts: Iterable[Collection[str]], times: float
) -> list[float]:
    """What `plan` takes with the lanes of each of `parts` so many times as fast, all else as is."""
    works = joined_works_of(place_plan(problem, plan))
    return [_simulated_s(problem, _sped(works, lanes, times)) for lanes in parts]


def _sped(works: Sequence[Work], lanes: Collection[str], times: float) -> list[Work]:
    return [
        replace(work, seconds=work.seconds / times) if work.lane in lanes else work
        for work in works
    ]


def _simulated_s(problem: Problem, works: Sequence[Work]) -> float:
    machine = problem.machine
    return simulate(works, lanes_of(machine), machine.contention).makespan_s


def _is_full(plan: Plan, tier: Tier) -> bool:
    budget = plan.budgets[tier]
    return bool(plan.tasks) and plan.predicted.peak_bytes.get(tier, 0) >= (1 - FULL) * budget


def slacks(dataflow: Dataflow, plan: Plan) -> Mapping[str, float]:
    """For each parameter with tasks, the least seconds between the end of one and what waits.

    Read off the predicted timeline: 0 where the device, or the end of the step, waits for a copy or
    an update of the parameter. Tasks are those of the parameter, its low-precision copy, its
    gradient and its states. Parameters without tasks are left out.
    """
    owner = _owners(dataflow)
    starts = {span.name: span.start_s for span in plan.predicted.lane(Lane.DEVICE)}
    ends = {span.name: span.end_s for span in plan.predicted.spans}
    end_s = max(ends.values(), default=0.0)
    found: dict[str, float] = {}
    for task in plan.tasks:
        param = _param_of(task, owner)
        if param is None:
            continue
        needed_s = end_s if task.wait_before is None else starts[task.wait_before]
        slack_s = max(0.0, needed_s - ends[task.name])
        found[param] = min(slack_s, found.get(param, slack_s))
    return found


def _owners(dataflow: Dataflow) -> dict[str, str]:
    """The parameter of each buffer that is moved for one."""
    owner = {copy: param for param, copy in low_precision_copies(dataflow).items()}
    for group in dataflow.updates:
        owner |= dict.fromkeys((group.param, group.gradient, *group.states), group.param)
    return owner


def _param_of(task: Task, owner: Mapping[str, str]) -> str | None:
    match task:
        case Transfer():
            return owner.get(task.destination) or owner.get(task.buffer)
        case HostRegion():
            return task.param
        case _:
            assert_never(task)
