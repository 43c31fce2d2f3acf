"""Slack: how early what a plan moves for each parameter is there. Plan in, seconds out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.plan import HostRegion, Lane, Plan, Task, Transfer


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
