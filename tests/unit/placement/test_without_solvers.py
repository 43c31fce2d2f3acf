"""Without HiGHS and pulp: plans are those of rules, programs are refused in our words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cotrain_compile import files
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.autotm.arcs import Variant
from cotrain_compile.placement.autotm.autotm import autotm
from cotrain_compile.plan import Plan
from cotrain_compile.support.plan_words import plan_words
from tests.unit.placement.test_solver_faults import PROBLEM

ROOT = Path(__file__).parents[3]
# What an import then does is what it does where a library is not installed.
WITHOUT = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
from cotrain_compile.cli.main import main
main()
"""
SOLVERS = ("highspy", "pulp")


def solve_without(
    absent: tuple[str, ...], folder: Path, policy: str
) -> subprocess.CompletedProcess[str]:
    """`cotrain-compile solve` of `PROBLEM`, whose plan goes to `plan.json`."""
    files.save(PROBLEM.dataflow, folder / "step.json")
    files.save(PROBLEM.machine, folder / "machine.json")
    options = {
        "machine": folder / "machine.json",
        "memory-budget": PROBLEM.budgets[Tier.DEVICE],
        "host-memory-budget": PROBLEM.budgets[Tier.HOST],
        "policy": policy,
        "output": folder / "plan.json",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT.format(absent=absent),
            "solve",
            str(folder / "step.json"),
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_plan_is_that_of_a_rule_and_one_line_says_why(tmp_path: Path) -> None:
    run = solve_without(SOLVERS, tmp_path, "auto")
    assert run.returncode == 0, run.stderr
    plan = files.load(tmp_path / "plan.json", Plan)
    (note,) = plan.notes
    assert note.startswith("the solver highs failed (OptionError: no solver found")
    assert note.endswith(f"pip install highspy)); the plan is: {plan_words(plan.placement.policy)}")
    assert plan.report is not None
    assert plan.report.solver == "rules"
    assert 0 < plan.report.lower_bound_s < plan.predicted.makespan_s  # what no program is asked for


def test_highs_needs_no_pulp(tmp_path: Path) -> None:
    run = solve_without(("pulp",), tmp_path, "ilp")
    assert run.returncode == 0, run.stderr
    report = files.load(tmp_path / "plan.json", Plan).report
    assert report is not None
    assert (report.solver, report.status) == ("highs", "optimal")


@pytest.mark.parametrize("policy", ["ilp", "lp-round", "autotm-synchronous"])
def test_a_program_asked_for_is_refused_with_what_to_install(tmp_path: Path, policy: str) -> None:
    run = solve_without(SOLVERS, tmp_path, policy)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    told = " ".join(run.stderr.split())
    assert told.startswith("error: ")
    assert "pip install highspy" in told


@pytest.mark.parametrize("variant", ["static", "asynchronous"])
def test_autotm_without_highs_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, variant: Variant
) -> None:
    monkeypatch.setattr("cotrain_compile.placement.autotm.autotm.has_highs", lambda: False)
    with pytest.raises(OptionError, match=f"'autotm-{variant}' needs HiGHS: pip install highspy"):
        autotm(PROBLEM, variant)
