"""Parameters: one row for each, with what the plan does with it and why. Plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.explain.alternatives import every_strategy
from cotrain_compile.placement.explain.sensitivity import slacks
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan, UpdateMode
from cotrain_compile.support.units import format_seconds
from cotrain_compile.viz.names import folded


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


@dataclass(frozen=True)
class Group:
    """Parameters that are alike in all layers, as one row of the table, which may be opened.

    Its seconds are the least of theirs.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    @property
    def reuse_distance_s(self) -> float | None:
        return _least(row.reuse_distance_s for row in self.rows)

    @property
    def slack_s(self) -> float | None:
        return _least(row.slack_s for row in self.rows)


def groups(rows: Iterable[Row]) -> tuple[Group, ...]:
    """Rows that say the same but for the number of their layer, in the order of the first."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (folded(row.name), row.nbytes, row.state_bytes, row.kept, row.home, row.why)
        alike.setdefault(key, []).append(row)
    return tuple(
        Group(folded(own[0].name) if len(own) > 1 else own[0].name, tuple(own))
        for own in alike.values()
    )


def _least(seconds: Iterable[float | None]) -> float | None:
    return min((found for found in seconds if found is not None), default=None)


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
    trip = f"update on the host {format_seconds(update_s)}, {format_seconds(host_s)} with copies"
    streams = f"states over the link {format_seconds(link_s)}"
    match plan.placement.updates[param]:
        case UpdateMode.RESIDENT:
            return f"saves {streams}; {trip}"
        case UpdateMode.STREAMED:
            return f"{streams}; {trip}"
        case _:
            return f"{trip}; {streams}"
