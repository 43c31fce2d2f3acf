"""Parameters: one row for each, with what the plan does with it and why. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.explain.alternatives import every_strategy
from cotrain_compile.placement.explain.slack import slacks
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan, UpdateMode
from cotrain_compile.units import format_seconds


@dataclass(frozen=True)
class Row:
    """A parameter in the table; `nbytes` with its states, seconds None where there are none."""

    name: str
    nbytes: int
    state_bytes: int
    mode: str
    kept: str
    home: str
    reuse_distance_s: float | None
    slack_s: float | None
    why: str


def parameter_rows(problem: Problem, plan: Plan) -> tuple[Row, ...]:
    """Every parameter of the step, in its order."""
    problem = problem.under(plan.placement)
    dataflow = problem.dataflow
    distances = reuse_distances(dataflow, problem.costs.device_s)
    slack_s = slacks(dataflow, plan)
    strategies = every_strategy(problem, plan.placement)
    rows = []
    for buffer in dataflow.buffers:
        if buffer.role is not Role.PARAM:
            continue
        group = dataflow.update.get(buffer.name)
        mode = plan.placement.updates.get(buffer.name)
        distance = distances.get(buffer.name)
        rows.append(
            Row(
                name=buffer.name,
                nbytes=buffer.nbytes,
                state_bytes=sum(dataflow.buffer[s].nbytes for s in group.states) if group else 0,
                mode=mode.value if mode else "frozen",
                kept=strategies[buffer.name].words,
                home=plan.placement.homes.get(buffer.name, Tier.DEVICE).value,
                reuse_distance_s=distance.seconds if distance else None,
                slack_s=slack_s.get(buffer.name),
                why=_why(problem, plan, buffer.name),
            )
        )
    return tuple(rows)


def _why(problem: Problem, plan: Plan, param: str) -> str:
    """What its update costs each way, in seconds of that parameter alone: the plan's own first."""
    dataflow, machine = problem.dataflow, problem.machine
    group = dataflow.update.get(param)
    if not plan.tasks:
        return "everything fits"
    if group is None:
        return "frozen: only fetched"
    gradient, weight = dataflow.buffer[group.gradient].nbytes, dataflow.buffer[param].nbytes
    states = sum(dataflow.buffer[name].nbytes for name in group.states)
    update_s = problem.costs.host_update_s[param]
    down, up = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)
    host_s = machine.copy_s(gradient, *down) + update_s + machine.copy_s(weight, *up)
    link_s = machine.copy_s(states, *up) + machine.copy_s(states, *down)
    trip = f"host trip {format_seconds(host_s)}, {format_seconds(update_s)} of it the update"
    streams = f"states over the link {format_seconds(link_s)}"
    match plan.placement.updates[param]:
        case UpdateMode.RESIDENT:
            return f"saves {streams}; {trip}"
        case UpdateMode.STREAMED:
            return f"{streams}; {trip}"
        case _:
            return f"{trip}; {streams}"
