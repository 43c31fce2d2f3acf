"""Names of tasks say nothing: a step is scheduled alike whatever its tasks are called."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.explain.sensitivity import slacks
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule import books
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Placement, UpdateMode
from cotrain_compile.presets import find
from cotrain_compile.viz.kinds import kinds_of
from cotrain_compile.viz.report.facts import sentences
from cotrain_compile.viz.specification import bars_of
from cotrain_compile.viz.text.summary import summary
from tests.support.dataflows import chain
from tests.support.plans.renamed_plans import renamed
from tests.support.plans.sound_plans import SOUND

PLENTY = {Tier.DEVICE: 1 << 40, Tier.HOST: 1 << 40}


def keeping_a_gradient() -> tuple[Dataflow, Placement]:
    """A step that adds to a gradient at home on the host, where the update then reads it."""
    sound, step = SOUND["everything_at_once"]().plan.placement, chain(4)
    buffers = tuple(
        replace(b, role=Role.GRADIENT, param="w2", is_input=True) if b.name == "g2" else b
        for b in step.buffers
    )
    ops = tuple(
        replace(op, reads=(*op.reads, "g2")) if op.name == "backward_2" else op for op in step.ops
    )
    homes = {**sound.homes, "g2": Tier.HOST, "w2": Tier.HOST}
    updates = {**sound.updates, "w2": UpdateMode.HOST_STREAMED}
    return replace(step, ops=ops, buffers=buffers), replace(sound, homes=homes, updates=updates)


def from_a_sound_plan(name: str) -> tuple[Dataflow, Placement]:
    return SOUND[name]().dataflow, SOUND[name]().plan.placement


CASES: dict[str, Callable[[], tuple[Dataflow, Placement]]] = {
    name: partial(from_a_sound_plan, name) for name in SOUND
}
CASES["keeping_a_gradient"] = keeping_a_gradient


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_scheduled_alike_whatever_its_tasks_are_called(
    case: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name is drawn: who makes the name of a task a second time to refer to it finds none."""
    draw = random.Random(case).random
    step, placement = CASES[case]()
    placement = replace(placement, overlap_steps=overlap)
    roomy = formulate(step, find("h100"), PLENTY)
    tight = replace(roomy, budgets=schedule(roomy, placement).predicted.peak_bytes)
    for problem in (roomy, tight):
        plan = schedule(problem, placement)
        with monkeypatch.context() as patch:
            patch.setattr(books, "task_name", lambda verb, what: f"task {draw()}")
            other = schedule(problem, placement)
        check(problem, other)
        pairs = zip(plan.tasks, other.tasks, strict=True)
        assert renamed(plan, {task.name: drawn.name for task, drawn in pairs}) == other


@pytest.mark.parametrize("case", ["host_streamed_low_precision", "everything_at_once"])
def test_what_is_said_of_a_plan_differs_in_the_names_alone(case: str) -> None:
    step, placement = CASES[case]()
    problem = formulate(step, find("h100"), PLENTY)
    plan = schedule(problem, replace(placement, overlap_steps=True))
    draw = random.Random(case).random
    names = {task.name: f"task {draw()}" for task in plan.tasks}
    other = renamed(plan, names)
    assert summary(other, step) == summary(plan, step)
    assert slacks(step, other) == slacks(step, plan)
    assert list(sentences(problem, other)) == list(sentences(problem, plan))
    kinds = {names.get(name, name): kind for name, kind in kinds_of(plan).items()}
    assert kinds_of(other) == kinds
    bars = [bars_of(p.predicted, p, step) for p in (plan, other)]
    assert [replace(bar, span="") for bar in bars[1]] == [replace(bar, span="") for bar in bars[0]]
