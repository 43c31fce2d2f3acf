"""The live line: what a long run says of itself, how rarely, and that it never stops a training."""

from __future__ import annotations

import gc
import os
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from typing import TextIO

import pytest
import torch

import cotrain_compile
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.options import Options
from cotrain_compile.options.parsers import LIVE_S
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.text.live import LiveLine, live_interval_s
from tests.graph.viz.test_narrate import compiled
from tests.unit.viz.test_report import MEASURED, PLAN


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(live: LiveLine, clock: Clock, steps: int, step_s: float) -> None:
    step_ended = live.watch(PLAN)
    for _ in range(steps):
        clock.now_s += step_s
        step_ended(MEASURED.peak_bytes)


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A terminal of 60 columns, and its other end to be read."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 60))
    os.set_blocking(master, False)
    with open(slave, "w", encoding="utf-8") as stream:
        yield stream, master
    os.close(master)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_has_pace_and_peaks_beside_what_was_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(LiveLine(1.0, clock := Clock()), clock, steps=2, step_s=0.5)
    (line,) = lines(capsys)
    predicted = format_seconds(PLAN.predicted.makespan_s)
    assert line.startswith(f"cotrain  step 2  500.0 ms a step ({predicted} predicted)  device ")
    for tier in MEMORIES:
        peak, budget = MEASURED.peak_bytes[tier], PLAN.budgets[tier]
        assert f"{tier} {format_bytes(peak)} of {format_bytes(budget)}" in line
    assert "planned again" not in line


def test_off_a_terminal_lines_come_far_apart(capsys: pytest.CaptureFixture[str]) -> None:
    run(LiveLine(10.0, clock := Clock()), clock, steps=45, step_s=0.5)
    assert [line.split()[2] for line in lines(capsys)] == ["2", "22", "42"]


def test_the_pace_is_that_of_the_last_steps(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveLine(1e-6, clock := Clock())
    step_ended = live.watch(PLAN)
    for step_s in [5.0] * 30 + [0.25] * 20:
        clock.now_s += step_s
        step_ended(MEASURED.peak_bytes)
    assert "step 50  250.0 ms a step" in lines(capsys)[-1]


def test_a_new_plan_is_said_and_planning_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveLine(1e-6, clock := Clock())
    run(live, clock, steps=3, step_s=0.5)
    clock.now_s += 60  # it is planned
    run(live, clock, steps=2, step_s=0.5)
    last = lines(capsys)[-1]
    assert last.startswith("cotrain  step 5  500.0 ms a step")
    assert last.endswith("planned again after step 3")


def test_plans_in_turn_are_compared_with_the_mean_of_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = LiveLine(1e-6, clock := Clock())
    spans = tuple(replace(span, end_s=9.0) for span in PLAN.predicted.spans)
    longer = replace(PLAN.predicted, spans=spans)
    ended = [live.watch(PLAN), live.watch(replace(PLAN, predicted=longer))]
    for step in range(21):
        clock.now_s += 1
        ended[step % 2](MEASURED.peak_bytes)
    mean_s = (longer.makespan_s + PLAN.predicted.makespan_s) / 2
    assert f"({format_seconds(mean_s)} predicted)" in lines(capsys)[-1]


def test_on_a_terminal_the_line_replaces_itself_and_keeps_its_width(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, other_end = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    live = LiveLine(30.0, clock := Clock())
    run(live, clock, steps=3, step_s=0.3)
    del live
    gc.collect()
    text = ""
    while not text.endswith("\n"):  # a busy computer hands it on in parts
        text += os.read(other_end, 4096).decode()
    shown = text.split("\r")
    written = [line.removeprefix("\x1b[K") for line in shown if "step" in line]
    assert [line.split()[2] for line in written] == ["2", "3"]
    assert all(len(line) == 59 for line in written)
    assert shown[-1] == "\n"


def test_a_closed_stderr_ends_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        live = LiveLine(1e-6, clock := Clock())
        run(live, clock, steps=2, step_s=1.0)
        monkeypatch.setattr(sys, "stderr", later := StringIO())
        run(live, clock, steps=2, step_s=1.0)
        assert later.getvalue() == ""


def test_a_broken_pipe_ends_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    run(LiveLine(1e-6, clock := Clock()), clock, steps=3, step_s=1.0)
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_the_environment_decides_but_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert live_interval_s(Options()) is None
    assert live_interval_s(Options(live=5.0)) == 5.0
    assert live_interval_s(Options(live=5.0, quiet=True)) is None
    monkeypatch.setenv("COTRAIN_LIVE", "1")
    assert live_interval_s(Options()) == LIVE_S
    assert live_interval_s(Options(live=5.0)) == 5.0
    assert live_interval_s(Options(quiet=True)) is None
    monkeypatch.setenv("COTRAIN_LIVE", "0")
    assert live_interval_s(Options(live=5.0)) is None
    monkeypatch.setenv("COTRAIN_LIVE", "often")
    with pytest.raises(OptionError, match="COTRAIN_LIVE is 'often', but must be 0 or 1"):
        live_interval_s(Options())


def test_a_training_says_where_it_is_and_that_it_was_planned_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = compiled(live=1e-6)
    for rows in (4, 4, 4, 6, 6):
        step(torch.ones(rows, 8))
    said = [line for line in lines(capsys) if line.startswith("cotrain  step ")]
    assert [line.split()[2] for line in said] == ["2", "3", "5"]
    assert said[-1].endswith("planned again after step 3")
    measured = cotrain_compile.inspect(step).measured
    assert measured is not None
    assert f"device {format_bytes(measured.peak_bytes[Tier.DEVICE])} of" in said[-1]


def test_unless_asked_there_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({}, {"live": 1e-6, "quiet": True}):
        step = compiled(**options)
        for _ in range(3):
            step(torch.ones(4, 8))
        assert not [line for line in lines(capsys) if line.startswith("cotrain  step ")]
