"""A step of four times the layers takes four times the work to rewrite and to cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from cotrain_compile.backends.inductor.lower import segments_of
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.presets import find
from tests.support.call_counts import calls_in, growing_faster

SMALL, LARGE = 8, 32
# What is quadratic grows by 16.
MOST_TIMES = 1.6 * LARGE / SMALL


def clipped_step(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.randn(4, 8),)


@cache
def traced(layers: int) -> tuple[StepGraph, Dataflow]:
    step = trace_graph(partial(clipped_step, layers))
    return step, extract(step)


def rewritten_and_cut(layers: int, policy: str) -> Callable[[], object]:
    step, dataflow = traced(layers)
    problem = formulate(dataflow, find("h200"), dict.fromkeys(MEMORIES, 1 << 40))
    plan = schedule(problem, rule(policy)(dataflow))
    return lambda: segments_of(step, run_passes(step, plan), dataflow)


@pytest.mark.parametrize(
    "policy",
    [*(pytest.param(p, marks=pytest.mark.long) for p in ("resident", "zero-offload")), "streamed"],
)
def test_rewriting_and_cutting_are_about_linear_in_the_layers(policy: str) -> None:
    few, many = (calls_in(rewritten_and_cut(layers, policy)) for layers in (SMALL, LARGE))
    nodes = len(traced(LARGE)[0].nodes)
    assert growing_faster(few, many, MOST_TIMES, least=nodes) == {}
