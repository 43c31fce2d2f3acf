"""Regions in parts: graph and data say the same, and what trains is what trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cotrain_compile.backends.inductor import lower as lowering
from cotrain_compile.backends.inductor.lower import lower
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.dataflow.regions import Region
from cotrain_compile.extract.extract import extract
from cotrain_compile.extract.regions import find
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
from cotrain_compile.presets import find as preset
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.graph.backends.test_segments_of_steps import Interpreted
from tests.support.captured_steps import TRAININGS, captured_training
from tests.support.language_models import IN_CHUNKS, LANGUAGE_MODELS
from tests.support.steps import compiling_with, cotrain

STEPS = 20
# Each of the others has one thing that `everything` has too.
SHORT = ("everything", "shifted")
NAMES = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in LANGUAGE_MODELS],
)


@functools.cache
def captured(name: str) -> tuple[StepGraph, list[Any]]:
    """The graph of a step, and what it was called with first."""
    seen: list[Any] = []

    def note(step: StepGraph, dataflow: Dataflow, options: Options) -> Callable[[list[Any]], Any]:
        def run(inputs: list[Any]) -> Any:
            seen.append((step, [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]))
            with torch.no_grad():
                return step.module(*inputs)

        return run

    case = {**LANGUAGE_MODELS, "in chunks": IN_CHUNKS}[name]
    model = case.model()
    torch._dynamo.reset()
    with compiling_with(note):
        cotrain()(case.step(model, torch.optim.SGD(model.parameters(), 0.1)))(*case.batch())
    return seen[0]  # type: ignore[no-any-return]


@functools.cache
def dataflow_of(name: str) -> Dataflow:
    return extract(captured(name)[0])


def losses_of(dataflow: Dataflow) -> list[Region]:
    return [region for region in dataflow.regions if region.kind == "loss"]


def problem_of(dataflow: Dataflow) -> Problem:
    return formulate(dataflow, preset("this-machine"), dict.fromkeys(MEMORIES, 1 << 40))


def plan_of(dataflow: Dataflow, parts: int) -> Plan:
    """All on the device, with every loss and MLP in so many parts."""
    splits = {region.name: parts for region in dataflow.regions}
    return schedule(problem_of(dataflow), replace(resident(dataflow), splits=splits))


def in_parts(name: str, parts: int, *, compiled: bool = False) -> CompiledStep:
    step, dataflow = captured(name)[0], dataflow_of(name)
    problem, plan = problem_of(dataflow), plan_of(dataflow, parts)
    check(problem, plan)
    placed = run_passes(step, plan)
    device = EmulatedDevice(problem.machine, plan.budgets, host_kernels(placed, "captured"))
    under = problem.under(plan.placement).dataflow
    lowered = lower(step, placed, under, {}, ()) if compiled else None
    return CompiledStep(problem, plan, placed, device, lowered)


def train(name: str, run: Callable[[list[Any]], Any], steps: int = STEPS) -> list[torch.Tensor]:
    """The losses of some steps and the parameters behind them."""
    step, first = captured(name)
    inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in first]
    batch_at = [at for at, item in enumerate(step.inputs) if item.role is Role.BATCH]
    losses = []
    for seed in range(steps):
        batch = LANGUAGE_MODELS[name].batch(seed)
        for at, value in zip(batch_at, batch, strict=True):
            inputs[at] = value
        with torch.no_grad():
            losses.append(run(list(inputs))[0])
    params = [inputs[at] for at, item in enumerate(step.inputs) if item.role is Role.PARAM]
    return [torch.stack(losses), *params]


def whole_step(name: str) -> Callable[[list[Any]], Any]:
    """The captured graph as it is."""
    module = captured(name)[0].module
    return lambda inputs: module(*inputs)


def assert_close(name: str, found: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    is_bf16 = LANGUAGE_MODELS[name].is_bf16
    rtol, atol = (2e-2, 2e-3) if is_bf16 else (1e-4, 1e-6)
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def in_float64(name: str, steps: int = STEPS) -> list[torch.Tensor]:
    """The same of eager torch, in float64 throughout."""
    case = replace(LANGUAGE_MODELS[name], is_bf16=False)
    model = case.model(torch.float64)
    step = case.step(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = [step(*case.batch(seed)) for seed in range(steps)]
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of all parameters, as the norm of the difference over that of the exact ones."""
    pairs = list(zip(found[1:], exact[1:], strict=True))
    off = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return float((off / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def without_views(dataflow: Dataflow) -> list[Op]:
    """Its ops; what a part is given is a view, and one more."""
    return [op for op in dataflow.ops if op.writes]


@NAMES
def test_the_loss_of_a_language_model_is_a_region(name: str) -> None:
    case, losses = LANGUAGE_MODELS[name], losses_of(dataflow_of(name))
    assert len(losses) == case.micro_batches
    tokens = (
        case.sequences
        * (1 if case.is_shifted or case.is_transposed else case.tokens)
        // case.micro_batches
    )
    assert {region.length for region in losses} == {tokens}


def test_a_loss_that_the_user_has_in_chunks_is_left_alone() -> None:
    assert not losses_of(dataflow_of("in chunks"))
    with mock.patch.object(find, "_is_alone", return_value=True):
        assert len(losses_of(extract(captured("in chunks")[0]))) == IN_CHUNKS.chunks


@NAMES
def test_an_mlp_is_a_region_with_a_place_in_the_forward_and_one_in_the_backward(name: str) -> None:
    case, dataflow = LANGUAGE_MODELS[name], dataflow_of(name)
    found = [region for region in dataflow.regions if region.kind == "mlp"]
    assert len(found) == case.micro_batches
    for region in found:
        assert region.length == case.sequences * case.tokens // case.micro_batches
        phases = [
            {dataflow.ops[dataflow.position[op.name]].phase for op in window.ops}
            for window in region.windows
        ]
        assert phases == [{Phase.FORWARD}, {Phase.BACKWARD}]


@NAMES
@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.long), 3, 5])
def test_the_graph_becomes_what_the_dataflow_becomes(name: str, parts: int) -> None:
    step, dataflow = captured(name)[0], dataflow_of(name)
    plan = plan_of(dataflow, parts)
    found = extract(split_ops(step.copy(), plan).verify())
    expected = split_regions(dataflow, plan.placement.splits)
    assert without_views(found) == without_views(expected)
    assert {b.name: b for b in found.buffers} == expected.buffer
    assert found.updates == expected.updates


@pytest.mark.parametrize(
    "name",
    [
        "tied",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("accumulating", "llama", "gpt2", "t5")),
    ],
)
def test_graph_and_dataflow_agree_on_other_trainings(name: str) -> None:
    """Gated MLPs, micro-batches, dropout beside a region, an optimizer with many ops."""
    training = captured_training(TRAININGS[name])
    dataflow, problem = training.dataflow, training.problem()
    assert dataflow.regions
    splits = {region.name: 3 for region in dataflow.regions}
    plan = schedule(problem, replace(resident(dataflow), splits=splits))
    check(problem, plan)
    found, expected = (
        extract(split_ops(training.step.copy(), plan).verify()),
        split_regions(dataflow, splits),
    )
    assert without_views(found) == without_views(expected)
    assert {b.name: b for b in found.buffers} == expected.buffer


@NAMES
def test_in_one_part_the_step_is_the_same_bit_for_bit(name: str) -> None:
    whole = train(name, whole_step(name), 3)
    assert all(map(torch.equal, train(name, in_parts(name, 1), 3), whole))


@NAMES
def test_in_parts_it_trains_as_the_whole_and_is_as_exact(name: str) -> None:
    """Parts of equal size, and such that the last is smaller."""
    whole, exact = train(name, whole_step(name)), in_float64(name)
    rows = losses_of(dataflow_of(name))[0].length
    for parts in (4, min(5, rows)) if name != "shifted" else (2, 3):
        found = train(name, in_parts(name, parts))
        assert_close(name, found, whole)
        assert distance(found, exact) <= 1.25 * distance(whole, exact)


@NAMES
def test_the_peak_is_as_planned_to_the_byte(name: str) -> None:
    step = in_parts(name, 4)
    train(name, step, 2)
    measured = step.measured
    assert measured is not None
    assert measured.peak_bytes[Tier.DEVICE] == step.plan.predicted.peak_bytes[Tier.DEVICE]


@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [
        ("plain", False),
        *(
            pytest.param(name, True, marks=pytest.mark.long)
            for name in ("plain", "everything", "transposed")
        ),
    ],
)
def test_compiled_parts_are_one_code_and_train_as_the_whole(name: str, is_compiled: bool) -> None:
    as_it_is = mock.patch.object(lowering, "compile_graph", Interpreted)
    with nullcontext() if is_compiled else as_it_is:
        step = in_parts(name, 4, compiled=True)
    whole, found = train(name, whole_step(name), 3), train(name, step, 3)
    assert_close(name, found, whole)
    assert step.lowered is not None
    code = step.lowered.code
    of_parts: dict[int, set[int]] = {}
    for segment_name, segment in step.lowered.segmented.segments.items():
        for part in range(4):
            if f"mm_part{part}" in segment.ops:
                of_parts.setdefault(id(code[segment_name]), set()).add(part)
    assert list(of_parts.values()) == [{0, 1, 2, 3}]
