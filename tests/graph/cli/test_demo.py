"""The demo on a very small model: all of it, in seconds."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotrain_compile import files
from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.cli.reading import read_problem
from cotrain_compile.demo import run as demo
from cotrain_compile.demo.job import Shape, batch, standard_library
from cotrain_compile.demo.run import DemoOutcome, Settings, run
from cotrain_compile.errors import OptionError
from cotrain_compile.placement.policies import RULES
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.calibrate.link_bench import Sizes
from cotrain_compile.support.units import format_seconds
from tests.support.calibrations import without_constants

SMALL = Shape(context=16, width=32, layers=1, heads=2)


def settings(output: Path, **changes: Any) -> Settings:
    """Of a demo that is over in seconds, for the guessed rates of this computer."""
    small = Settings(
        steps=7,
        output=output,
        budget="180KiB",
        machine="this-machine",
        shape=SMALL,
        rows=2,
        measured_steps=2,
    )
    return replace(small, **changes)


def said_by(chosen: Settings) -> tuple[DemoOutcome, str]:
    """Run the demo and return what it prints where there is no terminal, and what it found."""
    text = io.StringIO()
    outcome = run(chosen, Console(file=text, width=200))
    return outcome, text.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoOutcome, str]:
    """A demo from start to end, on this computer as measured: its folder and what it printed."""
    output = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        without_constants(patch)
        patch.setattr(demo, "QUICK", Sizes(2**20, 64, 256, 2**16, 2**16, 1))
        return output, *said_by(settings(output, machine=""))


def test_it_trains_within_a_budget_that_no_rule_fits_and_matches_eager(
    whole: tuple[Path, DemoOutcome, str],
) -> None:
    output, outcome, said = whole
    for rule in RULES:
        assert re.search(rf"{rule} +│ +[\d.]+ KiB +│ +[\d.]+ KiB short", said)
    assert "train 7/7" in said
    assert re.search(r"how fast\?   .* a step; measured; predicted", said)
    losses, eager = outcome.figures["losses"], outcome.figures["eager_losses"]
    assert losses == pytest.approx(eager, rel=1e-4)
    assert re.search(r"measured peak ([\d,]+) bytes, predicted \1, budget 184,320", said)
    left = {path.name for path in output.iterdir()}
    assert {"report.html", "timeline.png", "machine.json", "profile.json", "step"} <= left


def test_its_prediction_is_from_the_times_of_its_first_steps(
    whole: tuple[Path, DemoOutcome, str],
) -> None:
    output, _, said = whole
    profile = files.load(output / "profile.json", CostTable)
    saved = output / "step" / "plan.json"
    plan = files.load(saved, Plan)
    # All that the plan was made with is in its folder; read otherwise it would take another time.
    problem = read_problem(plan, saved, None, None, None)
    assert files.load(output / "step" / "profile.json", CostTable) == profile
    measured = {op.name for op in problem.dataflow.ops} & set(profile.device_s)
    assert measured
    assert all(problem.costs.device_s[name] == profile.device_s[name] for name in measured)
    assert f"predicted   {format_seconds(plan.predicted.makespan_s)} a step" in said


@pytest.mark.long
def test_a_budget_that_suffices_is_told_so(tmp_path: Path) -> None:
    _, said = said_by(settings(tmp_path, budget="64MiB", steps=4))
    assert re.search(r"resident +│ +[\d.]+ KiB +│ fits, ", said)


def test_too_few_steps_to_judge_a_prediction_by_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--steps is 3, but must be at least 4"):
        settings(tmp_path, steps=3)


def test_a_batch_depends_on_its_step_and_seed_alone() -> None:
    text = standard_library()
    inputs, targets = batch(text, 7, rows=3, length=10, seed=1)
    again, _ = batch(text, 7, rows=3, length=10, seed=1)
    other, _ = batch(text, 8, rows=3, length=10, seed=1)
    assert inputs.equal(again)
    assert not inputs.equal(other)
    assert inputs[:, 1:].equal(targets[:, :-1])
