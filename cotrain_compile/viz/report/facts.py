"""Facts: a plan in sentences and small tables. A Problem, its Plan and what was measured in.

Every number is read off the plan and its timelines, or off a simulation of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotrain_compile.machine import Tier
from cotrain_compile.placement.explain.explain import limits_words
from cotrain_compile.placement.explain.sensitivity import limits
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Lane, Plan, SolveReport, Timeline
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
class Held:
    """`count` buffers that are alike in all layers: what readers call them, what each has."""

    name: str
    kind: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """What is on the device where most is: bytes by kind, and what holds most of them."""

    nbytes: int
    where: str
    by_kind: tuple[tuple[str, int], ...]
    largest: tuple[Held, ...]


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
        yield f"Values of the forward are made again for the backward: {told}."
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


def peak(problem: Problem, plan: Plan) -> Peak:
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
        Held(name if len(own) > 1 else own[0], what, nbytes, len(own))
        for (name, what, nbytes), own in alike.items()
    ]
    held.sort(key=lambda one: -one.nbytes * one.count)
    op = program.ops[min(slot, program.end - 1)]
    return Peak(
        nbytes=used[slot],
        where=f"{called.of_op[op.name]} ({called.what[op.name]})",
        by_kind=tuple(by_kind.most_common()),
        largest=tuple(held[:LARGEST]),
    )


def _busy(timeline: Timeline, lane: str) -> str:
    busy_s = timeline.busy_s(lane)
    share = busy_s / timeline.makespan_s if timeline.makespan_s else 0.0
    return f"{format_seconds(busy_s)} ({share:.0%})"
