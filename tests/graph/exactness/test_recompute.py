"""A step that makes values again, as a user writes it: eager's numbers in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.machine.parts import Link
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.search.variants import Levels
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.presets import find
from cotrain_compile.support.units import format_bytes
from cotrain_compile.viz.text.diff import describe_diff
from cotrain_compile.viz.text.summary import summary
from tests.support.random_problems import resident_bytes, with_budget
from tests.support.steps import CASES, OPTIMIZERS, Run, check_peak, cotrain, train
from tests.support.work import LITTLE_WORK

GPT = Path(__file__).parents[2] / "problems" / "gpt.json"
# Of what the step takes with everything on the device.
SHARE = 0.8


def slow_link(folder: Path) -> str:
    """A file with this machine, its links so slow that whatever can be is made again."""
    slow = Link(bytes_per_s=2e6, latency_s=1e-4)
    files.save(find("this-machine").but(h2d=slow, d2h=slow), folder / "slow.json")
    return str(folder / "slow.json")


def train_with(**options: Any) -> tuple[Run, CompiledStep]:
    seen: list[CompiledStep] = []

    def after(step: Any) -> None:
        check_peak(step)
        seen.append(cotrain_compile.inspect(step))

    torch._dynamo.reset()
    run = train(CASES["gpt2"], OPTIMIZERS["sgd"], cotrain(**options), after, steps=3)
    return run, seen[-1]


def test_a_step_makes_values_again_and_is_that_of_eager(tmp_path: Path) -> None:
    machine = slow_link(tmp_path)
    whole, resident = train_with(policy="resident")
    budget = int(SHARE * resident.plan.predicted.peak_bytes[Tier.DEVICE])
    asked = {"memory_budget": budget, "machine": machine, "work_limit": LITTLE_WORK, "split": "off"}
    run, compiled = train_with(**asked, verify=1, dump=str(tmp_path / "dump"))
    plan, step = compiled.plan, compiled.problem.dataflow
    assert plan.placement.recomputed
    assert all(torch.equal(a, b) for a, b in zip(run.losses, whole.losses, strict=True))
    assert all(torch.equal(run.tensors[name], value) for name, value in whole.tensors.items())

    told = f"recomputes  {format_bytes(made_again(plan.placement.recomputed, step))} in "
    assert told in (tmp_path / "dump" / "summary.txt").read_text()
    assert "recomputed for the backward" in (tmp_path / "dump" / "report.html").read_text()
    assert "recomputed" in (tmp_path / "dump" / "predicted.trace.json").read_text()
    assert "_recomputed" in (tmp_path / "dump" / "placed.py.txt").read_text()
    assert "not recomputed now" in describe_diff(plan, resident.plan)

    saved = str(tmp_path / "dump" / "plan.json")
    again, reloaded = train_with(**asked, plan=saved)
    assert reloaded.plan.placement == plan.placement
    assert all(torch.equal(a, b) for a, b in zip(again.losses, whole.losses, strict=True))
    with pytest.raises(PlanError, match="the option recompute is 'off'"):
        train_with(**asked, plan=saved, recompute="off")


def made_again(names: tuple[str, ...], step: Dataflow) -> int:
    return sum(step.buffer[name].nbytes for name in names)


@pytest.mark.long  # the gate has the plan with recomputation for this budget in every run
def test_with_recomputation_no_plan_is_slower_nor_below_the_bound() -> None:
    """On a slow link it is worth more than half of the step; the bound knows that."""
    step = files.load(GPT, Dataflow)
    roomy = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 50))
    problem = with_budget(roomy, resident_bytes(roomy) // 2)
    plans = [
        solve(problem, SolveSettings(work_limit=LITTLE_WORK, recompute=on)) for on in (False, True)
    ]
    for plan in plans:
        check(problem, plan)
    off, on = plans
    assert not off.placement.recomputed
    assert on.placement.recomputed
    assert on.predicted.makespan_s < 0.6 * off.predicted.makespan_s
    assert on.report is not None
    assert 0 < on.report.lower_bound_s <= on.predicted.makespan_s
    assert "recomputes  " in summary(on, step)
    assert f"{len(on.placement.recomputed)} values" in summary(on)


@pytest.mark.parametrize("number", [1, pytest.param(5, marks=pytest.mark.long)])
def test_every_level_is_a_plan_above_the_bound_for_its_budget(number: int) -> None:
    """With everything on the device, at exactly the bytes that it needs there."""
    roomy = formulate(files.load(GPT, Dataflow), find("gh200"), dict.fromkeys(MEMORIES, 1 << 50))
    level = Levels(roomy).variant(number)
    plan = schedule(roomy, level.by_rule("resident"))
    least = plan.predicted.peak_bytes[Tier.DEVICE]
    assert least < resident_bytes(roomy)
    tight = with_budget(roomy, least)
    check(tight, schedule(tight, plan.placement))
    bound_s = certified_bound_s(
        tight, "highs", work=Allowance(Meter(), 20), seed=0, cyclic=False, recompute=True
    )
    assert 0 < bound_s <= plan.predicted.makespan_s
    without_s = certified_bound_s(tight, "highs", work=Allowance(Meter(), 20), seed=0, cyclic=False)
    assert bound_s <= without_s * (1 + 1e-9)
