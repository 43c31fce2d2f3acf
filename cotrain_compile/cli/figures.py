"""Figures: what a command says of a step or a plan, as plain data for --json.

In: a Dataflow, a Plan, or several. Out: dictionaries; bytes and seconds have them in their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.cli.budgets import Answered
from cotrain_compile.dataflow import Dataflow, Op, Phase
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane, Plan, Timeline
from cotrain_compile.presets import published_range_s


def step_figures(dataflow: Dataflow) -> Mapping[str, Any]:
    """Ops and flops by phase, bytes by role, and the peak with everything on the device."""
    nbytes: Counter[str] = Counter()
    for buffer in dataflow.buffers:
        nbytes[buffer.role.value] += buffer.nbytes
    of_phase = {phase: [op for op in dataflow.ops if op.phase is phase] for phase in Phase}
    return {
        "kind": "step",
        "fingerprint": dataflow.fingerprint,
        "job": dataflow.job,
        "ranks": dataflow.ranks,
        "symbols": dataflow.symbols,
        "ops": {phase.value: len(ops) for phase, ops in of_phase.items()},
        "flops": {phase.value: sum(op.flops for op in ops) for phase, ops in of_phase.items()},
        "ops_of_unknown_cost": sum(not op.cost_is_known for op in dataflow.ops),
        "bytes_by_role": nbytes,
        **_peak(dataflow),
        "host_updates_possible": len(dataflow.updates),
        "notes": dataflow.notes,
    }


def plan_figures(plan: Plan) -> Mapping[str, Any]:
    """What the plan is for, predicts and moves, and how good the solver says it is."""
    return {
        "kind": "plan",
        "fingerprint": plan.fingerprint,
        "machine": plan.machine,
        "rates": plan.rates,
        "policy": plan.placement.policy,
        "budget_bytes": plan.budgets,
        "step_s": plan.predicted.makespan_s,
        "published_range_s": published_range_s(plan.machine, plan.predicted.makespan_s),
        "busy_s": {lane.value: plan.predicted.busy_s(lane) for lane in Lane},
        "peak_bytes": plan.predicted.peak_bytes,
        "offloaded_bytes": plan.bytes_moved("offload"),
        "prefetched_bytes": plan.bytes_moved("prefetch"),
        "recomputed_values": len(plan.placement.recomputed),
        "splits": dict(plan.placement.splits),
        "updates": Counter(mode.value for mode in plan.placement.updates.values()),
        "report": plan.report,
        "notes": plan.notes,
    }


def solved_figures(found: Sequence[Answered]) -> Mapping[str, Any]:
    """Each plan with its file, or what is missing, by the budget as it was asked for."""
    return {one.asked.budget: _answer_figures(one) for one in found}


def _answer_figures(one: Answered) -> Mapping[str, Any]:
    if isinstance(one.answer, PlacementError):
        return {"shortfall_bytes": one.answer.shortfall_bytes, "refused": str(one.answer)}
    rate: dict[str, Any] = {}
    if one.rate:
        rate = {"tokens_per_s": one.rate.tokens_per_s, "mfu": one.rate.mfu}
        rate |= {"why_no_mfu": one.rate.why_no_mfu} if one.rate.why_no_mfu else {}
    return {"file": str(one.asked.path), **plan_figures(one.answer), **rate}


def timeline_figures(timeline: Timeline) -> Mapping[str, Any]:
    """How long a step took, how busy each lane was, and the peaks."""
    return {
        "kind": "timeline",
        "source": timeline.source,
        "step_s": timeline.makespan_s,
        "busy_s": {lane.value: timeline.busy_s(lane) for lane in Lane},
        "peak_bytes": timeline.peak_bytes,
    }


def difference_figures(before: Plan, after: Plan) -> Mapping[str, Any]:
    """Both plans, and every parameter that is kept otherwise: how before, how after."""
    was, now = (_kept(plan) for plan in (before, after))
    return {
        "before": plan_figures(before),
        "after": plan_figures(after),
        "kept_otherwise": {
            name: [was.get(name), now.get(name)]
            for name in dict.fromkeys((*was, *now))
            if was.get(name) != now.get(name)
        },
    }


def _kept(plan: Plan) -> dict[str, Mapping[str, str]]:
    placement = plan.placement
    return {
        name: {"update": mode.value, "home": placement.homes.get(name, Tier.DEVICE).value}
        for name, mode in placement.updates.items()
    }


def _peak(dataflow: Dataflow) -> Mapping[str, Any]:
    if not dataflow.ops:
        return {"peak_bytes": 0}
    alive = liveness(dataflow)
    op: Op = dataflow.ops[alive.peak_op]
    return {"peak_bytes": alive.peak_bytes, "peak_at": {"op": op.target, "module": op.module}}
