"""Golden cases of what rewrites or reads a graph: preparations of a capture, extraction, passes.

A step of a few ops as text in, and what one function makes of it out: `tests/golden/cases`.
`pytest -k golden_cases --update-golden` writes the outputs again; then read the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import fx

from cotrain_compile.capture.aten.like_ops import take_shapes_alone
from cotrain_compile.capture.aten.prepare import (
    drop_redundant_copies,
    give_updates_their_own_casts,
    reduce_gradients_early,
    take_norms_early,
    write_updates_early,
)
from cotrain_compile.capture.remat import rematerialise
from cotrain_compile.errors import CotrainError
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes import PASSES
from tests.support import dataflow_text, plan_text, step_text
from tests.support.golden_cases import Case, cases, changed, read

Preparation = Callable[[fx.Graph], object]


def recompute_checkpoints(graph: fx.Graph) -> None:
    rematerialise(graph, None)


def dissolve_checkpoints(graph: fx.Graph) -> None:
    rematerialise(graph, None, dissolve=True)


PREPARATIONS: dict[str, Preparation] = {
    preparation.__name__: preparation
    for preparation in (
        take_shapes_alone,
        drop_redundant_copies,
        write_updates_early,
        reduce_gradients_early,
        take_norms_early,
        give_updates_their_own_casts,
        recompute_checkpoints,
        dissolve_checkpoints,
    )
}
PASS_NAMES = [rewrite.__name__ for rewrite in PASSES]


def prepared(case: Case) -> str:
    step = step_text.parse(case.sections["step"])
    before = step_text.lines(step)
    PREPARATIONS[case.stop](step.module.graph)
    return changed(before, step_text.lines(step.verify()))


def extracted(case: Case) -> str:
    try:
        dataflow = extract(step_text.parse(case.sections["step"]))
    except CotrainError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    _, *lines = dataflow_text.text(dataflow).splitlines()  # without the fingerprint
    return "\n".join(lines)


def passed(case: Case) -> str:
    """What one pass changes, behind those that come before it."""
    step, plan = step_text.parse(case.sections["step"]), plan_text.parse(case.sections["plan"])
    number = PASS_NAMES.index(case.stop)
    for rewrite in PASSES[:number]:
        step = rewrite(step, plan).verify()
    before: StepGraph = step.copy()
    try:
        after = PASSES[number](step, plan).verify()
    except CotrainError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return changed(step_text.lines(before), step_text.lines(after))


RUNS: dict[str, Callable[[Case], str]] = {
    **dict.fromkeys(PREPARATIONS, prepared),
    "extract": extracted,
    **dict.fromkeys(PASS_NAMES, passed),
}


@pytest.mark.parametrize("path", cases(*RUNS), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_step_becomes(path: Path, golden: Callable[[str, str], None]) -> None:
    case = read(path)
    golden(f"cases/{case.stop}/{path.name}", case.with_output(RUNS[case.stop](case)))


@pytest.mark.parametrize("stop", RUNS)
def test_every_stop_has_several_cases(stop: str) -> None:
    assert len(cases(stop)) >= (3 if stop in (*PASS_NAMES, "extract") else 1)
