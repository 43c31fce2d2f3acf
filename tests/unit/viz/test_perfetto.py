"""A trace: arrows join what waits for one another, and a profiler's trace has one clock with it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.errors import FormatError
from cotrain_compile.plan.timeline import STEP_BEGINS
from cotrain_compile.viz.perfetto import save_trace
from cotrain_compile.viz.specification import specify
from tests.unit.viz.test_report import MEASURED, PLAN, STEP

PROFILED = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "X", "name": STEP_BEGINS, "pid": 77, "tid": 77, "ts": 1000.0, "dur": 2.0},
        {"ph": "X", "name": STEP_BEGINS, "pid": 77, "tid": 77, "ts": 5000.0, "dur": 3.0},
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 5010.0, "dur": 8.0},
        {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "x"}},
    ],
}


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_an_arrow_goes_from_each_task_to_what_waits_for_it(tmp_path: Path) -> None:
    """It begins inside the bar it comes from, and ends where the one it leads to starts."""
    path = tmp_path / "trace.json"
    save_trace(specify([PLAN.predicted], PLAN, STEP), path)
    events = events_of(path)
    bars = {e["args"]["node"]: e for e in events if e["ph"] == "X"}
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    pairs = [(before, task.name) for task in PLAN.tasks for before in task.after]
    assert pairs
    assert begins.keys() == ends.keys()
    for (before, after), key in zip(pairs, begins, strict=True):
        source, target = bars[before], bars[after]
        assert begins[key]["tid"] == source["tid"]
        assert source["ts"] <= begins[key]["ts"] <= source["ts"] + source["dur"]
        assert (ends[key]["tid"], ends[key]["ts"]) == (target["tid"], target["ts"])


def test_predicted_and_measured_are_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(specify([PLAN.predicted, MEASURED], PLAN), path)
    events = events_of(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["predicted step", "measured step"]
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(set(arrows)) == len(arrows)


@pytest.mark.parametrize("name", ["torch.json", "torch.json.gz"])
def test_a_profile_of_the_step_is_on_the_same_clock(tmp_path: Path, name: str) -> None:
    """Zero is where the marker of the last step ends; the profiler's own events stay."""
    profiled = tmp_path / name
    content = json.dumps(PROFILED).encode()
    profiled.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    path = tmp_path / "both.json"
    save_trace(specify([MEASURED]), path, profiled=profiled)
    events = events_of(path)
    assert events[: len(PROFILED["traceEvents"])] == PROFILED["traceEvents"]  # type: ignore[arg-type]
    ours = [e for e in events if e["pid"] == 78 and e["ph"] == "X"]
    first = min(span.start_s for span in MEASURED.spans)
    assert min(e["ts"] for e in ours) == pytest.approx(5003.0 + first * 1e6)


@pytest.mark.parametrize("content", ["[1", '{"a": 1}', '{"traceEvents": []}'])
def test_what_is_no_profile_of_a_step_is_refused(tmp_path: Path, content: str) -> None:
    profiled = tmp_path / "torch.json"
    profiled.write_text(content)
    with pytest.raises(FormatError, match=r"torch\.json: n"):
        save_trace(specify([MEASURED]), tmp_path / "both.json", profiled=profiled)


def test_show_writes_a_trace_of_a_plan_and_of_a_timeline(tmp_path: Path) -> None:
    plan, timeline, out = (str(tmp_path / n) for n in ("plan.json", "timeline.json", "trace.json"))
    files.save(STEP, tmp_path / "step.json")
    files.save(PLAN, plan)
    files.save(replace(MEASURED), timeline)
    run = CliRunner().invoke(app, ["show", plan, "--perfetto", out, "--measured", timeline])
    assert run.exception is None, run.exception
    kinds = {e["cat"] for e in events_of(Path(out)) if e["ph"] == "X"}
    assert {"forward", "backward", "update on the host"} <= kinds
    run = CliRunner().invoke(app, ["show", timeline, "--perfetto", out])
    assert run.exception is None, run.exception
    assert len([e for e in events_of(Path(out)) if e["ph"] == "X"]) == len(MEASURED.spans)
