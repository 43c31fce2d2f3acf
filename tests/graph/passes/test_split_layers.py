"""Attention, experts and convolutions in parts: as the data says, and as exact as the whole."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cotrain_compile.backends.inductor import lower as lowering
from cotrain_compile.backends.inductor.lower import LoweredStep, lower
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow, Op, Role
from cotrain_compile.dataflow.regions import part_rows
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.split_ops import split_ops
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.graph.backends.test_segments_of_steps import Interpreted
from tests.support.layers_in_parts import LAYERS, WHOLE, Layers
from tests.support.steps import compiling_with, cotrain

STEPS = 5
NAMES = pytest.mark.parametrize("name", LAYERS)
# The others are of these kinds, and are the same regions of data and graph, and train as the whole.
OF_EACH_KIND = (
    *("attention", "masked fused attention", "checkpointed attention", "grouped experts"),
    *("one-hot dispatch", "fused gates", "group norm"),
)
KINDS = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OF_EACH_KIND else pytest.mark.long) for n in LAYERS]
)


@functools.cache
def captured(name: str) -> tuple[StepGraph, Dataflow, list[Any]]:
    """The graph of a step, as data too, and what it was called with first."""
    seen: list[Any] = []

    def note(step: StepGraph, dataflow: Dataflow, options: Options) -> Callable[[list[Any]], Any]:
        def run(inputs: list[Any]) -> Any:
            seen.append((step, dataflow, [v.clone() for v in inputs]))
            with torch.no_grad():
                return step.module(*inputs)

        return run

    case: Layers = {**LAYERS, **WHOLE}[name]
    model = case.model()
    torch._dynamo.reset()
    with compiling_with(note):
        cotrain()(case.step(model, torch.optim.SGD(model.parameters(), 0.1)))(case.batch())
    return seen[0]  # type: ignore[no-any-return]


def planned(name: str, parts: int) -> tuple[Problem, Plan]:
    """All on the device, with every region in so many parts."""
    dataflow = captured(name)[1]
    problem = formulate(dataflow, find("this-machine"), dict.fromkeys(MEMORIES, 1 << 40))
    splits = {region.name: parts for region in dataflow.regions}
    return problem, schedule(problem, replace(resident(dataflow), splits=splits))


def in_parts(name: str, parts: int, *, compiled: bool = False) -> CompiledStep:
    problem, plan = planned(name, parts)
    check(problem, plan)
    step = captured(name)[0]
    placed = run_passes(step.copy(), plan)
    device = EmulatedDevice(problem.machine, plan.budgets, host_kernels(placed, "captured"))
    under = problem.under(plan.placement).dataflow
    lowered = lower(step, placed, under, {}, ()) if compiled else None
    return CompiledStep(problem, plan, placed, device, lowered)


def parts_by_code(lowered: LoweredStep) -> list[set[int]]:
    """For each code that runs ops of parts, which parts."""
    found: dict[int, set[int]] = {}
    for name, segment in lowered.segmented.segments.items():
        for part in re.findall(r"_part(\d+)\b", " ".join(segment.ops)):
            found.setdefault(id(lowered.code[name]), set()).add(int(part))
    return list(found.values())


def trained(name: str, run: Callable[[list[Any]], Any]) -> list[torch.Tensor]:
    """All that some steps leave, and the last loss."""
    inputs = [value.clone() for value in captured(name)[2]]
    for _ in range(STEPS):
        with torch.no_grad():
            loss = run(list(inputs))[0]
    return [loss, *inputs]


def whole_step(name: str) -> Callable[[list[Any]], Any]:
    module = captured(name)[0].module
    return lambda inputs: module(*inputs)


def with_memory(dataflow: Dataflow) -> list[Op]:
    """Its ops but views; what a part is given is one more of these."""
    return [op for op in dataflow.ops if op.writes]


@NAMES
def test_a_layer_is_a_region_of_its_kind_over_all_its_rows(name: str) -> None:
    case = LAYERS[name]
    regions = [each for each in captured(name)[1].regions if each.kind == case.kind]
    assert tuple(len(region.windows) for region in regions) == case.windows
    assert {region.length for region in regions} == {case.rows}


@pytest.mark.parametrize("name", WHOLE)
def test_what_no_part_can_do_alone_is_no_region(name: str) -> None:
    assert not captured(name)[1].regions


@NAMES
@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 4])
def test_the_graph_becomes_what_the_dataflow_becomes(name: str, parts: int) -> None:
    step, dataflow, _ = captured(name)
    _, plan = planned(name, parts)
    found = extract(split_ops(step.copy(), plan).verify())
    expected = split_regions(dataflow, plan.placement.splits)
    assert with_memory(found) == with_memory(expected)
    assert {b.name: b for b in found.buffers} == expected.buffer
    assert found.updates == expected.updates


@NAMES
def test_in_one_part_the_step_is_the_same_bit_for_bit(name: str) -> None:
    pairs = zip(trained(name, in_parts(name, 1)), trained(name, whole_step(name)), strict=True)
    assert all(torch.equal(found, whole) for found, whole in pairs)


@NAMES
def test_in_parts_it_trains_as_the_whole_and_the_peak_is_as_planned(name: str) -> None:
    whole = trained(name, whole_step(name))
    for parts in (2, 4):
        step = in_parts(name, parts)
        for found, expected in zip(trained(name, step), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=LAYERS[name].rtol, atol=1e-5)
        measured = step.measured
        assert measured is not None
        planned_bytes = step.plan.predicted.peak_bytes[Tier.DEVICE]
        assert measured.peak_bytes[Tier.DEVICE] == planned_bytes


@KINDS
def test_parts_are_no_further_from_float64_than_the_whole_but_for_a_quarter(name: str) -> None:
    case = LAYERS[name]
    model = case.model(torch.float64)
    step = case.step(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(STEPS):
        step(case.batch(torch.float64))
    roles = [item.role for item in captured(name)[0].inputs]

    def distance(left: list[torch.Tensor]) -> float:
        found = [value for value, role in zip(left[1:], roles, strict=True) if role is Role.PARAM]
        pairs = zip(found, model.parameters(), strict=True)
        return sum(float((a.double() - b.detach()).square().sum()) for a, b in pairs) ** 0.5  # type: ignore[no-any-return]

    whole, parts = (distance(trained(name, run)) for run in (whole_step(name), in_parts(name, 4)))
    assert 0 < parts <= 1.25 * whole


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@KINDS
def test_compiled_parts_are_one_code_and_train_as_the_whole(name: str, is_compiled: bool) -> None:
    as_it_is = mock.patch.object(lowering, "compile_graph", Interpreted)
    with nullcontext() if is_compiled else as_it_is:
        step = in_parts(name, 4, compiled=True)
    for found, whole in zip(trained(name, step), trained(name, whole_step(name)), strict=True):
        torch.testing.assert_close(found, whole, rtol=LAYERS[name].rtol, atol=1e-5)
    assert step.lowered is not None
    of_code = parts_by_code(step.lowered)
    expected = [set(range(len(part_rows(r.length, 4)))) for r in captured(name)[1].regions]
    assert of_code
    # The kernel's backward in a checkpoint has no module: what comes before the first part says in
    # which segment it is, so that this one is compiled by itself.
    first = [{0}, {1, 2}] if name == "checkpointed attention" else []
    assert all(parts in [*expected, *first] for parts in of_code)
