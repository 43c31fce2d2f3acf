"""Segments of a placed step do what its ops did: same tasks, same bits, no more memory.

Inductor is replaced by an interpreter of the segments' own graphs, so only the cut is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from cotrain_compile.backends.inductor import lower as lowering
from cotrain_compile.backends.inductor.lower import LoweredStep, lower
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.ops import TASKS
from cotrain_compile.runtime.ops import cotrain as ops
from tests.support.captured_steps import TRAININGS, captured, differences, reference
from tests.support.plans.random_plans import random_plan
from tests.support.steps import CASES, OPTIMIZERS, Step, cotrain, make_step, task_name


class Interpreted:
    """Runs a segment's graph as it is, and empties the list of inputs as compiled code does."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], settings: Any, strides: Any
    ) -> None:
        self.module = module
        shown = module.graph.find_nodes(op="placeholder")
        assert len(shown) == len(inputs)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        given = list(arguments)
        arguments.clear()
        return fx.Interpreter(self.module).run(*given)  # type: ignore[no-any-return]


def lowered(name: str, plan: Plan, eager_segments: tuple[str, ...] = ()) -> LoweredStep:
    step = captured(name).step
    placed = run_passes(step, plan)
    with mock.patch.object(lowering, "compile_graph", Interpreted):
        return lower(step, placed, captured(name).dataflow, {}, eager_segments)


def compiled(name: str, plan: Plan) -> CompiledStep:
    problem = captured(name).problem()
    placed = run_passes(captured(name).step, plan)
    budgets = {**plan.budgets, Tier.DEVICE: 2 * plan.budgets[Tier.DEVICE]}
    device = EmulatedDevice(problem.machine, budgets, host_kernels(placed, "captured"))
    return CompiledStep(problem, plan, placed, device, lowered(name, plan))


def some_plan(name: str, seed: int) -> Plan:
    return random_plan(captured(name).problem(), random.Random(f"{name} {seed}"))


def resident_plan(name: str) -> Plan:
    return solve(captured(name).problem(), SolveSettings(policy="resident"))


LONG_ONLY = (
    *("llama", "muon", "t5", "gpt2", "conv", "tied", "autocast-unclipped"),
    *("unclipped", "frozen", "accumulating"),
)
SEEDS = [
    pytest.param(name, seed, marks=pytest.mark.long if seed or name in LONG_ONLY else ())
    for name in TRAININGS
    for seed in range(5)
]


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_segments_of_a_random_plan_leave_the_same_bits(name: str, seed: int) -> None:
    plan = some_plan(name, seed)
    if "autocast" in name:
        # A bfloat16 product of oneDNN takes working memory that no plan knows.
        plan = replace(plan, budgets=dict.fromkeys(MEMORIES, 1 << 30))
    assert not differences(captured(name).train(compiled(name, plan)), reference(name))


@pytest.mark.parametrize(
    "name",
    [
        "clipped",
        "gpt2",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("accumulating", "autocast")),
    ],
)
def test_segments_of_a_resident_step_leave_the_same_bits(name: str) -> None:
    step = compiled(name, resident_plan(name))
    assert not differences(captured(name).train(step), reference(name))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name", ["clipped", "autocast", "accumulating", pytest.param("conv", marks=pytest.mark.long)]
)
def test_the_tasks_of_the_plan_stay_in_order(name: str, seed: int) -> None:
    plan = some_plan(name, seed)

    def tasks(graph: fx.Graph) -> list[str]:
        found = [node for node in graph.nodes if node.target in TASKS]
        return [str(n.args[0]) if n.target is ops.wait else task_name(n) for n in found]

    placed = run_passes(captured(name).step, plan)
    step = lowered(name, plan).segmented.step
    assert tasks(placed.module.graph) == tasks(step.module.graph)


def test_a_step_called_with_other_batch_sizes_is_cut_for_each() -> None:
    def losses(compile_with: Callable[[Step], Step]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = CASES["mlp"].make_model()
        step = compile_with(make_step(model, OPTIMIZERS["adamw"](model), CASES["mlp"].loss_of))
        x, y = CASES["mlp"].make_batch()
        return [step(x[:rows], y[:rows]) for rows in (8, 6, 5, 8)]

    with mock.patch.object(lowering, "compile_graph", Interpreted):
        found = losses(cotrain(policy="resident", lowering="inductor"))
    torch.testing.assert_close(found, losses(lambda step: step))


def test_no_two_inputs_of_a_segment_share_memory() -> None:
    whole = lowered("gpt2", resident_plan("gpt2")).segmented
    calls = whole.step.module.graph.find_nodes(op="call_module")
    assert calls
    for call in calls:
        makers = {value.meta["val"].untyped_storage()._cdata for value in call.args}
        assert len(makers) == len(call.args)


def test_ops_that_are_to_run_in_eager_are_in_no_segment() -> None:
    plan = resident_plan("clipped")
    names = {s.name for s in lowered("clipped", plan).segmented.segments.values()}
    left = lowered("clipped", plan, ("0:*", "4:1")).segmented
    assert {s.name for s in left.segments.values()} == {
        name for name in names if not name.startswith("0:") and name != "4:1"
    }


def test_a_pattern_for_no_segment_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(OptionError, match=r"'layer7:\*'; segments are .*'?0:0"):
        lowered("clipped", resident_plan("clipped"), ("layer7:*",))
