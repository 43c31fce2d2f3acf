"""Facts: a plan in sentences and small tables. A Problem, its Plan and what was measured in.

Every number is read off the plan and its timelines, or off a simulation of the plan.

Parameters: one row for each, with what the plan does with it and why. Plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.explain.explain import every_strategy, limits_words
from cotrain_compile.placement.explain.sensitivity import limits, slacks
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Lane, Plan, SolveReport, Timeline, UpdateMode
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import lane_titles
from cotrain_compile.viz.names import folded, names
from cotrain_compile.viz.specification import memory_kinds
from cotrain_compile.viz.text.summary import (
    is_only_resident,
    order_words,
    range_words,
    recompute_words,
    reserved_on_card,
    reserved_words,
    search,
)

LARGEST = 14


@dataclass(frozen=True)
class Pace:
    """One candidate: its simulated step time, None where it does not fit."""

    policy: str
    step_s: float | None


@dataclass(frozen=True)
class HeldBuffers:
    """`count` buffers that are alike in all layers: what readers call them, what each has."""

    name: str
    kind: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class PeakFacts:
    """What is on the device where most is: bytes by kind, and what holds most of them."""

    nbytes: int
    where: str
    by_kind: tuple[tuple[str, int], ...]
    largest: tuple[HeldBuffers, ...]


def sentences(problem: Problem, plan: Plan, measured: Sequence[Timeline] = ()) -> Iterator[str]:
    """What a reader should know first."""
    predicted = plan.predicted
    step_s = predicted.makespan_s
    work_s = predicted.busy_s(Lane.DEVICE)
    exposed = (
        f" The device works for {format_seconds(work_s)} of it and waits for "
        f"{format_seconds(max(0.0, step_s - work_s))}."
    )
    yield (
        f"A step is {plan.foreseen} to take {format_seconds(step_s)}"
        f"{range_words(plan.machine, step_s)} on {plan.on_machine}." + exposed * bool(plan.tasks)
    )
    if plan.tasks:
        yield f"Bottleneck: {limits_words(limits(problem, plan))}."
        yield (
            f"{format_bytes(plan.bytes_moved('offload'))} go down to the host and "
            f"{format_bytes(plan.bytes_moved('prefetch'))} up to the device in each step."
        )
    for told in order_words(plan, problem.dataflow):
        yield f"{told}."
    for told in recompute_words(plan, problem.dataflow):
        yield f"Values of the forward are recomputed for the backward: {told}."
    if reserved := list(reserved_words(plan, problem.dataflow)):
        yield f"{': '.join(reserved)}."
    yield from _of_bound(problem, plan, measured)
    if plan.report is not None and plan.report.course:
        yield _sentence(search(plan.report))
    modes = Counter(mode.value.replace("_", " ") for mode in plan.placement.updates.values())
    if plan.tasks and modes:
        told = ", ".join(f"{count} {mode}" for mode, count in modes.items())
        yield f"Parameters by the way they are updated: {told}."
    yield from map(_sentence, plan.notes)


def _sentence(note: str) -> str:
    """A note of a plan as a sentence; a name at its beginning stays as it is."""
    first, _, rest = note.partition(" ")
    begun = f"{first.capitalize()} {rest}" if first.isalpha() and first.islower() else note
    return begun if begun.endswith(".") else f"{begun}."


def bound(problem: Problem, plan: Plan, measured: Sequence[Timeline] = ()) -> SolveReport | None:
    """The report with the bound of the plan; None without one, and where the bound is refuted.

    A bound holds at the rates of the machine. Where these are too slow, as a guess may be, a
    measured step can take less than any plan could at them.
    """
    report = plan.report
    if report is None or not report.lower_bound_s:
        return None
    measured_s = max((timeline.makespan_s for timeline in measured), default=report.lower_bound_s)
    return report if measured_s >= report.lower_bound_s else None


def _of_bound(problem: Problem, plan: Plan, measured: Sequence[Timeline]) -> Iterator[str]:
    report = plan.report
    if report is None or not report.lower_bound_s:
        return
    if bound(problem, plan, measured) is None:
        yield (
            f"The measured step is faster than the rates of {plan.machine} allow, so they are too "
            "slow, and no bound is shown. Measure them: cotrain-compile calibrate."
        )
        return
    yield (
        f"At the rates of {plan.machine} no plan within these budgets takes less than "
        f"{format_seconds(report.lower_bound_s)}: this one is {report.gap:.1%} above."
    )
    if report.unknown_ops:
        yield f"That is not certified: it is a {report.bound_name}."


def paces(plan: Plan) -> tuple[Pace, ...]:
    """Every candidate of the ladder, fastest first, then the simple rules that do not fit."""
    report = plan.report
    if report is None or len(report.simulated_s) < 2 or is_only_resident(report):
        return ()
    ranked = sorted(report.simulated_s.items(), key=lambda item: item[1])
    missing = [rule for rule in RULES if rule not in report.simulated_s]
    return tuple(Pace(*item) for item in ranked) + tuple(Pace(rule, None) for rule in missing)


def comparison(
    problem: Problem, plan: Plan, measured: Sequence[Timeline]
) -> Iterator[tuple[str, ...]]:
    """Rows: a heading, the predicted value, those that were measured, the budget."""
    timelines = [plan.predicted, *measured]
    yield "a step", *(format_seconds(t.makespan_s) for t in timelines), ""
    for lane, title in lane_titles(*timelines).items():
        yield f"{title} busy", *(_busy(t, lane) for t in timelines), ""
    for tier in plan.tiers:
        peaks = [
            format_bytes(t.peak_bytes[tier]) if tier in t.peak_bytes else "" for t in timelines
        ]
        yield f"{tier.value} peak", *peaks, format_bytes(plan.budgets[tier])
        found = reserved_on_card(plan, problem.dataflow) if tier is Tier.DEVICE else None
        if found is not None:
            unmeasured = [""] * (len(timelines) - 1)
            yield "reserved on a card", format_bytes(found.reserved_bytes), *unmeasured, ""


def peak(problem: Problem, plan: Plan) -> PeakFacts:
    """What is alive on the device in the first slot in which most is."""
    placed = place_plan(problem, plan)
    program, used = placed.program, placed.device_bytes
    slot = used.index(max(used))
    alive = [held.buffer for held in placed.instances if held.first <= slot < held.last]
    kind, called = memory_kinds(placed.dataflow), names(placed.dataflow)
    by_kind: Counter[str] = Counter()
    alike: dict[tuple[str, str, int], list[str]] = {}
    for buffer in alive:
        name, what = called.of_buffer[buffer.name], kind[buffer.name]
        by_kind[what] += buffer.nbytes
        alike.setdefault((folded(name), what, buffer.nbytes), []).append(name)
    held = [
        HeldBuffers(name if len(own) > 1 else own[0], what, nbytes, len(own))
        for (name, what, nbytes), own in alike.items()
    ]
    held.sort(key=lambda one: -one.nbytes * one.count)
    op = program.ops[min(slot, program.end - 1)]
    return PeakFacts(
        nbytes=used[slot],
        where=f"{called.of_op[op.name]} ({called.what[op.name]})",
        by_kind=tuple(by_kind.most_common()),
        largest=tuple(held[:LARGEST]),
    )


def _busy(timeline: Timeline, lane: str) -> str:
    busy_s = timeline.busy_s(lane)
    share = busy_s / timeline.makespan_s if timeline.makespan_s else 0.0
    return f"{format_seconds(busy_s)} ({share:.0%})"


@dataclass(frozen=True)
class ParameterRow:
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


def parameter_rows(problem: Problem, plan: Plan) -> tuple[ParameterRow, ...]:
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
            ParameterRow(
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
    rows: tuple[ParameterRow, ...]

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


def groups(rows: Iterable[ParameterRow]) -> tuple[Group, ...]:
    """Rows that say the same but for the number of their layer, in the order of the first."""
    alike: dict[tuple[object, ...], list[ParameterRow]] = {}
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
