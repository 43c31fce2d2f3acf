"""Golden cases of placements: a dataflow of a few ops and one rule in, the whole plan out.

`pytest -k golden_cases --update-golden` writes the plans again; then read the diff. Only what
chooses by a rule is here: what a solver finds among equals may differ between its versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import HostUpdate, Link, Machine, Tier, TierSpec, two_tier
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.greedy import greedy, least_memory
from cotrain_compile.plan import Placement
from tests.support import dataflow_text, placement_text
from tests.support.golden_cases import Case, cases, read

TACTICS: dict[str, Tactics] = {
    "eager": EAGER,
    "lookahead": Tactics(lookahead=0.1),
    "by-use": Tactics(by_use=True),
}


def machine() -> Machine:
    """A card of 1 TFLOP/s behind a link of 1 GB/s, so that the copies of a few KiB show."""
    device = TierSpec(1 << 30, bytes_per_s=100e9, flops_per_s={"float32": 1e12}, launch_s=2e-6)
    host = TierSpec(1 << 30, bytes_per_s=10e9, flops_per_s={"float32": 1e11})
    link = Link(bytes_per_s=1e9, latency_s=1e-6)
    update = HostUpdate(bytes_per_s=4e9, workers=2, slowdown_while_copying=1.25)
    return two_tier("golden", device, host, link, link, update)


def chosen(problem: Problem, policy: str) -> Placement:
    """What one rule decides, or one of the two deciders that need no solver."""
    space: DecisionSpace = decision_space(problem, None)
    match policy:
        case "greedy":
            return space.placement(policy, greedy(space, problem.budgets[Tier.DEVICE]))
        case "least":
            return space.placement(policy, least_memory(space))
    return rule(policy)(problem.dataflow)


def planned(case: Case) -> str:
    said = dict(line.split(" = ") for line in case.sections["asked"].strip().splitlines())
    dataflow = dataflow_text.parse(case.sections["dataflow"])
    device, host = (int(said.get(tier, 1 << 30)) for tier in ("device", "host"))
    problem = formulate(dataflow, machine(), {Tier.DEVICE: device, Tier.HOST: host})
    try:
        placement = chosen(problem, said["policy"])
        if "overlap" in said:
            placement = replace(placement, overlap_steps=True)
        if "recompute" in said:
            placement = replace(placement, recomputed=tuple(said["recompute"].split()))
        plan = schedule(problem, placement, tactics=TACTICS[said.get("tactics", "eager")])
    except CotrainError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return placement_text.text(plan)


@pytest.mark.parametrize("path", cases("placement"), ids=lambda path: path.stem)
def test_a_step_is_planned(path: Path, golden: Callable[[str, str], None]) -> None:
    case = read(path)
    golden(f"cases/{case.stop}/{path.name}", case.with_output(planned(case)))
