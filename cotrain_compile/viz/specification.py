"""Specification: what a picture of timelines shows, as plain data. Page, PNG and trace draw it.

A `Panel` is one timeline: rows of bars, one for each lane, and memory over time by kind. Lanes are
those that the timeline has, of one device or of several. Times count from the start of the step.

Kinds of memory are those that torch's own memory viewer has: parameters, gradients, optimizer
states, activations (made in the forward, read in the backward), temporaries, and the step's other
inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from cotrain_compile.dataflow import Dataflow, Job, Phase, Role
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.placed import as_placed, place_as_planned
from cotrain_compile.placement.residency import IntervalSum
from cotrain_compile.plan import HostRegion, Lane, Plan, Task, Timeline, Transfer
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.viz.kinds import MEMORY_KINDS, kinds_of, lane_titles, spans_with_kinds
from cotrain_compile.viz.names import REST, layers, names

_OF_ROLE: Mapping[Role, str] = {
    Role.PARAM: "parameters",
    Role.OPTIMIZER_STATE: "optimizer states",
    Role.GRADIENT: "gradients",
    Role.TEMPORARY: "temporaries",
    Role.WORKSPACE: "temporaries",
}
_OTHER = "batch and other inputs"
_WORK = "copies and work"


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of a tier over time: at each of `times_s`, the `total`, and as much of each kind.

    `by_kind` is empty where nobody knows of which kinds they are.
    """

    times_s: tuple[float, ...]
    total: tuple[int, ...]
    by_kind: Mapping[str, tuple[int, ...]]


def memory_kinds(dataflow: Dataflow) -> dict[str, str]:
    """What each buffer of a step is, a key of `MEMORY_KINDS`."""
    kinds = {b.name: _OF_ROLE.get(b.role, _OTHER) for b in dataflow.buffers}
    made = {n for op in dataflow.ops if op.phase is Phase.FORWARD for n in op.writes}
    saved = {n for op in dataflow.ops if op.phase is Phase.BACKWARD for n in op.reads if n in made}
    own = (n for n in saved if dataflow.buffer[n].role is Role.TEMPORARY)
    kinds |= dict.fromkeys(own, "activations")
    for group in dataflow.updates:
        kinds[group.gradient] = "gradients"
        if group.low_precision:
            kinds[group.low_precision] = "parameters"
    return kinds


def measured_curve(timeline: Timeline, tier: Tier, zero_s: float) -> MemoryCurve:
    """What a timeline knows by itself: the total."""
    points = timeline.memory.get(tier, ())
    return MemoryCurve(
        tuple(max(0.0, s - zero_s) for s, _ in points), tuple(n for _, n in points), {}
    )


def planned_curve(dataflow: Dataflow, plan: Plan, tier: Tier, zero_s: float) -> MemoryCurve:
    """What the plan predicts; on the host the most that it can be, at all times."""
    if tier is Tier.HOST:
        return _host(dataflow, plan)
    placed = place_as_planned(dataflow, plan)
    program, kinds = placed.program, memory_kinds(placed.dataflow)
    sums = {kind: IntervalSum(program.end + 1) for kind in MEMORY_KINDS}
    for held in placed.instances:
        sums[kinds[held.buffer.name]].add(held.buffer.nbytes, held.first, held.last)
    starts = {span.name: span.start_s - zero_s for span in plan.predicted.lane(Lane.DEVICE)}
    times = [starts.get(op.name, 0.0) for op in program.ops] + [plan.predicted.makespan_s]
    by_slot = {kind: found.values() for kind, found in sums.items()}
    kept = _changes([by_slot[kind] for kind in MEMORY_KINDS])
    used = {kind: tuple(v[n] for n in kept) for kind, v in by_slot.items() if any(v)}
    total = tuple(map(sum, zip(*used.values(), strict=True)))
    return MemoryCurve(tuple(times[n] for n in kept), total, used)


def _changes(values: Sequence[Sequence[int]]) -> list[int]:
    """The slots in which any of `values` is another than in the slot before, and the last."""
    rows = list(zip(*values, strict=True))
    changed = [n for n, row in enumerate(rows) if not n or row != rows[n - 1]]
    return changed if changed[-1] == len(rows) - 1 else [*changed, len(rows) - 1]


def _host(dataflow: Dataflow, plan: Plan) -> MemoryCurve:
    kinds = memory_kinds(dataflow)
    rests: Counter[str] = Counter()
    for name, tier in plan.placement.homes.items():
        if tier is Tier.HOST:
            rests[kinds[name]] += dataflow.buffer[name].nbytes
    total = plan.predicted.peak_bytes.get(Tier.HOST, 0)
    rests[_WORK] = max(0, total - rests.total())
    used = {kind: (rests[kind],) * 2 for kind in MEMORY_KINDS if rests[kind]}
    return MemoryCurve((0.0, plan.predicted.makespan_s), (total, total), used)


@dataclass(frozen=True)
class Bar:
    """`count` spans of a lane from `start_s` to `end_s`, of which `busy_s` are work.

    `name` is what readers call it, `span` the op or task of the plan; `kind` is a key of
    `kinds.COLOURS`; `what` says more: operation and line. `nbytes` of a copy, `param` of an update.
    """

    lane: str
    name: str
    kind: str
    layer: str
    what: str
    start_s: float
    end_s: float
    busy_s: float
    count: int = 1
    span: str = ""
    nbytes: int = 0
    param: str = ""

    @property
    def bytes_per_s(self) -> float:
        """The rate of a copy, 0 for all else."""
        return self.nbytes / self.busy_s if self.busy_s else 0.0


@dataclass(frozen=True)
class Panel:
    """One timeline. `lanes` are from above, with their titles; `zero_s` is what times count from.

    `arrows` go from a span to one that waits for it.
    """

    title: str
    source: str
    lanes: Mapping[str, str]
    bars: tuple[Bar, ...]
    memory: Mapping[Tier, MemoryCurve]
    peak_bytes: Mapping[Tier, int]
    makespan_s: float
    zero_s: float
    arrows: tuple[tuple[str, str], ...] = ()

    @property
    def kinds(self) -> set[str]:
        """The kinds of work that occur."""
        return {bar.kind for bar in self.bars}

    def busy_share(self, lane: str) -> float:
        busy_s = sum(bar.busy_s for bar in self.bars if bar.lane == lane)
        return busy_s / self.makespan_s if self.makespan_s else 0.0


@dataclass(frozen=True)
class Specification:
    """Panels on one time axis, with what they are of: model, batch, machine, policy and date."""

    heading: str
    panels: tuple[Panel, ...]
    budgets: Mapping[Tier, int]

    @property
    def end_s(self) -> float:
        return max((bar.end_s for panel in self.panels for bar in panel.bars), default=0.0)


def specify(
    timelines: Sequence[Timeline], plan: Plan | None = None, dataflow: Dataflow | None = None
) -> Specification:
    """What to draw of `timelines`; the more is given, the more it says of each bar.

    With a `plan`, its tasks are told apart, and with the `dataflow` it was made for, also its ops.
    Measured timelines of several ranks have one zero.
    """
    measured = [timeline for timeline in timelines if timeline.source == "measured"]
    panels = (
        _panel(t, _zero_s(measured if t.source == "measured" else [t]), plan, dataflow)
        for t in timelines
    )
    return Specification(heading(plan, dataflow), tuple(panels), plan.budgets if plan else {})


def heading(plan: Plan | None, dataflow: Dataflow | None) -> str:
    """`LlamaForCausalLM, batch 4 × 2048, on rtx4090, plan: integer program, 2026-11-24`.

    What is not known is left out.
    """
    parts = [job_words(dataflow.job)] if dataflow else []
    if plan is not None:
        parts += [f"on {plan.on_machine}", f"plan: {plan_words(plan.placement.policy)}"]
    return ", ".join(filter(None, (*parts, date.today().isoformat())))


def job_words(job: Job) -> str:
    """Model and batch, as far as the trace has told them."""
    shapes = dict.fromkeys(" × ".join(map(str, shape)) for shape in job.batch.values() if shape)
    batch = f"batch {' and '.join(shapes)}" if shapes else ""
    return ", ".join(filter(None, (job.model, batch)))


def _panel(
    timeline: Timeline, zero_s: float, plan: Plan | None, dataflow: Dataflow | None
) -> Panel:
    is_plans = plan is not None and timeline is plan.predicted
    return Panel(
        title=timeline.title,
        source=timeline.source,
        lanes=lane_titles(timeline),
        bars=bars_of(timeline, plan, dataflow, zero_s),
        memory={
            tier: planned_curve(dataflow, plan, tier, zero_s)
            if is_plans and dataflow is not None and plan is not None
            else measured_curve(timeline, tier, zero_s)
            for tier in MEMORIES
        },
        peak_bytes=timeline.peak_bytes,
        makespan_s=timeline.makespan_s,
        zero_s=zero_s,
        arrows=tuple((b, task.name) for task in plan.tasks for b in task.after) if plan else (),
    )


def bars_of(
    timeline: Timeline,
    plan: Plan | None = None,
    dataflow: Dataflow | None = None,
    zero_s: float | None = None,
) -> tuple[Bar, ...]:
    """One bar for each span, in the order of lanes and time, from the start of the first one."""
    zero_s = _zero_s([timeline]) if zero_s is None else zero_s
    told = _Told(plan, dataflow)
    bars = [
        Bar(
            lane=str(span.lane),
            name=told.name.get(span.name, span.name),
            kind=kind,
            layer=told.layer.get(span.name, REST),
            what=told.what.get(span.name, ""),
            start_s=span.start_s - zero_s,
            end_s=span.end_s - zero_s,
            busy_s=span.end_s - span.start_s,
            span=span.name,
            nbytes=told.nbytes.get(span.name, 0),
            param=told.param.get(span.name, ""),
        )
        for span, kind in spans_with_kinds(timeline, told.kinds)
    ]
    return tuple(sorted(bars, key=lambda bar: (bar.lane, bar.start_s)))


class _Told:
    """What plan and step say about spans, by their names."""

    def __init__(self, plan: Plan | None, dataflow: Dataflow | None) -> None:
        self.name: dict[str, str] = {}
        self.what: dict[str, str] = {}
        self.layer: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}
        self.param: dict[str, str] = {}
        if plan is not None:
            phases = {op.name: op.phase for op in dataflow.ops} if dataflow else {}
            self.kinds |= kinds_of(plan, phases)
            self.nbytes |= {task.name: task.nbytes for task in plan.transfers}
            self.what |= {task.name: _buffer_of(task) for task in plan.tasks}
            self.param |= dict(_params(plan, dataflow))
        if dataflow is not None:
            self._tell_step(as_placed(dataflow, plan.placement) if plan else dataflow, plan)

    def _tell_step(self, step: Dataflow, plan: Plan | None) -> None:
        found, called = layers(step), names(step)
        self.name |= called.of_op
        self.what |= called.what
        self.layer |= found.of_op
        if plan is not None:
            self.name |= {task.name: called.of_task(task) for task in plan.tasks}
            self.layer |= found.of_tasks(plan)


def _buffer_of(task: Task) -> str:
    return task.buffer if isinstance(task, Transfer) else task.param


def _params(plan: Plan, dataflow: Dataflow | None) -> Iterator[tuple[str, str]]:
    """The parameter that each task is about, by the task's name."""
    of_buffer = {param: param for param in plan.placement.updates}
    for group in dataflow.updates if dataflow else ():
        own = (group.param, group.gradient, group.low_precision, *group.states)
        of_buffer |= dict.fromkeys(filter(None, own), group.param)
    for task in plan.tasks:
        if isinstance(task, HostRegion) or task.buffer in of_buffer:
            yield task.name, task.param if isinstance(task, HostRegion) else of_buffer[task.buffer]


def _zero_s(timelines: Sequence[Timeline]) -> float:
    return min((span.start_s for t in timelines for span in t.spans), default=0.0)
