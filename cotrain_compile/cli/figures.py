"""Figures: what a command says of a step or a plan, as plain data for --json.

In: a Dataflow, a Plan, or several. Out: dictionaries; bytes and seconds have them in their names.

Budgets: a plan of one step for each budget that somebody asks for, checked and saved.

In: a step, a machine, and what is asked for. Out: for each a plan, or why there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cotrain_compile import files
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.throughput import Throughput, throughput
from cotrain_compile.cli.parameters import refuse_outputs
from cotrain_compile.cli.terminal import SayStage
from cotrain_compile.dataflow import Dataflow, Op, Phase
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.problem import Problem
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


@dataclass(frozen=True)
class Asked:
    """A budget in the words of who asks for it, the options with it, and where its plan goes.

    Where nobody asked for one it is called "default".
    """

    budget: str
    options: Options
    path: Path


@dataclass(frozen=True)
class Answered:
    """What came of it for `problem`, and what it trains on a second where that is asked for."""

    asked: Asked
    problem: Problem
    answer: Plan | PlacementError
    rate: Throughput | None = None


def ask(
    budgets: Sequence[str | None],
    shared: Mapping[str, Any],
    output: Path,
    reads: Sequence[str | Path],
) -> list[Asked]:
    """Each of `budgets`, all with the `shared` options; several plans go beside `output`.

    Raises `OptionError` where an option is wrong, or a file cannot be written or is one of `reads`.
    """
    several = len(budgets) > 1
    if several and str(output) == files.STANDARD:
        raise OptionError("--output - takes one plan: give --memory-budget once, or a file")
    asked = [
        Asked(
            budget or "default",
            Options.parse({**shared, "memory_budget": budget}),
            _beside(output, budget) if several and budget else output,
        )
        for budget in budgets
    ]
    for one in asked:
        refuse_outputs({"--output": one.path}, reads)
    return asked


def _beside(output: Path, budget: str) -> Path:
    name = "".join(budget.split())
    return output.with_name(f"{output.stem}-{name}{output.suffix}")


def answers(
    dataflow: Dataflow,
    machine: Machine,
    asked: Sequence[Asked],
    tokens: int | None,
    say: SayStage,
) -> list[Answered]:
    """What comes of each of `asked`, in their order; plans are saved as soon as they are found.

    With `tokens`, so many in a step, also how many a second.
    """
    found = {one.path: (own, answer) for one, own, answer in _found(dataflow, machine, asked, say)}
    return [
        Answered(one, *found[one.path], _rate(found[one.path][1], dataflow, machine, tokens))
        for one in asked
    ]


def _found(
    dataflow: Dataflow, machine: Machine, asked: Sequence[Asked], say: SayStage
) -> Iterator[tuple[Asked, Problem, Plan | PlacementError]]:
    """From tight to roomy: what fits less memory is worth looking at with more."""
    from cotrain_compile.entry.choose_plan import solve_settings
    from cotrain_compile.placement.check.check import check
    from cotrain_compile.placement.problem import formulate
    from cotrain_compile.placement.search.solve import solve

    say(f"{len(dataflow.ops)} ops on {machine.name}")
    first = asked[0].options
    captured = first.host_kernels == "captured"
    problem = formulate(
        dataflow, machine, first.budgets(machine), captured=captured, compiled=first.compiled
    )
    tighter: list[Plan] = []
    for one in sorted(asked, key=lambda one: one.options.budgets(machine)[Tier.DEVICE]):
        own = replace(problem, budgets=one.options.budgets(machine))
        stage = str(one.path)
        say(stage)
        settings = solve_settings(one.options, one.options.compiled)
        doing = partial(say, stage)
        try:
            plan = solve(own, settings, progress=doing, incumbents=tuple(tighter))
        except PlacementError as error:
            yield one, own, error
            continue
        check(own, plan)
        files.save(plan, one.path)
        tighter.append(plan)
        yield one, own, plan


def _rate(
    answer: Plan | PlacementError, dataflow: Dataflow, machine: Machine, tokens: int | None
) -> Throughput | None:
    if not tokens or not isinstance(answer, Plan) or not answer.predicted.makespan_s:
        return None
    return throughput(dataflow, machine, answer.predicted.makespan_s, tokens)
