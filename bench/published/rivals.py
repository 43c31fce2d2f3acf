"""Rivals: published step times of systems that offload, beside what we predict of their rules.

    python -m bench.published.rivals

Each step is traced with few layers and grows to all by what one more takes. Its system's rule is
placed, scheduled and simulated on the preset of the published card. An update is its system's own
loop, which goes through the host's memory once. Of several ranks each has its part of parameters,
states and updates, on its own link and its part of the host; what they exchange is not counted.
Torchao's updates begin with their gradients where Python runs ahead of the card, so not where the
whole model is compiled. `bench/results/rivals.json` has the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.published.rivals_steps import STEPS
from bench.report import write_report
from bench.results_page.tables import markdown
from cotrain_compile import presets
from cotrain_compile.analysis.costs import host_update_s, update_bytes
from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.machine import MEMORIES, Machine
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.published import any_rule
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan

RIVALS = Path("bench/published/rivals.json")
RESULT = Path("bench/results/rivals.json")
PLENTY = 1 << 50
_GB = 10**9

Row = Mapping[str, Any]


def machine_of(row: Row, hosts: Mapping[str, Row]) -> Machine:
    """The published card with the published host; all ranks' links and updates where several."""
    found, ranks = presets.find(row["machine"]), row.get("ranks", 1)
    if "host" in row:
        told = hosts[row["host"]]
        update = replace(found.host_update, bytes_per_s=told["update"] * _GB)
        host = replace(found.host, bytes_per_s=told["memory"] * _GB)
        found = found.but(host=host, host_update=update)
    rate = found.host_update.bytes_per_s * ranks
    h2d, d2h = (replace(way, bytes_per_s=way.bytes_per_s * ranks) for way in (found.h2d, found.d2h))
    return found.but(h2d=h2d, d2h=d2h, host_update=replace(found.host_update, bytes_per_s=rate))


def predicted(row: Row, hosts: Mapping[str, Row]) -> dict[str, float]:
    """Milliseconds, and gigabytes of the device, of all layers under the rival's rule."""
    traced, machine = STEPS[row["step"]](), machine_of(row, hosts)
    few, more = (_plan_of(step, machine, row) for step in traced.steps(machine))
    seconds = traced.grown(few[0], more[0])
    if "micro_batches" in row:  # of one of them, with its part of the update
        waits = traced.grown(few[2], more[2])
        seconds -= waits * (1 - 1 / row["micro_batches"])
    return {"predicted_ms": 1e3 * seconds, "predicted_gb": traced.grown(few[1], more[1]) / _GB}


def _plan_of(step: Dataflow, machine: Machine, row: Row) -> tuple[float, float, float]:
    """Seconds, most bytes on the device, and seconds from the end of the backward on."""
    problem = _with_own_loops(
        formulate(step, machine, dict.fromkeys(MEMORIES, PLENTY), compiled=row["compiled"]),
        row.get("ranks", 1),
    )
    placement = any_rule(row["rule"])(step)
    early = row["rule"] == "torchao-offload" and not row.get("late", False)
    plan = schedule(problem, replace(placement, early_updates=early))
    ends = plan.predicted.makespan_s
    computed = max(s.end_s for s in plan.predicted.spans if s.lane == "device")
    return (
        ends,
        float(_most_bytes(problem, plan, row.get("keeps_gradients", False))),
        ends - computed,
    )


def _with_own_loops(problem: Problem, ranks: int) -> Problem:
    """Each update is a loop that reads and writes all that it owns once, in its own dtype."""
    step, machine, costs = problem.dataflow, problem.machine, problem.costs
    host_s = {
        group.param: update_bytes(step, group) / machine.host_update.bytes_per_s
        for group in step.updates
    }
    device_s = dict(costs.device_s)
    for op in step.ops:
        if op.phase is Phase.OPTIMIZER:
            device_s[op.name] /= ranks
    return replace(problem, costs=replace(costs, host_update_s=host_s, device_s=device_s))


def _most_bytes(problem: Problem, plan: Plan, keeps_gradients: bool) -> int:
    """On the device; where a system keeps gradients, with all that have been sent down."""
    placed = place_plan(problem, plan)
    held = list(placed.device_bytes)
    gradients = {group.gradient for group in problem.dataflow.updates} if keeps_gradients else set()
    for instance in placed.instances:
        if instance.buffer.name in gradients:
            for slot in range(instance.last, len(held)):
                held[slot] += instance.buffer.nbytes
    return max(held)


def updates(told: Row) -> list[dict[str, float]]:
    """Seconds of updates of so many billion parameters, by a loop and op by op."""
    machine = presets.find(told["machine"])
    step, *_ = STEPS[told["step"]]().steps(machine)
    parameters = sum(b.nbytes for b in step.buffers if b.role is Role.PARAM) / 4
    found = [
        sum(host_update_s(step, group, machine, captured=captured) for group in step.updates)
        for captured in (False, True)
    ]
    return [
        {
            "params_B": billions,
            "cpu_adam_s": adam,
            "pytorch_s": torch,
            **{
                f"predicted {way}": round(s * billions * 1e9 / parameters, 2)
                for way, s in zip(("loop_s", "ops_s"), found, strict=True)
            },
        }
        for billions, adam, torch in zip(
            told["params_B"], told["cpu_adam_s"], told["pytorch_s"], strict=True
        )
    ]


def table(result: Mapping[str, Any]) -> str:
    """Published beside predicted."""
    headings = (
        "system",
        "step",
        "its rule, published",
        "predicted",
        "off by",
        "memory",
        "predicted",
    )
    rows = markdown(headings, [_cells(row) for row in result["rivals"]])
    return f"{result['about']}\n\n{rows}"


def _cells(row: Row) -> tuple[str, ...]:
    published, found = row.get("step_ms"), row["predicted_ms"]
    gb, within = row.get("peak_gb"), "at most " * row.get("fits", False)
    return (
        row["system"],
        row["step"] + (", compiled" if row["compiled"] else ""),
        f"{published:,} ms" if published else "-",
        f"{found:,.0f} ms" if published else "-",
        f"{100 * (found / published - 1):+.0f} %" if published else "-",
        f"{within}{gb} GB" if gb else "-",
        f"{row['predicted_gb']:.1f} GB" if gb else "-",
    )


def main() -> None:
    """Predict each rival's step, and write them beside what was published."""
    told = json.loads(RIVALS.read_text())
    rows = [{**row, **predicted(row, told["hosts"])} for row in told["rows"]]
    result = {
        "about": told["about"],
        "sources": told["sources"],
        "rivals": rows,
        "updates": updates(told["updates"]),
    }
    write_report(RESULT, "Do we predict what others have published of theirs?", result)
    print(table(result))
    print(json.dumps(result["updates"], indent=1))


if __name__ == "__main__":
    main()
