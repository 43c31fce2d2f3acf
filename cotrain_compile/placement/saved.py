"""Saved: plans and timelines from files, refused where they say what cannot be.

`files` checks the type of every field; here is what the fields must be together, so that what reads
a plan later can rely on it: both tiers have bytes, tasks come after tasks that are there, lanes are
lanes, and no number is one that nothing real can have. Whether a plan is sound for a step is
`check`'s question.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cotrain_compile.errors import FormatError
from cotrain_compile.files import load
from cotrain_compile.machine import LARGEST, MEMORIES, Tier
from cotrain_compile.plan import Lane, Plan, SolveReport, Timeline


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan saved at `path`; raises as `files.load` does, FormatError also for an absurd one."""
    plan = load(path, Plan)
    _refuse(path, _absurd_in_plan(plan), "solve the step again")
    return plan


def load_measured(paths: Sequence[Path]) -> tuple[Timeline, ...]:
    """One step as measured, by one process or by several ranks, which then count from one zero.

    Raises as `load_timeline`, and `FormatError` where two are not of two ranks.
    """
    timelines = [load_timeline(path, "measured") for path in paths]
    ranks = [timeline.rank for timeline in timelines]
    if len(paths) > 1 and (None in ranks or len(set(ranks)) < len(ranks)):
        told = ", ".join(f"{p} is of {_of(r)}" for p, r in zip(paths, ranks, strict=True))
        raise FormatError(f"several timelines are shown together if they are one a rank: {told}")
    return _from_one_zero(sorted(timelines, key=lambda timeline: timeline.rank or 0))


def _of(rank: int | None) -> str:
    return "a process alone" if rank is None else f"rank {rank}"


def load_timeline(
    path: str | os.PathLike[str], source: Literal["predicted", "measured"] | None = None
) -> Timeline:
    """The timeline saved at `path`, as `load_plan`; FormatError where it has another `source`."""
    timeline = load(path, Timeline)
    _refuse(path, _absurd_in_timeline(timeline), "save it again")
    if source is not None and timeline.source != source:
        raise FormatError(f"{path}: a {timeline.source} timeline; give a {source} one")
    return timeline


def _refuse(path: str | os.PathLike[str], absurd: Iterator[str], remedy: str) -> None:
    if (found := next(absurd, None)) is not None:
        raise FormatError(f"{path}: {found}; {remedy}")


def _absurd_in_plan(plan: Plan) -> Iterator[str]:
    """What in `plan` cannot be, in words."""
    yield from _absurd_bytes("budgets", plan.budgets)
    if plan.predicted.source != "predicted":
        yield "predicted: its timeline is a measured one"
    yield from _absurd_bytes("predicted.peak_bytes", plan.predicted.peak_bytes)
    yield from _absurd_in_timeline(plan.predicted)
    names = {task.name for task in plan.tasks}
    timed = {span.name for span in plan.predicted.spans}
    ops = {span.name for span in plan.predicted.lane(Lane.DEVICE)}
    if len(names) < len(plan.tasks):
        yield "tasks: two have one name"
    for task in plan.tasks:
        if unknown := {*task.after, *task.after_previous} - names:
            yield f"tasks: {task.name} comes after {min(unknown)!r}, which is no task"
        if task.name not in timed:
            yield f"tasks: {task.name} has no span in predicted"
        if task.wait_before is not None and task.wait_before not in ops:
            yield f"tasks: {task.wait_before!r} waits for {task.name} and has no span on the device"
    for transfer in plan.transfers:
        if not 0 <= transfer.nbytes <= LARGEST:
            yield f"tasks: {transfer.name} moves {transfer.nbytes} bytes"
    if plan.placement.layers_per_pack < 0:
        yield f"placement: packs of {plan.placement.layers_per_pack} layers"
    for param in plan.placement.updates.keys() - plan.placement.homes.keys():
        yield f"placement: {param!r} is updated and has no home"
    if plan.report is not None:
        yield from _absurd_in_report(plan.report)


def _absurd_in_report(report: SolveReport) -> Iterator[str]:
    seconds = {
        "seconds": report.seconds,
        "lower_bound_s": report.lower_bound_s,
        **{f"simulated_s[{policy!r}]": s for policy, s in report.simulated_s.items()},
        "work": report.work,
        "bound_work": report.bound_work,
        **{f"course[{one.name!r}].work": one.work for one in report.course},
        **{f"course[{one.name!r}].seconds": one.seconds for one in report.course},
    }
    for name, value in seconds.items():
        if not 0 <= value <= LARGEST:
            yield f"report.{name} is {value}"


def _absurd_in_timeline(timeline: Timeline) -> Iterator[str]:
    for span in timeline.spans:
        if span.lane not in set(Lane):
            yield f"spans: {span.name!r} is on lane {span.lane!r}"
        if not -LARGEST <= span.start_s <= span.end_s <= LARGEST:
            yield f"spans: {span.name!r} goes from {span.start_s} s to {span.end_s} s"
    for tier, samples in timeline.memory.items():
        before_s = float(-LARGEST)
        for seconds, nbytes in samples:
            if not (before_s <= seconds <= LARGEST and 0 <= nbytes <= LARGEST):
                yield f"memory.{tier}: {nbytes} bytes at {seconds} s, after {before_s} s"
            before_s = seconds
    for tier, nbytes in timeline.peak_bytes.items():
        if not 0 <= nbytes <= LARGEST:
            yield f"peak_bytes.{tier} is {nbytes}"
    for name, value in (("rank", timeline.rank), ("began_at", timeline.began_at)):
        if value is not None and not 0 <= value <= LARGEST:
            yield f"{name} is {value}"


def _absurd_bytes(name: str, of_tier: Mapping[Tier, int]) -> Iterator[str]:
    for tier in MEMORIES:
        if tier not in of_tier:
            yield f"{name} has nothing for the {tier}"
    for tier, nbytes in of_tier.items():
        if not 0 <= nbytes <= LARGEST:
            yield f"{name}.{tier} is {nbytes}"


def _from_one_zero(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """One step as several ranks measured it, all from the first one's beginning on.

    As far apart as their computers' clocks say; a timeline that knows no clock stays as it is.
    """
    zero_s = min((t.began_at for t in timelines if t.began_at is not None), default=0.0)
    return tuple(_later(t, t.began_at - zero_s) if t.began_at else t for t in timelines)


def _later(timeline: Timeline, by_s: float) -> Timeline:
    return replace(
        timeline,
        spans=tuple(
            replace(s, start_s=s.start_s + by_s, end_s=s.end_s + by_s) for s in timeline.spans
        ),
        memory={
            tier: tuple((seconds + by_s, nbytes) for seconds, nbytes in samples)
            for tier, samples in timeline.memory.items()
        },
    )
