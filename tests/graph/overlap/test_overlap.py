"""Overlapping steps are exact: what one leaves to the next is waited for by all who look at it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import wait_for_deferred
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import MEMORIES, Link, Machine, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.plan import Span, UpdateMode
from cotrain_compile.presets import find
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.lanes import Task
from cotrain_compile.runtime.ops import cotrain as ops
from tests.graph.runtime.test_modes import LONG_ONLY, plan_with
from tests.support.captured_steps import TRAININGS, captured, differences, place, reference
from tests.support.plans.overlapping_plans import overlapping
from tests.support.plans.random_plans import random_plan
from tests.support.steps import task_name


def slow_machine() -> Machine:
    """Links that are slow enough for a step to return long before its copies are done."""
    slow = Link(bytes_per_s=1e9, latency_s=0.002)
    machine = find("this-machine")
    # With two workers the order on the host's lane holds nothing back.
    return machine.but(h2d=slow, d2h=slow, host_update=replace(machine.host_update, workers=2))


def seeds(count: int) -> list[Any]:
    """Seeds by training: some in every run, many more in a long one."""
    return [
        pytest.param(
            name, seed, marks=pytest.mark.long if name in LONG_ONLY or seed >= count else ()
        )
        for name in TRAININGS
        for seed in range(20 * count)
    ]


@pytest.mark.parametrize("throttle", [False, True])
@pytest.mark.parametrize(("name", "seed"), seeds(1))
def test_random_overlapping_steps_are_exact_in_exactly_their_memory(
    name: str, seed: int, throttle: bool
) -> None:
    slow = slow_machine()
    problem = captured(name).problem(slow)
    rng = random.Random(f"{name} {seed}")
    plan = overlapping(problem, random_plan(problem, rng), rng)
    check(problem, plan)
    compiled = place(name, plan, slow, throttle=throttle)
    peaks = []

    def run(inputs: list[Any]) -> Any:
        outputs = compiled(inputs)
        assert compiled.measured is not None
        peaks.append(compiled.measured.peak_bytes)
        return outputs

    assert not differences(train_to_the_end(name, run), reference(name))
    modelled = max(place_plan(problem, plan).device_bytes)
    assert {peak[Tier.DEVICE] for peak in peaks} == {modelled}
    most = replay(problem.dataflow, plan, slow.host_update.workers)[Tier.HOST].nbytes
    assert all(peak[Tier.HOST] <= most for peak in peaks)


def train_to_the_end(name: str, run: Callable[[list[Any]], Any]) -> list[Any]:
    """What the steps leave when all that was deferred is done."""
    left = captured(name).train(run)
    wait_for_deferred()
    return left


# Broken graphs and the plans behind them.

MODES = {
    "a weight at home on the device": (UpdateMode.HOST, ()),
    "a weight at home on the host": (UpdateMode.HOST_STREAMED, ("0.weight",)),
}


@pytest.mark.parametrize("case", MODES)
@pytest.mark.parametrize("name", ["clipped", "autocast"])
def test_a_missing_wait_for_the_step_before_is_refused_and_shows(name: str, case: str) -> None:
    mode, on_host = MODES[case]
    problem = captured(name).problem()
    simple = plan_with(name, {"0.weight": mode}, on_host)
    plan = overlapping(problem, simple, random.Random(0), share=1.0)
    plan = replace(plan, budgets=dict.fromkeys(MEMORIES, 1 << 30))
    check(problem, plan)
    assert plan.deferred
    unwaited = replace(plan, tasks=tuple(replace(t, after_previous=()) for t in plan.tasks))
    # As late as may be in a step, so that what reads the weight comes first.
    last = place_plan(problem, plan).program.ops[-1].name
    unwaited = replace(
        unwaited,
        tasks=tuple(replace(t, wait_before=last) if t.deferred else t for t in unwaited.tasks),
    )
    with pytest.raises(PlanError, match="of the step before is done with it"):
        check(problem, unwaited)
    machine = slow_machine()
    sound, broken = (place(name, p, machine, throttle=True) for p in (plan, unwaited))
    slow_down_updates(sound)
    slow_down_updates(broken)
    expected = reference(name)
    assert not differences(train_to_the_end(name, sound), expected)
    assert differences(train_to_the_end(name, broken), expected)


def slow_down_updates(compiled: CompiledStep) -> None:
    """Every update on the host begins long after the next step has."""
    device: Any = compiled._device

    def slowly(kernel: HostKernel) -> HostKernel:
        def run(*arguments: Any) -> None:
            time.sleep(0.2)
            kernel(*arguments)

        return run

    device._kernels = {name: slowly(kernel) for name, kernel in device._kernels.items()}


def test_waits_for_the_step_before_are_where_the_plan_has_them() -> None:
    problem = captured("clipped").problem()
    simple = plan_with("clipped", {"0.weight": UpdateMode.HOST}, ())
    plan = overlapping(problem, simple, random.Random(0), share=1.0)
    placed = run_passes(captured("clipped").step, plan)
    found = {}
    for wait in placed.module.graph.find_nodes(op="call_function", target=ops.wait_previous):
        following = next(n for n in placed.nodes if n > wait and n.name in placed.phases)
        found.update(dict.fromkeys(wait.args[0], following.name))
    assert found == {task.name: task.wait_before for task in plan.deferred}
    offloads = [node for node in placed.nodes if node.target is ops.offload]
    (offload,) = (node for node in offloads if task_name(node) == "offload.0.weight")
    assert offload.args[3] == ["update.0.weight", "back.0.weight"]


def test_what_a_task_does_is_cut_to_the_step() -> None:
    task = Task("update.w", "host", lambda: None, ())
    assert task.span(0.0, 1.0) is None
    task.started, task.start_s = True, 10.0
    assert task.span(8.0, 13.0) == Span("host", "update.w", 2.0, 5.0)  # goes on after the step
    task.end_s = 12.0
    task.done.set()
    assert task.span(11.0, 20.0) == Span("host", "update.w", 0.0, 1.0)  # began in the one before
    task.error = RuntimeError()
    assert task.span(8.0, 13.0) is None
