"""Ctrl-C and SIGTERM while a solver is at work: the program ends, and nothing of it stays behind.

The solver's process is the real one, but for the solver: it sleeps as one that is deep in a
heuristic and asks nobody whether to stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cotrain_compile import files
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.milp import highs_process, highs_worker
from cotrain_compile.placement.search.solve import SolveSettings, solve
from tests.unit.placement.test_solver_faults import PROBLEM

ROOT = Path(__file__).parents[3]
# Python runs a `sitecustomize` in every process, so also in those that a sweep starts.
CUSTOMIZE = """
import pulp
from cotrain_compile.placement.milp import highs_worker
highs_worker.__file__ = {script!r}
pulp.PULP_CBC_CMD.pulp_cbc_path = {cbc!r}
"""
SLEEPING_CBC = """#!/bin/sh
touch {folder}/$$
exec sleep 600
"""
ASLEEP = """
import os, pathlib, time
from cotrain_compile.placement.milp import highs_worker
def solved(program):
    pathlib.Path({folder!r}, str(os.getpid())).touch()
    time.sleep(600)
highs_worker.solved = solved
highs_worker.main()
"""
# Policy `ilp` asks for a program while its bound is certified, `auto` when it is.
COMMANDS = {
    "solve": ["solve", "step.json", "-o", "plan.json", "--policy", "ilp"],
    "sweep": ["sweep", "step.json", "-o", "swept", "--jobs", "2", "--policy", "ilp"],
    "cbc": ["solve", "step.json", "-o", "plan.json", "--solver", "cbc"],
}
SEARCH = """
import sys
from cotrain_compile.cli.main import main
main()
"""
FIRST_CALL = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
def step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
options = {"memory_budget": 40_000, "time_limit": 600.0, "quiet": True}
torch.compile(step, backend="cotrain", options=options)(torch.randn(2, 32))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files to solve, and a HiGHS that never ends and notes its processes in `asleep`."""
    files.save(PROBLEM.dataflow, tmp_path / "step.json")
    files.save(PROBLEM.machine, tmp_path / "machine.json")
    (tmp_path / "asleep").mkdir()
    script, folder = str(tmp_path / "worker.py"), str(tmp_path / "asleep")
    (tmp_path / "worker.py").write_text(ASLEEP.format(folder=folder))
    (tmp_path / "cbc").write_text(SLEEPING_CBC.format(folder=folder))
    (tmp_path / "cbc").chmod(0o755)
    cbc = str(tmp_path / "cbc")
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE.format(script=script, cbc=cbc))
    return tmp_path


def asleep(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "asleep").iterdir()]


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def command(folder: Path, name: str) -> subprocess.Popen[str]:
    budgets = {tier: str(PROBLEM.budgets[tier]) for tier in MEMORIES}
    options = ["--machine", "machine.json", "--memory-budget", budgets[Tier.DEVICE]]
    options += ["--host-memory-budget", budgets[Tier.HOST], "--time-limit", "600"]
    return python(folder, SEARCH, *COMMANDS[name], *options)


def python(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, signal.SIGTERM) for name in COMMANDS),
        ("solve", signal.SIGINT),
        pytest.param("sweep", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("cbc", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_command_and_all_that_it_started(
    folder: Path, name: str, number: signal.Signals
) -> None:
    with command(folder, name) as running:
        solvers = 1 if name == "cbc" else 2  # a plan, and its bound
        wait_for("solvers are at work", lambda: len(asleep(folder)) >= solvers)
        running.send_signal(number)
        _, told = running.communicate(timeout=60)  # HiGHS sleeps ten times as long
    assert running.returncode != 0
    assert "Traceback" not in told
    wait_for("HiGHS has ended", lambda: not any(map(is_running, asleep(folder))))


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)],
    ids=lambda n: n.name,
)
def test_a_signal_ends_the_first_call_of_a_step_while_its_plan_is_sought(
    folder: Path, number: signal.Signals
) -> None:
    with python(folder, FIRST_CALL) as running:
        wait_for("HiGHS is at work", lambda: bool(asleep(folder)))
        running.send_signal(number)
        _, told = running.communicate(timeout=60)  # HiGHS sleeps ten times as long
    interrupted = number is signal.SIGINT
    assert running.returncode == -number
    assert told.rstrip().endswith("KeyboardInterrupt") == interrupted
    wait_for("HiGHS has ended", lambda: not any(map(is_running, asleep(folder))))


def test_cbc_ends_with_a_process_that_is_killed(folder: Path) -> None:
    with command(folder, "cbc") as running:
        wait_for("CBC is at work", lambda: bool(asleep(folder)))
        running.kill()
    wait_for("CBC has ended", lambda: not any(map(is_running, asleep(folder))))


def test_an_error_in_the_search_does_not_wait_for_the_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(search: object) -> None:
        wait_for("the bound is being solved", lambda: bool(asleep(folder)))
        raise KeyboardInterrupt

    monkeypatch.setattr(highs_worker, "__file__", str(folder / "worker.py"))
    monkeypatch.setattr(highs_process, "_processes", highs_process._Processes())
    monkeypatch.setattr("cotrain_compile.placement.search.solve._Search._best", fail)
    with pytest.raises(KeyboardInterrupt):
        solve(PROBLEM, SolveSettings("greedy", work_limit=600))
    wait_for("HiGHS has ended", lambda: not any(map(is_running, asleep(folder))))


def test_a_process_that_ended_while_it_had_nothing_to_do_is_replaced() -> None:
    process = highs_process._started()
    process.kill()
    process.wait()
    highs_process._processes.give_back(process)
    plan = solve(PROBLEM, SolveSettings("ilp", work_limit=5.0))
    assert plan.notes == ()


def test_a_process_that_dies_at_work_is_a_solver_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text("import os; os.read(0, 1); os._exit(9)")
    monkeypatch.setattr(highs_worker, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(highs_process, "_processes", highs_process._Processes())
    (note,) = solve(PROBLEM, SolveSettings("auto", work_limit=5.0)).notes
    assert "the solver highs failed (RuntimeError: HiGHS' process ended with status" in note
