"""Two plans side by side: what moved, and what that does to time and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.errors import OptionError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.viz.text.diff import describe_diff
from tests.support.dataflows import chain

STEP = chain(3, width=256)
PROBLEM = formulate(STEP, find("rtx4090"), {Tier.DEVICE: 1 << 30, Tier.HOST: 1 << 30})
RESIDENT = solve(PROBLEM, SolveSettings("resident"))
COARSE = solve(PROBLEM, SolveSettings("coarse"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    files.save(STEP, tmp_path / "step.json")
    files.save(RESIDENT, tmp_path / "resident.json")
    files.save(COARSE, tmp_path / "coarse.json")
    return tmp_path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_plan_does_not_differ_from_itself() -> None:
    assert describe_diff(COARSE, COARSE, STEP) == "the plans say the same"


def test_each_change_is_said_with_its_bytes() -> None:
    lines = describe_diff(RESIDENT, COARSE, STEP).splitlines()
    assert "policy         resident -> coarse" in lines
    assert "device -> host: 3 tensors (768.0 KiB): m0, m1, m2" in lines
    kept = "resident at home on device -> host at home on device: 3 tensors (768.0 KiB): w0, w1, w2"
    assert kept in lines
    down = COARSE.bytes_moved("offload")
    assert f"{'down':14} 0 B -> {down / 1024**2:.1f} MiB  (+{down / 1024**2:.1f} MiB)" in lines


def test_time_and_peaks_are_those_of_the_predictions() -> None:
    slower = replace(
        RESIDENT,
        predicted=replace(
            RESIDENT.predicted,
            spans=tuple(
                replace(span, start_s=2 * span.start_s, end_s=2 * span.end_s)
                for span in RESIDENT.predicted.spans
            ),
        ),
    )
    (line,) = describe_diff(RESIDENT, slower).splitlines()
    assert line.startswith("a step")
    assert line.endswith("(+100.0%)")


def test_many_names_are_counted() -> None:
    offloaded = replace(COARSE.placement, offloaded=tuple(f"h{i}" for i in range(7)))
    (line,) = describe_diff(COARSE, replace(COARSE, placement=offloaded)).splitlines()
    assert line == "leave the device now: 7 tensors: h0, h1, h2, h3, and 3 more"


def test_the_command_takes_sizes_from_the_step_beside_the_plan(saved: Path) -> None:
    said = run("diff", saved / "resident.json", saved / "coarse.json")
    assert said == describe_diff(RESIDENT, COARSE, STEP) + "\n"
    (saved / "step.json").unlink()
    assert "KiB)" not in run("diff", saved / "coarse.json", saved / "coarse.json")


def test_explain_finds_step_and_machine_of_the_plan(saved: Path) -> None:
    said = run("explain", saved / "coarse.json", "w1")
    assert "parameter   w1" in said
    assert "as planned" in said


def test_explain_needs_the_step_of_the_plan(saved: Path) -> None:
    files.save(chain(2), saved / "other.json")
    with pytest.raises(PlanError, match="made for another step"):
        run("explain", saved / "coarse.json", "w1", "--step", saved / "other.json")
    (saved / "step.json").unlink()
    with pytest.raises(OptionError, match="a plan alone has no costs"):
        run("explain", saved / "coarse.json", "w1")


def test_explain_refuses_costs_that_are_not_those_of_the_plan(saved: Path) -> None:
    with pytest.raises(PlanError, match="made with other costs"):
        run("explain", saved / "coarse.json", "w1", "--machine", "gh200")


def test_no_number_of_a_diff_is_made_up() -> None:
    """Swapping the plans swaps both sides of every line."""
    there = describe_diff(RESIDENT, COARSE).splitlines()
    back = describe_diff(COARSE, RESIDENT).splitlines()
    assert len(there) == len(back)
    assert isinstance(COARSE, Plan)
    for line in there:
        if " -> " in line and "tensors" not in line:
            was, now = line[15:].split("  (")[0].split(" -> ")
            assert any(f"{now} -> {was}" in other for other in back)
