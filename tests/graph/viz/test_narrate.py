"""What compiling says: a ladder from nothing to every task, on stderr, plain off a terminal."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

import cotrain_compile
from cotrain_compile.errors import OptionError
from cotrain_compile.options import Options
from cotrain_compile.plan import Plan
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.text.narrate import (
    LOG,
    Narrator,
    pass_lines,
    summary_rows,
    task_lines,
    verbosity,
)
from tests.unit.viz.test_report import PLAN, PROBLEM

Step = Callable[[torch.Tensor], torch.Tensor]


def compiled(**options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step: Step = torch.compile(train, backend="cotrain", options=options)
    return step


def told(level: int, *, terminal: bool = False) -> str:
    out = StringIO()
    if terminal:
        out.isatty = lambda: True  # type: ignore[method-assign]
    with redirect_stderr(out):
        Narrator(level).tell(PROBLEM, PLAN)
    return out.getvalue()


def test_compiling_says_on_stderr_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    step = compiled(policy="coarse", machine="rtx4090")
    step(torch.ones(4, 8))
    plan = cotrain_compile.inspect(step).plan
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"a step     {format_seconds(plan.predicted.makespan_s)} predicted" in captured.err
    assert f"{format_bytes(plan.bytes_moved('offload'))} down" in captured.err
    step(torch.ones(4, 8))
    assert capsys.readouterr().err == ""


def test_a_quiet_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiled(quiet=True)(torch.ones(4, 8))
    assert capsys.readouterr().err == ""


def test_a_program_that_logs_gets_all_of_it_and_stderr_nothing(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    Narrator(4).tell(PROBLEM, PLAN)
    assert capsys.readouterr().err == ""
    summary, _, tasks = dict.fromkeys(caplog.messages)
    named = plan_words(PLAN.placement.policy)
    assert summary.startswith(f"cotrain    {named} on {PLAN.on_machine}\n")
    assert len(tasks.splitlines()) == len(PLAN.tasks)


@pytest.mark.parametrize(
    ("level", "says"), [(logging.WARNING, 0), (logging.INFO, 1), (logging.DEBUG, 2)]
)
def test_the_level_of_the_logger_says_how_much(
    level: int, says: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "level", level)
    assert verbosity(Options()) == says
    assert verbosity(Options(quiet=True)) == 0
    monkeypatch.setenv("COTRAIN_DEBUG", "4")
    assert verbosity(Options()) == 4


def test_what_is_said_stands_above_the_bar_of_tqdm() -> None:
    screen = StringIO()
    with redirect_stderr(screen), tqdm(total=3, file=screen, desc="epoch") as bar:
        bar.update()
        Narrator(1).tell(PROBLEM, PLAN)
    lines = screen.getvalue().split("\r")
    (said,) = (line for line in lines if "predicted" in line)
    assert "epoch" not in said
    assert said.startswith("cotrain")


@pytest.mark.long  # a process of its own
def test_torchs_own_switch_is_about_this_logger_too() -> None:
    code = (
        "import logging, cotrain_compile.viz.text.narrate\n"
        "log = logging.getLogger('cotrain_compile')\n"
        "print(log.level == logging.DEBUG, len(log.handlers))"
    )
    environment = {**os.environ, "TORCH_LOGS": "+cotrain_compile"}
    run = subprocess.run(
        [sys.executable, "-c", f"import torch\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["True", "1"]


def test_the_environment_outranks_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verbosity(Options()) == 1
    assert verbosity(Options(quiet=True)) == 0
    monkeypatch.setenv("COTRAIN_DEBUG", "3")
    assert verbosity(Options(quiet=True)) == 3
    monkeypatch.setenv("COTRAIN_DEBUG", "loud")
    with pytest.raises(OptionError, match="'loud', but must be a number from 0 to 4"):
        verbosity(Options())


def test_the_third_level_shows_what_each_pass_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COTRAIN_DEBUG", "3")
    compiled(policy="coarse", machine="rtx4090")(torch.ones(4, 8))
    said = capsys.readouterr().err
    assert "pass move_ops: no change" in said
    assert "+++ after insert_transfers" in said
    added = [
        line for line in said.splitlines() if line.startswith("+") and "cotrain.offload" in line
    ]
    assert added


def test_each_level_adds_to_the_one_below() -> None:
    said = [told(level) for level in range(5)]
    assert said[0] == ""
    assert all(more.startswith(less) for less, more in itertools.pairwise(said))
    assert "w1" not in said[1]
    assert all(f"{param}: " in said[2] for param in PLAN.placement.updates)
    assert said[4].endswith("".join(f"{line}\n" for line in task_lines(PLAN)))


def test_every_task_is_told_with_what_waits_for_it() -> None:
    lines = list(task_lines(PLAN))
    assert len(lines) == len(PLAN.tasks)
    for line, task in zip(lines, PLAN.tasks, strict=True):
        assert f" {task.name}" in line
        assert (task.wait_before or "at the end") in line


def test_off_a_terminal_there_are_no_bars_and_no_codes() -> None:
    assert "#" not in told(1)
    assert "\x1b" not in told(1)
    assert "[####" in told(1, terminal=True)


def test_where_nothing_moves_it_says_so() -> None:
    still: Plan = replace(PLAN, tasks=())
    rows = dict(summary_rows(still, PROBLEM.dataflow, bars=False))
    assert rows["moves"] == "nothing: everything fits on the device"
    assert "updates" not in rows


def test_a_change_is_a_diff() -> None:
    assert list(pass_lines("p", "a\nb", "a\nb")) == ["pass p: no change"]
    assert list(pass_lines("p", "a\nb", "a\nc"))[-2:] == ["-b", "+c"]
