"""Every mode of placement is exact: random plans, bitwise against the graph as it was captured.

A step is captured once, with its tensors. Each plan then runs three steps from the same start, on
an emulated device that has exactly the memory of the slot model, and leaves the same losses,
parameters and optimizer states, to the bit. Without a wait, or with a link that fails, it shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, fx

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import MEMORIES, Link, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.check.replay import replay
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import resident
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer, UpdateMode
from cotrain_compile.presets import find
from cotrain_compile.runtime.ops import TASKS, Launch
from cotrain_compile.runtime.ops import cotrain as ops
from tests.support.captured_steps import (
    TRAININGS,
    Captured,
    captured,
    differences,
    place,
    reference,
)
from tests.support.plans.random_plans import last_moment_plan, random_plan
from tests.support.steps import task_name

LONG_ONLY = ("llama", "muon", "t5")


# Random plans.


def seeds(count: int, in_a_long_run: int) -> list[Any]:
    """Seeds by training: `count` in every run but for slow trainings, more in a long one."""
    found = []
    for name in TRAININGS:
        for seed in range(in_a_long_run):
            is_long = name in LONG_ONLY or seed >= count
            marks = pytest.mark.long if is_long else ()
            found.append(pytest.param(name, seed, marks=marks))
    return found


@pytest.mark.parametrize(("name", "seed"), seeds(3, in_a_long_run=100))
def test_a_random_plan_is_exact_in_exactly_its_memory(name: str, seed: int) -> None:
    problem = captured(name).problem()
    plan = random_plan(problem, random.Random(f"{name} {seed}"))
    check(problem, plan)
    compiled = place(name, plan)
    peaks: list[Mapping[Tier, int]] = []

    def run(inputs: list[Any]) -> Any:
        outputs = compiled(inputs)
        assert compiled.measured is not None
        peaks.append(compiled.measured.peak_bytes)
        return outputs

    assert not differences(captured(name).train(run), reference(name))
    modelled = max(place_plan(problem, plan).device_bytes)
    assert {peak[Tier.DEVICE] for peak in peaks} == {modelled}
    # A copy on the host goes when the last task that reads it is done.
    most = replay(problem.dataflow, plan)[Tier.HOST].nbytes
    assert all(peak[Tier.HOST] <= most for peak in peaks)


def moment(node: fx.Node, offloads: set[str]) -> int:
    """When in a gap the node of a task comes, see `plan.Transfer`."""
    if node.target is ops.wait:
        names: list[str] = node.args[0]  # type: ignore[assignment]
        return 1 if offloads.issuperset(names) else 3
    return 2 if node.target is ops.prefetch else 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["clipped", "autocast"])
def test_between_two_ops_things_happen_in_the_order_of_the_plan(name: str, seed: int) -> None:
    step = captured(name)
    plan = random_plan(step.problem(), random.Random(f"{name} {seed}"))
    offloads = {task.name for task in plan.transfers if task.direction == "offload"}
    issued: list[str] = []
    last = 0
    for node in run_passes(step.step, plan).nodes:
        if node.target in TASKS:
            assert moment(node, offloads) >= last
            last = moment(node, offloads)
            if node.target is not ops.wait:
                issued.append(task_name(node))
        elif node.name in step.step.phases:
            last = 0
    is_fetched = {task.name: is_fetch(task) for task in plan.tasks}
    gaps = [task.issue_after for task in plan.tasks]
    expected = sorted(plan.tasks, key=lambda t: (gaps.index(t.issue_after), is_fetched[t.name]))
    assert issued == [task.name for task in expected]


# Broken graphs.


def plan_with(
    name: str, modes: dict[str, UpdateMode], on_host: tuple[str, ...], *, offloaded: bool = False
) -> Plan:
    """A plan in which `modes` and `on_host` (with the states of those) differ from resident."""
    problem = captured(name).problem()
    start = resident(problem.dataflow)
    states = [s for param in modes for s in problem.dataflow.update[param].states]
    homes = {**start.homes, **dict.fromkeys((*states, *on_host), Tier.HOST)}
    placement = replace(start, homes=homes, updates={**start.updates, **modes})
    return last_moment_plan(problem, placement, offloaded=offloaded)


def is_fetch(task: Task) -> bool:
    return isinstance(task, Transfer) and task.is_fetch


def is_offload(task: Task) -> bool:
    return isinstance(task, Transfer) and task.direction == "offload"


def is_host_update(task: Task) -> bool:
    """With the copies down that it begins with."""
    return isinstance(task, HostRegion) or is_offload(task)


@dataclass(frozen=True)
class Unwaited:
    """How the first weight of a training is placed, and which tasks are not waited for."""

    name: str
    mode: UpdateMode | None
    on_host: tuple[str, ...]
    tasks: Callable[[Task], bool]
    offloaded: bool = False

    @property
    def plan(self) -> Plan:
        modes = {} if self.mode is None else {"0.weight": self.mode}
        return plan_with(self.name, modes, self.on_host, offloaded=self.offloaded)


WEIGHT = ("0.weight",)
STREAMED, HOST_STREAMED = UpdateMode.STREAMED, UpdateMode.HOST_STREAMED
UNWAITED = {
    "states for their update": Unwaited("clipped", STREAMED, (), is_fetch),
    "a weight for its update": Unwaited("autocast", STREAMED, WEIGHT, is_fetch),
    "a weight": Unwaited("clipped", HOST_STREAMED, WEIGHT, is_fetch),
    "a low-precision weight": Unwaited("autocast", HOST_STREAMED, WEIGHT, is_fetch),
    "a frozen weight": Unwaited("frozen", None, WEIGHT, is_fetch),
    "activations and a weight again": Unwaited(
        "clipped", HOST_STREAMED, WEIGHT, is_fetch, offloaded=True
    ),
    "states on their way home": Unwaited("clipped", STREAMED, (), is_offload),
    "an update at home": Unwaited("clipped", HOST_STREAMED, WEIGHT, is_host_update),
}


def without_waits(compiled: CompiledStep, tasks: set[str]) -> CompiledStep:
    """The step made anew, from the same graph but for the waits for `tasks`."""
    graph = compiled.graph
    for wait in graph.module.graph.find_nodes(op="call_function", target=ops.wait):
        names, kept = wait.args
        wait.args = ([name for name in names if name not in tasks], kept)
    return CompiledStep(compiled.problem, compiled.plan, graph, compiled._device)


@pytest.mark.parametrize("case", UNWAITED)
def test_a_missing_wait_shows_as_a_wrong_number(case: str) -> None:
    unwaited = UNWAITED[case]
    # A copy that is not waited for may still hold its source: memory is not what is tested here.
    plan = replace(unwaited.plan, budgets=dict.fromkeys(MEMORIES, 1 << 30))
    tasks = {task.name for task in plan.tasks if unwaited.tasks(task)}
    assert tasks
    slow = Link(bytes_per_s=1e9, latency_s=0.005)
    # What is on its way home, or updated there, has to be so still when the next step fetches it.
    slower = replace(slow, latency_s=slow.latency_s if unwaited.tasks is is_fetch else 0.05)
    machine = find("this-machine").but(h2d=slow, d2h=slower)
    step, expected = captured(unwaited.name), reference(unwaited.name)
    sound, broken = (place(unwaited.name, plan, machine, throttle=True) for _ in range(2))
    assert not differences(step.train(sound), expected)
    left = step.train(without_waits(broken, tasks))
    assert differences(left, expected)
    if unwaited.tasks is is_fetch:
        assert any(value.isnan().any() for value in left if isinstance(value, Tensor))


# Failing steps.


def run_failing_step(stores_that_work: int) -> tuple[Captured, list[Any], str]:
    """Run a step that streams everything, in which one store to the host fails."""
    step = captured("clipped")
    groups = step.dataflow.updates
    modes = dict.fromkeys((g.param for g in groups), UpdateMode.STREAMED)
    plan = plan_with("clipped", modes, tuple(modes))
    compiled = place("clipped", plan)
    device = compiled._device
    store, calls = device.offload_into, list[str]()

    def fail_late(home: Tensor, source: Tensor, launch: Launch) -> None:
        calls.append(launch.task)
        if len(calls) > stores_that_work:
            raise RuntimeError("the link is down")
        store(home, source, launch)

    inputs = [v.clone() if isinstance(v, Tensor) else v for v in step.inputs]
    with (
        mock.patch.object(device, "offload_into", fail_late),
        pytest.raises((RuntimeError, StepFailed), match="the link is down") as failure,
    ):
        compiled(list(inputs))
    return step, inputs, str(failure.value)


def test_a_streamed_step_that_fails_before_its_first_store_has_changed_nothing() -> None:
    step, left, message = run_failing_step(0)
    assert not differences(left, list(step.inputs))
    assert "one step ahead" not in message


def test_a_streamed_step_that_fails_later_names_what_has_been_stored() -> None:
    step, left, message = run_failing_step(3)
    changed = [step.step.inputs[position].name for position in differences(left, list(step.inputs))]
    assert len(changed) == 3
    assert "3 tensors are one step ahead" in message
    assert all(name in message for name in changed)
