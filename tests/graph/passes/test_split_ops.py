"""Regions in parts: graph and data say the same, and what trains is what trained."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.passes.split_ops import split_ops
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.split.rewrite import split_regions
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from tests.support.language_models import LANGUAGE_MODELS

ALL_MODELS = pytest.mark.parametrize("name", LANGUAGE_MODELS)


@functools.cache
def traced(name: str) -> StepGraph:
    case = LANGUAGE_MODELS[name]

    def build():
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return case.step(model, optimizer), case.batch()

    return trace_graph(build)


def plan_of(dataflow: Dataflow, parts: int) -> Plan:
    problem = formulate(dataflow, find("this-machine"), dict.fromkeys(Tier, 1 << 40))
    splits = {region.name: parts for region in dataflow.regions}
    return schedule(problem, replace(resident(dataflow), splits=splits))


def without_views(dataflow: Dataflow) -> list[Op]:
    return [op for op in dataflow.ops if op.writes]


@ALL_MODELS
def test_the_loss_of_a_language_model_is_a_region(name: str) -> None:
    step = extract(traced(name))
    assert len(step.regions) == LANGUAGE_MODELS[name].micro_batches
    for region in step.regions:
        assert region.kind == "loss"


@ALL_MODELS
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_the_graph_becomes_what_the_dataflow_becomes(name: str, parts: int) -> None:
    step = traced(name)
    dataflow = extract(step)
    plan = plan_of(dataflow, parts)
    found = extract(split_ops(step.copy(), plan).verify())
    expected = split_regions(dataflow, plan.placement.splits)
    assert [op.name for op in without_views(found)] == [op.name for op in without_views(expected)]
    assert without_views(found) == without_views(expected)
    assert {b.name: b for b in found.buffers} == expected.buffer
    assert found.updates == expected.updates


def in_parts(step: Step, batch: Batch, parts: int, path: Path, **options: Any) -> Step:
    """`step` compiled by a plan that keeps all on the device, with its loss in so many parts."""
    plan = plan_of(extract(trace_graph(lambda: (step, batch))), parts)
    save(plan, path)
    torch._dynamo.reset()
    return compile(step, plan=path, machine="this-machine", **options)


@functools.cache
def trained(name: str, parts: int, dtype: torch.dtype, steps: int = 20) -> list[torch.Tensor]:
    """Losses and parameters after some steps: in so many parts on the emulated device; 0 eager."""
    case = LANGUAGE_MODELS[name]
    model = case.model(dtype)
    step = case.step(model, torch.optim.SGD(model.parameters(), 0.1))
    if parts:
        step = in_parts(step, case.batch(), parts)
    losses = [step(*case.batch(seed)) for seed in range(steps)]
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]
