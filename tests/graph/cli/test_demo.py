"""The demo on a very small model: all of it, in seconds."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotrain_compile import files
from cotrain_compile.demo import train
from cotrain_compile.demo.model import Shape
from cotrain_compile.demo.run import INTERRUPTED, Settings, run
from cotrain_compile.demo.text import batch, standard_library
from cotrain_compile.errors import OptionError
from cotrain_compile.plan import Plan
from cotrain_compile.units import format_seconds

SMALL = Shape(context=16, width=32, layers=1, heads=2)


def settings(output: Path, **changes: Any) -> Settings:
    small = Settings(steps=4, output=output, budget="300KiB", shape=SMALL, rows=2)
    return replace(small, **changes)


def said_by(chosen: Settings, expected_code: int = 0) -> str:
    """Run the demo and return what it prints where there is no terminal."""
    text = io.StringIO()
    assert run(chosen, Console(file=text, width=200)) == expected_code
    return text.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A demo from start to end: its folder and what it printed."""
    output = tmp_path_factory.mktemp("whole")
    return output, said_by(settings(output))


def losses(output: Path, column: str) -> list[float]:
    with (output / "losses.csv").open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file)]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> Any:
        if args[1] == step:
            raise KeyboardInterrupt
        return batch(*args)

    monkeypatch.setattr(train, "batch", stop)


def test_it_shows_the_shortfall_trains_within_the_budget_and_matches_eager(
    whole: tuple[Path, str],
) -> None:
    output, said = whole
    assert "refused, as it should be: policy 'resident' needs" in said
    assert "train 4/4" in said
    assert losses(output, "loss") == pytest.approx(losses(output, "eager_loss"), rel=1e-4)
    assert re.search(r"measured peak ([\d,]+) bytes, predicted \1, budget 307,200", said)
    left = {path.name for path in output.iterdir()}
    assert {"report.html", "timeline.png", "predicted.trace.json", "measured.trace.json"} <= left


def test_it_takes_the_fastest_plan_and_tells_what_each_rule_would_have_cost(
    whole: tuple[Path, str],
) -> None:
    output, said = whole
    plan = files.load(output / "step" / "plan.json", Plan)
    assert plan.report is not None
    costs_s = plan.report.simulated_s
    assert costs_s[plan.placement.policy] == min(costs_s.values())
    assert re.search(r"resident +│ +does not fit", said)
    shown = {"zero-offload", "coarse", "streamed", "fraction:auto"} & set(costs_s)
    assert shown
    for rule in shown:
        assert re.search(rf"{rule} +│ +{re.escape(format_seconds(costs_s[rule]))}", said)


@pytest.mark.long
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(2, patch)
        said = said_by(settings(tmp_path), expected_code=INTERRUPTED)
    assert "Interrupted after step 2 of 4. Every parameter has had exactly 2 updates." in said
    said_by(settings(tmp_path, resume=True))
    assert losses(tmp_path, "loss") == losses(whole[0], "loss")[2:]


@pytest.mark.long
def test_a_budget_that_suffices_is_told_so(tmp_path: Path) -> None:
    said = said_by(settings(tmp_path, budget="64MiB", steps=1))
    assert "fits: device peak" in said


def test_resuming_without_a_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nothing to resume.*without --resume"):
        said_by(settings(tmp_path, resume=True))


def test_a_batch_depends_on_its_step_and_seed_alone() -> None:
    text = standard_library()
    inputs, targets = batch(text, 7, rows=3, length=10, seed=1)
    again, _ = batch(text, 7, rows=3, length=10, seed=1)
    other, _ = batch(text, 8, rows=3, length=10, seed=1)
    assert inputs.equal(again)
    assert not inputs.equal(other)
    assert inputs[:, 1:].equal(targets[:, :-1])
