"""The gate is quiet while ratios and counts stay, and says what got worse by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gate
from bench.gate import EXPECTED, JOBS, QUESTIONS, advice, complaints, update
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.files import load


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXPECTED.read_text())
    return found


def only(name: str) -> dict[str, Any]:
    """The document with the expected values of one case."""
    whole = document()
    return {**whole, "expected": {name: whole["expected"][name]}}


@pytest.mark.parametrize("job", JOBS)
def test_no_capture_has_got_worse(job: str) -> None:
    name = f"{job}, captured"
    lines = complaints(only(name), {name: gate.captured(trace_graph(JOBS[job]))})
    assert not lines, "\n".join([*lines, advice(lines)])


@pytest.mark.parametrize(
    "question",
    [pytest.param(q, marks=() if "again" in q.name else pytest.mark.long) for q in QUESTIONS],
    ids=lambda question: question.name,
)
def test_no_plan_has_got_worse(question: gate.Question) -> None:
    dataflow = load(gate.PROBLEMS / f"{question.job}.json", Dataflow)
    found = {question.name: gate.solved(question, dataflow)}
    lines = complaints(only(question.name), found)
    assert not lines, "\n".join([*lines, advice(lines)])


def test_every_case_is_expected_and_every_figure_has_a_reason() -> None:
    whole = document()
    names = {f"{job}, captured" for job in JOBS} | {question.name for question in QUESTIONS}
    assert whole["expected"].keys() == names
    figures = {figure for values in whole["expected"].values() for figure in values}
    assert whole["tolerances"].keys() == figures
    assert all(tolerance["why"] for tolerance in whole["tolerances"].values())


KNOWN = {
    "tolerances": {"transfers": {"share": 0.1, "why": "ties"}},
    "expected": {"step": {"transfers": 100}},
}


@pytest.mark.parametrize("count", [90, 100, 110])
def test_within_the_tolerance_there_is_nothing_to_say(count: int) -> None:
    assert complaints(KNOWN, {"step": {"transfers": count}}) == []


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (111, "step: transfers is WORSE: 111, was 100 (+11.0%, allowed 10.0%: ties)"),
        (80, "step: transfers is better: 80, was 100 (-20.0%, allowed 10.0%: ties)"),
    ],
)
def test_beyond_it_the_difference_is_named_in_both_directions(count: int, said: str) -> None:
    lines = complaints(KNOWN, {"step": {"transfers": count}})
    assert lines == [said]
    assert advice(lines).startswith("1 worse" if "WORSE" in said else "0 worse")


def test_a_figure_that_appears_or_disappears_is_told() -> None:
    lines = complaints(KNOWN, {"step": {}, "other": {"transfers": 1}})
    assert lines == ["other: transfers is only found", "step: transfers is only expected"]


def test_an_update_keeps_the_tolerances(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(KNOWN))
    update(path, {"step": {"transfers": 7}})
    assert complaints(json.loads(path.read_text()), {"step": {"transfers": 7}}) == []
    assert json.loads(path.read_text())["tolerances"] == KNOWN["tolerances"]
