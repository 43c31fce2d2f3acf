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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.published.rivals_steps import STEPS
from bench.report import write_report
from bench.results_page.tables import markdown
from cotrain_compile import presets
from cotrain_compile.analysis.costs import host_update_s, update_bytes
from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.machine import MEMORIES, Machine, Tier
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.published import any_rule
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Lane

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


@dataclass(frozen=True)
class Found:
    """Of a step under a rule: seconds, those behind the device's last op, and bytes."""

    seconds: float
    waits_s: float
    peak_bytes: int
    own_bytes: int  # of parameters and their gradients


def predicted(row: Row, hosts: Mapping[str, Row]) -> dict[str, float]:
    """Milliseconds, and gigabytes of the device, of all layers under the rival's rule."""
    traced, machine = STEPS[row["step"]](), machine_of(row, hosts)
    few, more = (_found(step, machine, row) for step in traced.steps(machine))
    seconds = traced.grown(few.seconds, more.seconds)
    if "micro_batches" in row:  # of one of them, with its part of the update
        seconds -= traced.grown(few.waits_s, more.waits_s) * (1 - 1 / row["micro_batches"])
    peak_bytes = traced.grown(few.peak_bytes, more.peak_bytes)
    if row.get("keeps_gradients", False):  # till the end of the step
        peak_bytes = max(peak_bytes, traced.grown(few.own_bytes, more.own_bytes))
    return {"predicted_ms": 1e3 * seconds, "predicted_gb": peak_bytes / _GB}


def _found(step: Dataflow, machine: Machine, row: Row) -> Found:
    problem = _with_own_loops(
        formulate(step, machine, dict.fromkeys(MEMORIES, PLENTY), compiled=row["compiled"]),
        row.get("ranks", 1),
    )
    again = step.checkpoints.values if step.checkpoints.dissolved else ()
    allowed = recomputable(step)
    placement = replace(
        any_rule(row["rule"])(step),
        recomputed=tuple(name for name in again if name in allowed),
        early_updates=row["rule"] == "torchao-offload" and not row.get("late", False),
    )
    timeline = schedule(problem, placement).predicted
    ends_s = timeline.makespan_s
    own = [name for group in step.updates for name in (group.param, group.gradient)]
    return Found(
        ends_s,
        ends_s - max(span.end_s for span in timeline.lane(Lane.DEVICE)),
        timeline.peak_bytes[Tier.DEVICE],
        sum(step.buffer[name].nbytes for name in own),
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


def updates(told: Row) -> list[dict[str, float]]:
    """Seconds of updates of so many billion parameters by a loop, as one layer more takes."""
    machine = presets.find(told["machine"])
    few, more = STEPS[told["step"]]().steps(machine)
    seconds, elements = (
        measure(more) - measure(few)
        for measure in (
            lambda step: sum(host_update_s(step, group, machine) for group in step.updates),
            lambda step: sum(b.nbytes for b in step.buffers if b.role is Role.PARAM) / 4,
        )
    )
    each_s = seconds / elements
    return [
        {"params_B": billions, "published_s": published, "predicted_s": each_s * billions * 1e9}
        for billions, published in zip(told["params_B"], told["cpu_adam_s"], strict=True)
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
    off = ", ".join(
        f"{u['predicted_s']:.2f} for {u['published_s']:.2f} s of {u['params_B']} B"
        for u in result["updates"]
    )
    return f"{result['about']}\n\n{rows}\n\n{_WHY.format(off)}"


# What the table shows, for who reads it.
_WHY = """Updates of ZeRO-Offload's CPU-Adam on its DGX-2, the preset's rate being that of 10 B: {}.
Eager torchao, whose weights come up behind the backward and are waited for, is slower than its
rule, whose weights come up beside the next forward. DeepSpeed's steps do more on the host than
update: its configuration clips, so that gradients are widened, their norm taken and scaled there,
and Python copies each; by what is published that host updates 0.7 billion parameters a second for
each card where CPU-Adam alone did twice as many on a socket of a DGX-2. Bound or not is no figure
of a preset. So gains over these rules are smaller than gains over these systems."""


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
