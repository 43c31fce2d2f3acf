"""Plans of compiling and of `solve` are the same; settled ones have few kinds of segments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.backends.inductor.lower import segments_of
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.cli.main import app
from cotrain_compile.cli.reading import read_problem
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.entry import compile_step as pipeline
from cotrain_compile.entry.compile_step import compile_step
from cotrain_compile.entry.planner import Planner
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Lane, Plan
from cotrain_compile.presets import find
from tests.support.captured_steps import captured

CARD = "rtx4090"


def comparable(plan: Plan) -> Any:
    """All of a plan that says what is done, and when it is predicted to be."""
    return plan.placement, plan.tasks, plan.moved, plan.budgets, plan.predicted


def compiled(options: Mapping[str, Any]) -> CompiledStep:
    """The clipped step by these options."""
    step, parsed = captured("clipped"), Options.parse(options)
    return compile_step(step.step, step.dataflow, Planner(parsed), parsed)


def solved_offline(tmp_path: Path, *arguments: str) -> Plan:
    result = CliRunner().invoke(
        app,
        ["solve", str(tmp_path / "step.json"), "-o", str(tmp_path / "plan.json"), *arguments],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return load_plan(tmp_path / "plan.json")


def test_a_plan_solved_offline_for_a_card_is_the_one_that_compiling_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code, as on a card; `--lowering eager` is for a step that runs op by op."""
    step = captured("clipped")
    options = {"machine": CARD, "policy": "zero-offload", "quiet": True}
    monkeypatch.setattr(pipeline, "lower", lambda *_: None)  # nothing is run
    plans = {
        lowering: compiled({**options, "lowering": lowering}).plan
        for lowering in ("inductor", "eager")
    }
    files.save(step.dataflow, tmp_path / "step.json")
    asked = ("--machine", CARD, "--policy", "zero-offload")
    offline = solved_offline(tmp_path, *asked)
    assert comparable(offline) == comparable(plans["inductor"])
    assert comparable(offline) != comparable(plans["eager"])
    op_by_op = solved_offline(tmp_path, *asked, "--lowering", "eager")
    assert comparable(op_by_op) == comparable(plans["eager"])


@pytest.fixture(scope="module")
def six_layers() -> StepGraph:
    """A GPT of six layers, with momentum."""

    def build() -> tuple[Any, tuple[Tensor, ...]]:
        model = CharacterGPT(Shape(characters=16, context=8, width=256, layers=6, heads=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(tokens: Tensor, following: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            return loss

        batch = torch.zeros(2, 8, dtype=torch.int64)
        return step, (batch, batch)

    torch._dynamo.reset()
    return trace_graph(build)


@pytest.mark.parametrize(
    "policy", ["resident", pytest.param("fraction:1", marks=pytest.mark.long), "streamed"]
)
def test_layers_of_a_settled_plan_are_of_few_kinds(six_layers: StepGraph, policy: str) -> None:
    """Forward and backward of a layer, the first, the last, what is around them, updates.

    Weights are so large that their states move: the updates of a layer wait for all of them at
    once.
    """
    dataflow, machine = extract(six_layers), find("h100")
    problem = formulate(dataflow, machine, Options().budgets(machine))
    plan = schedule(problem, rule(policy)(dataflow), compiled=True)
    cut = segments_of(six_layers, run_passes(six_layers, plan), dataflow)
    kinds = {segment.key for segment in cut.segments.values()}
    assert len(kinds) <= 10


def test_updates_that_run_as_captured_are_planned_as_such(tmp_path: Path) -> None:
    """The plan says so, and is read again with its own costs."""
    step = captured("clipped")
    options = {"machine": CARD, "policy": "zero-offload", "quiet": True}
    fused, own = (
        compiled({**options, "host_kernels": kernels}) for kernels in ("fused", "captured")
    )
    # In so small a step what Python takes to start the tasks hides the updates.
    assert own.plan.predicted.busy_s(Lane.HOST) > fused.plan.predicted.busy_s(Lane.HOST)
    assert [note for note in own.plan.notes if "op by op, as host_kernels asks" in note]
    files.save(step.dataflow, tmp_path / "step.json")
    files.save(own.plan, tmp_path / "plan.json")
    read = read_problem(own.plan, tmp_path / "plan.json", None, None, None)
    # Whether ops run in compiled code is not told by what so short ones take.
    assert read.costs.host_update_s == own.problem.costs.host_update_s
    assert read.captured
