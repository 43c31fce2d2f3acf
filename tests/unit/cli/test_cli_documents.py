"""What other programs read of the command line: --json, "-" for a file, and how little it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import PANELS, app
from cotrain_compile.cli.terminal import FLAGS, as_flags
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.plan import Plan
from tests.unit.viz.test_report import PLAN, STEP

# Torch, what draws, solves and ranks, which no light command has to wait for.
HEAVY = ("torch", "bokeh", "matplotlib", "networkx", "pulp", "sympy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.save(STEP, tmp_path / "step.json")
    files.save(PLAN, tmp_path / "plan.json")
    return tmp_path


def said(*arguments: str, given: str = "") -> str:
    run = CliRunner().invoke(app, arguments, input=given)
    assert run.exception is None, run.exception
    return run.stdout


def test_every_command_has_json() -> None:
    for name in PANELS:
        assert "--json" in said(name, "--help"), name


def test_json_has_the_figures_of_a_step_and_of_a_plan(folder: Path) -> None:
    step, plan = str(folder / "step.json"), str(folder / "plan.json")
    figures = json.loads(said("show", plan, "--json"))
    assert figures["step_s"] == PLAN.predicted.makespan_s
    assert figures["peak_bytes"]["device"] == PLAN.predicted.peak_bytes[Tier.DEVICE]
    figures = json.loads(said("analyze", step, "--json"))
    assert sum(figures["ops"].values()) == len(STEP.ops)
    assert figures["peak_bytes"] == sum(figures["alive_at_the_peak"].values())
    drawn = json.loads(said("graph", step, "--json", "--level", "op"))
    assert len(drawn["boxes"]) == len(STEP.ops)
    assert json.loads(said("diff", plan, plan, "--json"))["kept_otherwise"] == {}


def test_json_of_solve_has_each_plan_and_what_is_missing(folder: Path) -> None:
    run = CliRunner().invoke(
        app,
        [
            *("solve", str(folder / "step.json"), "-o", str(folder / "new.json"), "--json"),
            *("--machine", "rtx4090", "--memory-budget", "1MiB", "--memory-budget", "1KiB"),
            *("--tokens", "100"),
        ],
    )
    found = json.loads(run.stdout)
    assert files.load(found["1MiB"]["file"], Plan).predicted.makespan_s == found["1MiB"]["step_s"]
    assert found["1MiB"]["tokens_per_s"] == pytest.approx(100 / found["1MiB"]["step_s"])
    assert found["1KiB"]["shortfall_bytes"] > 0
    assert run.exit_code == 1


def test_a_file_called_dash_is_standard_input_and_output(folder: Path) -> None:
    step = (folder / "step.json").read_text(encoding="utf-8")
    solved = said("solve", "-", "-o", "-", "--machine", "rtx4090", given=step)
    assert files.from_json(solved, Plan).fingerprint == STEP.fingerprint
    assert said("show", "-", given=solved).startswith("plan ")


def test_quiet_says_nothing_and_verbose_what_is_done(folder: Path) -> None:
    solve = ["solve", str(folder / "step.json"), "-o", str(folder / "new.json")]
    quiet, verbose = (CliRunner().invoke(app, [flag, *solve]) for flag in ("-q", "-v"))
    assert quiet.output == ""
    assert "cotrain: reading " in verbose.stderr
    assert "saved " in verbose.stdout


@pytest.mark.parametrize("command", ["--help", "machines", "show PLAN", "graph STEP --level model"])
def test_a_light_command_loads_nothing_heavy(command: str, folder: Path) -> None:
    words = command.replace("PLAN", str(folder / "plan.json"))
    arguments = words.replace("STEP", str(folder / "step.json")).split()
    code = (
        "import sys; from cotrain_compile.cli.main import app; "
        f"app({arguments!r}, standalone_mode=False); "
        f"sys.exit(', '.join(set({HEAVY!r}) & sys.modules.keys()) or 0)"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("option 'memory_budget' is '20 gigs'", "--memory-budget is '20 gigs'"),
        ("use policy='auto', which", "use --policy auto, which"),
        ("but memory_budget is 1 GiB", "but --memory-budget is 1 GiB"),
        ("set overlap_steps=True", "set --overlap-steps"),
        ("keep fewer (remat=True) on this device", "keep fewer (remat=True) on this device"),
        ("the machine's seed, policy and gap", "the machine's seed, policy and gap"),
    ],
)
def test_errors_name_options_as_they_were_typed(message: str, typed: str) -> None:
    assert as_flags(message) == typed


def test_what_is_called_a_flag_is_one() -> None:
    offered = said("solve", "--help") + said("trace", "--help")
    assert all(f"--{name.replace('_', '-')}" in offered for name in FLAGS)
    assert set(FLAGS) <= Options.__dataclass_fields__.keys()
