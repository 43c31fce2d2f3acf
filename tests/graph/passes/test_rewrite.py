"""Passes put a plan's tasks into the graph, in an order that is safe, and nothing else."""

from __future__ import annotations

import functools
import operator
import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import cotrain_compile
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.options import Options
from cotrain_compile.passes import PASSES, run_passes
from cotrain_compile.passes.views import available_before
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.ops import cotrain as ops
from cotrain_compile.runtime.ops import host_region
from tests.support.captured_steps import captured
from tests.support.delays import PATIENCE_S, tasks_held_back
from tests.support.plans.random_plans import last_moment_plan
from tests.support.steps import CASES, OPTIMIZERS, Step, all_tensors, cotrain, make_step

TASKS = (ops.offload, ops.prefetch, ops.prefetch_into, host_region)
OTHER_CASES = [pytest.param(case, marks=pytest.mark.long) for case in ("conv", "llama")]


@functools.cache
def captured_step(case: str = "mlp") -> StepGraph:
    def build() -> tuple[Step, tuple[Any, ...]]:
        model = CASES[case].make_model()
        optimizers = OPTIMIZERS["adamw"](model)
        return make_step(model, optimizers, CASES[case].loss_of), CASES[case].make_batch()

    return trace_graph(build)


def plan_for(step: StepGraph, policy: str) -> Plan:
    machine = find("this-machine")
    problem = formulate(extract(step), machine, Options().budgets(machine))
    return solve(problem, SolveSettings(policy=policy))


def name_of(node: fx.Node) -> str:
    """The task that a task node carries out."""
    return str(node.args[2] if node.target is ops.prefetch_into else node.args[1])


def test_what_is_computed_later_is_not_made_earlier() -> None:
    """Only what shows a value of before, or is a number or an attribute, is made anew there."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    attribute, first, second = (
        graph.create_node("get_attr", "constant"),
        graph.call_function(torch.ops.aten.relu.default, (x,)),
        graph.call_function(torch.ops.aten.neg.default, (x,)),
    )
    late = graph.create_node("get_attr", "constant")
    assert available_before(second, first) is first
    assert available_before(second, attribute) is attribute
    made = available_before(first, late)
    assert made < first
    assert (made.op, made.target) == ("get_attr", "constant")
    with pytest.raises(AssertionError, match=r"neg.* is needed before relu"):
        available_before(first, second)


def test_a_resident_plan_changes_nothing() -> None:
    step = captured_step()
    placed = run_passes(step, plan_for(step, "resident"))
    assert [node.name for node in placed.nodes] == [node.name for node in step.nodes]


def test_the_text_of_a_placed_graph_shows_its_tasks() -> None:
    step = captured_step()
    text = run_passes(step, plan_for(step, "fraction:1")).text()
    for task in ("cotrain.offload", "cotrain.prefetch_into", "cotrain.wait", "host_region"):
        assert task in text
    assert "param 0.weight" in text


@pytest.mark.parametrize("policy", ["zero-offload", "coarse", "fraction:0.5"])
@pytest.mark.parametrize("case", ["mlp", "tied", *OTHER_CASES])
def test_every_task_is_issued_once_after_what_it_needs_and_waited_for_once(
    case: str, policy: str
) -> None:
    step = captured_step(case)
    plan = plan_for(step, policy)
    assert plan.tasks
    issued: list[str] = []
    waited: list[str] = []
    for node in run_passes(step, plan).nodes:
        if node.target in TASKS:
            after = node.args[3] if node.target is ops.prefetch_into else node.args[2]
            assert set(after) <= set(issued)  # type: ignore[arg-type]
            issued.append(name_of(node))
        elif node.target is ops.wait:
            assert set(node.args[0]) <= set(issued)  # type: ignore[arg-type]
            waited += node.args[0]  # type: ignore[arg-type]
    names = sorted(task.name for task in plan.tasks)
    assert sorted(issued) == names
    assert sorted(waited) == names


@pytest.mark.parametrize("case", ["mlp", "tied", *OTHER_CASES])
def test_what_is_being_copied_is_not_written_until_the_wait(case: str) -> None:
    step = captured_step(case)
    in_flight: dict[str, object] = {}
    for node in run_passes(step, plan_for(step, "zero-offload")).nodes:
        if node.target is ops.offload:
            in_flight[name_of(node)] = node.args[0]
        elif node.target is ops.wait:
            for task in node.args[0]:  # type: ignore[union-attr]
                in_flight.pop(str(task), None)
        elif node.target is torch.ops.aten.copy_.default:
            assert node.args[0] not in in_flight.values()


def test_the_updates_ops_are_gone_from_the_device() -> None:
    step = captured_step()
    plan = plan_for(step, "zero-offload")
    placed = run_passes(step, plan)
    names = {node.name for node in placed.nodes}
    moved = {op for region in plan.host_regions for op in region.ops}
    assert moved
    assert not moved & names
    regions = placed.module.graph.find_nodes(op="call_function", target=host_region)
    assert len(regions) == len(plan.host_regions)


def test_no_item_of_a_tuple_is_taken_after_its_copy_is_there() -> None:
    """Nobody would use it, and until it is taken it takes memory beside the copy."""
    step = captured("checkpointed")
    plan = last_moment_plan(step.problem(), resident(step.dataflow), offloaded=True)
    placed = run_passes(step.step, plan)
    items = placed.module.graph.find_nodes(op="call_function", target=operator.getitem)
    assert items
    assert all(item.users for item in items)


def test_passes_leave_the_captured_graph_as_it_was() -> None:
    step = captured_step()
    text, fingerprint = step.text(), step.fingerprint
    seen: list[str] = []
    placed = run_passes(
        step, plan_for(step, "zero-offload"), lambda name, before, after: seen.append(name)
    )
    assert seen == [rewrite.__name__ for rewrite in PASSES]
    assert step.text() == text
    assert placed.module is not step.module
    assert replace(step).fingerprint == fingerprint  # the first one is cached
    assert not hasattr(step.module, "region_0")


def test_a_copy_is_equal_and_apart() -> None:
    step = captured_step()
    copied = step.copy().verify()
    assert str(copied.module.graph) == str(step.module.graph)
    assert copied.fingerprint == step.fingerprint
    last = [node for node in copied.nodes if node.op == "call_function"][-1]
    last.replace_all_uses_with(last.all_input_nodes[0])
    copied.module.graph.erase_node(last)
    assert last.name in {node.name for node in step.nodes}
    assert replace(copied).fingerprint != step.fingerprint


@pytest.mark.parametrize("with_wait", [True, False])
def test_a_missing_wait_shows_as_a_wrong_number(with_wait: bool) -> None:
    torch.manual_seed(0)
    model = CASES["mlp"].make_model()
    optimizers = OPTIMIZERS["adamw"](model)
    plain = make_step(model, optimizers, CASES["mlp"].loss_of)
    step = cotrain(policy="zero-offload")(plain)
    step(*CASES["mlp"].make_batch())
    compiled = cotrain_compile.inspect(step)
    last = compiled.graph.module.graph.find_nodes(op="call_function", target=ops.wait)[-1]
    (waited_for, _) = last.args
    device: Any = compiled._device
    wait = device.wait

    def wait_but_for_the_last(tasks: list[str]) -> None:
        # Waits side by side are one, so that another may have these tasks as well.
        wait([task for task in tasks if with_wait or task not in waited_for])

    with (
        mock.patch.object(device, "wait", wait_but_for_the_last),
        tasks_held_back(compiled, waited_for) as gate,
    ):
        # A step that waits ends when its copies may begin; one that does not has ended by then.
        opens = threading.Timer(0.2 if with_wait else PATIENCE_S, gate.set)
        opens.start()
        step(*CASES["mlp"].make_batch())
        seen = {n: v.clone() for n, v in all_tensors(model, optimizers).items()}
        opens.cancel()
    device.drain()
    arrived = all_tensors(model, optimizers)
    # What is read too early is NaN, or the weight before the step if its copy has yet to start.
    early = [name for name, value in seen.items() if not torch.equal(value, arrived[name])]
    assert bool(early) is not with_wait
    assert not any(value.isnan().any() for value in arrived.values())
