"""A Ctrl-C at any line of the runtime: what is said of it is true, nothing hangs or is lost.

Few lines in every run, many in a long one. The signal itself is not sent: at the line that is
drawn the step's own thread gets what a signal would have raised there.
"""

from __future__ import annotations

import functools
import linecache
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.support.captured_steps import captured, differences
from tests.support.faults import (
    WATCHDOG_S,
    Trial,
    check_left,
    clones,
    compiled_setting,
    setting_of,
    undisturbed,
)
from tests.support.thread_card import ThreadCard

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

PLENTY = 1 << 40
FOLDERS = ("/cotrain_compile/runtime/", "/cotrain_compile/backends/")
SEEN = ("all", "streamed weights", "host streamed")


class Lines:
    """Counts the lines of the runtime that the step's thread comes to, and interrupts one."""

    def __init__(self, interrupts: int = 0) -> None:
        self.count = 0
        self.interrupts = interrupts
        self.where = ""

    def take_step(self, trial: Trial) -> None:
        sys.settrace(self._of_frame)
        try:
            trial.take_step()
        finally:
            sys.settrace(None)

    def _of_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        return self._of_line if any(folder in file for folder in FOLDERS) else None

    def _of_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        # Python comes to the line of a `with` once more before it lets go, and no signal there.
        if event == "line" and not linecache.getline(*place).lstrip().startswith("with "):
            self.count += 1
            if self.count == self.interrupts:
                sys.settrace(None)
                self.where = ":".join(map(str, place))
                raise KeyboardInterrupt
        return self._of_line


@functools.cache
def on_card(name: str) -> CompiledStep:
    """The step of a setting on a card of threads."""
    step = captured(setting_of(name).training)
    plan = schedule(step.problem(), setting_of(name).placement())
    graph, card = run_passes(step.step, plan), ThreadCard()
    pool = PinnedPool(card.pin, card.unpin, lambda: PLENTY)
    device = CudaDevice(card, pool, PLENTY, host_kernels(graph, "captured"))
    return CompiledStep(step.problem(), plan, graph, device)


def trial_of(compiled: CompiledStep, name: str) -> Trial:
    """A trial that has taken one step."""
    training = setting_of(name).training
    return Trial(captured(training), compiled, clones(undisturbed(training)[0]))


def interrupt(compiled: CompiledStep, name: str, line: int) -> str:
    """Interrupt a step at `line`, and check what that leaves; where it was."""
    trial, steps = trial_of(compiled, name), compiled.steps
    first, second = undisturbed(setting_of(name).training)
    lines = Lines(interrupts=line)
    try:
        lines.take_step(trial)
    except BaseException as error:
        if not lines.where:
            raise
        was_taken, noted = compiled.steps > steps, getattr(error, "__notes__", [])
        if not was_taken and noted:
            check_left(trial, compiled, name, error)
        else:
            assert not differences(trial.inputs, second if was_taken else first), lines.where
    else:
        assert not differences(trial.inputs, second), lines.where
    return lines.where


STEPS = [(compiled_setting, "all"), *((on_card, name) for name in SEEN)]


@pytest.mark.parametrize(
    "tries", [pytest.param(6, id="few"), pytest.param(400, id="many", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("of", "name"), STEPS, ids=["emulated-all", *(f"card-{n}" for n in SEEN)])
def test_a_step_is_interrupted_at_any_line(
    of: Callable[[str], CompiledStep], name: str, tries: int
) -> None:
    compiled, counted = of(name), Lines()
    counted.take_step(trial_of(compiled, name))
    drawn = random.Random(f"{name} {tries}")
    for _ in range(tries):
        signal.alarm(WATCHDOG_S)  # of each step
        interrupt(compiled, name, drawn.randrange(1, counted.count + 1))
