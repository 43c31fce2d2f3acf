"""Rivals: published step times of systems that offload, beside what we predict of their rules.

    python -m bench.published.rivals

Steps of few layers grow to all by what one more takes. Each system's rule is placed, scheduled and
simulated on the preset of the published card with a host as published: a Ryzen 5600 has two
channels of DDR4-3200, 51.2 GB/s x 0.75, and updates 0.43 of 51.2 GB/s over 28 bytes, the fraction
that CPU-Adam reaches on a DGX-2. Rivals run in eager; what compiled code would take is told too.
`bench/results/rivals.json` has the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.published.fit import ROWS
from bench.published.steps import traced_of
from bench.report import write_report
from bench.results_page.tables import markdown
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import MEMORIES, Machine
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule

RIVALS = Path("bench/published/rivals.json")
RESULT = Path("bench/results/rivals.json")
STEP = "ao-vitg-none"
PLENTY = 1 << 50
_GB = 10**9


def machine() -> Machine:
    """The published card with the published host."""
    found = presets.find("rtx4070ti-super")
    update = replace(found.host_update, bytes_per_s=0.43 * 51.2 * _GB)
    return found.but(host=replace(found.host, bytes_per_s=38.4 * _GB), host_update=update)


def table(result: Mapping[str, Any]) -> str:
    """Published beside predicted, eager and compiled."""
    what = json.loads(RIVALS.read_text())["about"]
    headings = ("system", "published", "its rule, eager", "off by", "its rule, compiled")
    return f"{what}\n\n" + markdown(
        headings,
        [
            (
                row["system"],
                f"{row['step_ms']:,} ms",
                f"{row['eager_ms']:,.0f} ms",
                f"{100 * (row['eager_ms'] / row['step_ms'] - 1):+.0f} %",
                f"{row['compiled_ms']:,.0f} ms",
            )
            for row in result["rivals"]
        ],
    )


def main() -> None:
    """Predict each rival's step, and write them beside what was published."""
    (row,) = (r for r in json.loads(ROWS.read_text())["rows"] if r["id"] == STEP)
    traced = traced_of(row)
    assert traced is not None, f"no step here for {STEP}"
    target = machine()
    few, more = traced.steps(target)
    told = []
    for rival in json.loads(RIVALS.read_text())["rows"]:
        found = {}
        for way, compiled in (("eager_ms", False), ("compiled_ms", True)):
            seconds = (_seconds(step, target, rival, compiled) for step in (few, more))
            found[way] = 1e3 * traced.grown(*seconds)
        told.append({**rival, **found})
    write_report(RESULT, "Do we predict what others have published of theirs?", {"rivals": told})
    print(table({"rivals": told}))


def _seconds(step: Dataflow, target: Machine, rival: Mapping[str, Any], compiled: bool) -> float:
    """Of a step under the rival's rule."""
    problem = formulate(step, target, dict.fromkeys(MEMORIES, PLENTY), compiled=compiled)
    placement = replace(rule(rival["rule"])(step), early_updates=rival["early_updates"])
    return schedule(problem, placement).predicted.makespan_s


if __name__ == "__main__":
    main()
