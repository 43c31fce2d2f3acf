"""Memory: what lies on a tier over time, by kind. A step and its plan in, curves out.

Kinds are those that torch's own memory viewer has: parameters, gradients, optimizer states,
activations (made in the forward, read in the backward), temporaries, and the step's other inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place_dataflow
from cotrain_compile.placement.residency import IntervalSum
from cotrain_compile.plan import Lane, Plan, Timeline
from cotrain_compile.viz.kinds import MEMORY_KINDS

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
class Curve:
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


def measured_curve(timeline: Timeline, tier: Tier, zero_s: float) -> Curve:
    """What a timeline knows by itself: the total."""
    points = timeline.memory.get(tier, ())
    return Curve(tuple(max(0.0, s - zero_s) for s, _ in points), tuple(n for _, n in points), {})


def planned_curve(dataflow: Dataflow, plan: Plan, tier: Tier, zero_s: float) -> Curve:
    """What the plan predicts; on the host the most that it can be, at all times."""
    if tier is Tier.HOST:
        return _host(dataflow, plan)
    placed = place_dataflow(dataflow, plan.placement, plan.tasks, plan.moved)
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
    return Curve(tuple(times[n] for n in kept), total, used)


def _changes(values: Sequence[Sequence[int]]) -> list[int]:
    """The slots in which any of `values` is another than in the slot before, and the last."""
    rows = list(zip(*values, strict=True))
    changed = [n for n, row in enumerate(rows) if not n or row != rows[n - 1]]
    return changed if changed[-1] == len(rows) - 1 else [*changed, len(rows) - 1]


def _host(dataflow: Dataflow, plan: Plan) -> Curve:
    kinds = memory_kinds(dataflow)
    rests: Counter[str] = Counter()
    for name, tier in plan.placement.homes.items():
        if tier is Tier.HOST:
            rests[kinds[name]] += dataflow.buffer[name].nbytes
    total = plan.predicted.peak_bytes.get(Tier.HOST, 0)
    rests[_WORK] = max(0, total - rests.total())
    used = {kind: (rests[kind],) * 2 for kind in MEMORY_KINDS if rests[kind]}
    return Curve((0.0, plan.predicted.makespan_s), (total, total), used)
