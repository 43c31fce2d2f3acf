"""Verdict: what a plan means in ten seconds: does it fit, how fast is it, why, what would help.

In: a Problem, a plan of it, what was measured, and points of a sweep. Out: a `Verdict` as plain
data, which the page draws, and its lines for a terminal. Every number is one of the plan, of its
timelines, or of a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cotrain_compile.analysis.throughput import throughput
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.explain.helps import Help, helps
from cotrain_compile.placement.explain.sensitivity import Limits, limits
from cotrain_compile.placement.explain.sweep import Point
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.wear import wear
from cotrain_compile.plan import Lane, Plan, Timeline
from cotrain_compile.presets import published_range_s
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.kinds import lane_titles
from cotrain_compile.viz.specification import memory_kinds
from cotrain_compile.viz.text.summary import reserved_on_card

_PACES: Mapping[str, str] = {
    Lane.DEVICE: "device compute sets",
    Lane.HOST: "updates on the host set",
    Lane.D2H: "the link down to the host sets",
    Lane.H2D: "the link up to the device sets",
    Lane.DISK_READ: "reading from disk sets",
    Lane.DISK_WRITE: "writing to disk sets",
    Lane.NETWORK: "exchanges with other ranks set",
}
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# A part of the device's peak that is worth telling.
_MUCH = 0.2
_TOKEN_BYTES = 8  # token numbers are int64


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a memory that are used, and those that may be, with a remark on the first."""

    name: str
    used_bytes: int
    budget_bytes: int
    remark: str = ""

    @property
    def words(self) -> str:
        """`23.1 of 24.0 GiB`."""
        used, unit = format_bytes(self.used_bytes).split()
        allowed = format_bytes(self.budget_bytes)
        return (
            f"{used} of {allowed}"
            if allowed.endswith(f" {unit}")
            else f"{used} {unit} of {allowed}"
        )

    @property
    def is_above(self) -> bool:
        return self.used_bytes > self.budget_bytes


@dataclass(frozen=True)
class Busy:
    """A lane: for how much of the step it works, and by how much of its own speed-up it helps."""

    name: str
    busy_s: float
    share: float
    weight: float


@dataclass(frozen=True)
class Verdict:
    """What a reader wants to know first.

    `fits` is whether it does and `remark` what to say of that; `rates` are tokens a second, MFU and
    the like; `pace` is what sets the pace, and `lanes` what works how
    long, the device first; `helps` as `helps` has
    them.
    """

    fits: str
    remark: str
    memories: tuple[MemoryUse, ...]
    step_s: float
    rates: tuple[str, ...]
    pace: str
    lanes: tuple[Busy, ...]
    helps: tuple[Help, ...]

    @property
    def waits(self) -> str:
        """How long the device waits."""
        waits = max(0.0, 1.0 - self.lanes[0].share) if self.lanes else 0.0
        return f"the device waits for {waits:.0%} of the step"

    @property
    def headline(self) -> str:
        """One sentence, whose first word is whether it fits."""
        return f"{self.fits}: {format_seconds(self.step_s)} a step. {_capital(self.pace)}."


def verdict(
    problem: Problem,
    plan: Plan,
    measured: Sequence[Timeline] = (),
    points: Sequence[Point] = (),
) -> Verdict:
    """Of `plan`, made for `problem`, beside what was `measured`; `points` are those of a sweep."""
    answer, remark = fits(problem, plan, measured)
    slowest_s = max((timeline.makespan_s for timeline in measured), default=0.0)
    taken_s = slowest_s or plan.predicted.makespan_s
    found = limits(problem, plan)
    return Verdict(
        fits=answer,
        remark=remark,
        memories=tuple(_memories(plan, problem.dataflow, measured)),
        step_s=taken_s,
        rates=tuple(_rates(problem, plan, measured, taken_s)),
        pace=pace(plan, found),
        lanes=tuple(_lanes(plan, found)),
        helps=(*helps(problem, plan, points), *_smaller_batch(problem, plan)),
    )


def fits(problem: Problem, plan: Plan, measured: Sequence[Timeline] = ()) -> tuple[str, str]:
    """Whether the step fits, and in what: in its budgets as planned, as measured, as reserved."""
    above = [
        tier.value
        for tier in plan.tiers
        if any(t.peak_bytes.get(tier, 0) > plan.budgets[tier] for t in measured)
    ]
    if above:
        return "Does not fit", f"{' and '.join(above)} memory was measured above its budget"
    memories = " and ".join(tier.value for tier in plan.tiers)
    within = f"{memories} memory within budget{', as measured' if measured else ''}"
    found = reserved_on_card(plan, problem.dataflow)
    if found is None or found.reserved_bytes <= plan.budgets[Tier.DEVICE]:
        return "Fits", within
    reserves = f"torch's allocator reserves {format_bytes(found.reserved_bytes)} for these tensors"
    if found.reserved_bytes <= problem.machine.device.capacity_bytes:
        return "Fits", f"{within}; {reserves}, which the card has, unless {_EXPANDABLE} is set"
    return "Fits with one setting", f"on a card set {_EXPANDABLE}, since {reserves} without it"


def pace(plan: Plan, found: Limits) -> str:
    """What sets the pace, in a few words."""
    if not plan.tasks:
        return "everything is on the device, nothing moves"
    link = found.shares.get(Lane.D2H, 0.0), found.shares.get(Lane.H2D, 0.0)
    alone = max((s for lane, s in found.shares.items() if lane != Lane.DEVICE), default=0.0)
    others = (s for lane, s in found.shares.items() if lane not in (Lane.D2H, Lane.H2D))
    if sum(link) > max(others, default=0.0) and min(link) > sum(link) / 4:
        told = "the link to the host sets"
    elif found.beside > found.shares.get(Lane.DEVICE, 0.0) and alone < found.beside / 2:
        told = "copies and updates on the host together set"
    else:
        told = _PACES.get(found.first, f"{found.first} sets")
    full = [f"{tier.value} memory" for tier in found.full]
    return f"{told} the pace" + (f", with {' and '.join(full)} full" if full else "")


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _memories(plan: Plan, dataflow: Dataflow, measured: Sequence[Timeline]) -> Iterator[MemoryUse]:
    for tier in plan.tiers:
        planned = plan.predicted.peak_bytes.get(tier, 0)
        seen = max((t.peak_bytes.get(tier, 0) for t in measured), default=0)
        remark = "" if seen else "at most" if tier is Tier.HOST else ""
        yield MemoryUse(tier.value, seen or planned, plan.budgets[tier], remark)
        found = reserved_on_card(plan, dataflow) if tier is Tier.DEVICE else None
        if found is not None:
            yield MemoryUse("reserved", found.reserved_bytes, plan.budgets[tier])


def _rates(
    problem: Problem, plan: Plan, measured: Sequence[Timeline], taken_s: float
) -> Iterator[str]:
    """How fast, in other words: between what, in tokens, in MFU, and how near the best."""
    if not taken_s:
        return
    if measured:
        ranks = f" on the slowest of {len(measured)} ranks" if len(measured) > 1 else ""
        yield f"measured{ranks}; {plan.foreseen} {format_seconds(plan.predicted.makespan_s)}"
    elif found := published_range_s(plan.machine, taken_s):
        yield " to ".join(map(format_seconds, found)) + " by published steps"
    count, what = work_of(problem.dataflow)
    rate = throughput(problem.dataflow, problem.machine, taken_s, count or 1)
    if count:
        on = " on each rank" if problem.dataflow.ranks > 1 else ""
        yield f"{count / taken_s:,.{0 if count / taken_s >= 10 else 1}f} {what}/s{on}"
    yield f"MFU {rate.mfu:.1%}" if rate.mfu is not None else rate.why_no_mfu
    worn = wear(problem, plan)
    if worn is not None:
        yield worn.words
    report = plan.report
    if report and report.lower_bound_s and report.lower_bound_s <= taken_s:
        yield f"no plan in this memory takes less than {format_seconds(report.lower_bound_s)}"


def _smaller_batch(problem: Problem, plan: Plan) -> Iterator[Help]:
    """Where activations are much of what is on the device at the peak."""
    placed = place_plan(problem, plan)
    used, kinds = placed.device_bytes, memory_kinds(placed.dataflow)
    slot = used.index(max(used))
    nbytes = sum(
        held.buffer.nbytes
        for held in placed.instances
        if held.first <= slot < held.last and kinds[held.buffer.name] == "activations"
    )
    if plan.tasks and nbytes > _MUCH * used[slot]:
        told = (
            f"activations are {format_bytes(nbytes)} of the {format_bytes(used[slot])} at the peak"
        )
        shorter = ", or shorter sequences" * (work_of(problem.dataflow)[1] == "tokens")
        yield Help(f"a smaller batch{shorter}", None, told)


def work_of(dataflow: Dataflow) -> tuple[int, str]:
    """How much a step trains on: tokens where its batch is rows of numbers as wide, else samples.

    0 where the trace has not told the batch.
    """
    for name, shape in dataflow.job.batch.items():
        buffer = dataflow.buffer.get(name)
        is_tokens = buffer is not None and buffer.nbytes == _TOKEN_BYTES * math.prod(shape)
        if len(shape) == 2 and is_tokens:
            return math.prod(shape), "tokens"
    rows = [shape[0] for shape in dataflow.job.batch.values() if shape]
    return (rows[0], "samples") if rows else (0, "samples")


def _lanes(plan: Plan, found: Limits) -> Iterator[Busy]:
    step_s = plan.predicted.makespan_s
    for lane, title in lane_titles(plan.predicted).items():
        busy_s = plan.predicted.busy_s(lane)
        share = busy_s / step_s if step_s else 0.0
        yield Busy(title, busy_s, share, found.shares.get(lane, 0.0))


def verdict_lines(found: Verdict) -> Iterator[str]:
    """The same for a terminal: a line or two for each of the four questions."""
    yield f"fits?       {found.fits}: {found.remark}"
    told = (
        f"{one.name} {f'{one.remark} ' * bool(one.remark)}{one.words}" for one in found.memories
    )
    yield f"{'':11} {', '.join(told)}"
    yield f"how fast?   {format_seconds(found.step_s)} a step; {'; '.join(found.rates)}"
    yield f"why?        {found.pace}; {found.waits}"
    busy = ", ".join(f"{one.name} {one.share:.0%}" for one in found.lanes)
    yield f"{'':11} busy: {busy}"
    for number, one in enumerate(found.helps):
        head = "" if number else "what helps?"
        taken = f": {format_seconds(one.step_s)}" if one.step_s is not None else ""
        joint = ", " if taken else ": "
        yield f"{head:11} {one.change}{taken}{joint}{one.remark}"
