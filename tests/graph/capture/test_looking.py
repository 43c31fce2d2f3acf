"""A step that has run can be looked at: its report, one parameter explained, a profile of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cotrain_compile
from cotrain_compile.errors import CotrainError, PlanError
from cotrain_compile.plan import Lane
from cotrain_compile.plan.timeline import STEP_BEGINS
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.specification import specify

Step = Callable[[torch.Tensor], torch.Tensor]
BATCH = torch.ones(4, 16)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    options: dict[str, Any] = {
        "policy": "coarse",
        "machine": "rtx4090",
        "dump": str(tmp_path / "out"),
    }
    compiled: Step = torch.compile(train, backend="cotrain", options=options)
    return compiled


def test_the_report_has_what_the_last_step_measured(step: Step, tmp_path: Path) -> None:
    with pytest.raises(CotrainError, match="not been compiled yet"):
        cotrain_compile.report(step, tmp_path / "report.html")
    step(BATCH)
    cotrain_compile.report(step, tmp_path / "report.html")
    placed = cotrain_compile.inspect(step)
    assert placed.measured is not None
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    predicted = f"{placed.plan.foreseen} {format_seconds(placed.predicted.makespan_s)}"
    assert f'<p class="answer">{format_seconds(placed.measured.makespan_s)} a step</p>' in page
    assert f"<li>measured; {predicted}</li>" in page


def test_a_dump_has_report_and_trace_of_the_plan(step: Step, tmp_path: Path) -> None:
    step(BATCH)
    predicted = cotrain_compile.inspect(step).predicted
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f'<p class="answer">{format_seconds(predicted.makespan_s)} a step</p>' in page
    assert f"A step is predicted to take {format_seconds(predicted.makespan_s)}" in page
    assert "<li>measured" not in page
    events = json.loads((tmp_path / "out" / "predicted.trace.json").read_text())["traceEvents"]
    slices = sorted(e["args"]["node"] for e in events if e["ph"] == "X")
    assert slices == sorted(s.name for s in predicted.spans if s.end_s - s.start_s >= 1e-9)
    assert (tmp_path / "out" / "placed.dot").read_text().startswith("digraph step {")


def test_a_compiled_step_explains_its_parameters(step: Step) -> None:
    step(BATCH)
    placed = cotrain_compile.inspect(step)
    param = next(iter(placed.plan.placement.updates))
    said = placed.explain(param)
    assert said.nbytes == placed.problem.dataflow.buffer[param].nbytes
    assert said.current.step_s == pytest.approx(placed.predicted.makespan_s)
    assert format_bytes(said.nbytes) in str(said)
    with pytest.raises(PlanError, match="no parameter"):
        placed.explain("nowhere")


def test_a_profile_of_a_step_is_merged_where_that_step_began(step: Step, tmp_path: Path) -> None:
    """The marker comes before any op of its step, so no span of ours starts before it."""
    step(BATCH)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step(BATCH)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    measured = cotrain_compile.inspect(step).measured
    assert measured is not None
    save_trace(specify([measured]), tmp_path / "both.json", profiled=tmp_path / "torch.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    (mark,) = (e for e in events if e["name"] == STEP_BEGINS and e["ph"] == "X")
    process = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    ours = [e for e in events if e["pid"] == process["measured step"] and e["ph"] == "X"]
    assert len(ours) == len(measured.spans)
    assert min(e["ts"] for e in ours) >= mark["ts"]
    assert [e for e in events if e["name"] == "aten::addmm"]
    assert measured.busy_s(Lane.HOST) > 0
