"""What of a first step is going on: on a terminal a line, gone at the end; in a log a few."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from cotrain_compile.options import Options
from cotrain_compile.support.phases import is_listened, tell_phase
from cotrain_compile.viz.text import narrate
from cotrain_compile.viz.text.narrate import LOG, phase_line


def shown(*, terminal: bool = True, quiet: bool = False) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=80, no_color=True)
    options = Options(quiet=quiet)
    with phase_line(options, "tracing", console):
        tell_phase("planning: trying greedy")
        with phase_line(options, "compiling: 3/4", console):
            assert is_listened() is not quiet
            tell_phase("compiling: 4/4")
    assert not is_listened()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the logger is told within."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    try:
        yield lines
    finally:
        LOG.removeHandler(handler)


def test_a_long_phase_is_logged_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrate, "EVERY_S", 0.01)
    console = Console(file=StringIO(), force_terminal=False)
    with logged() as lines, phase_line(Options(), "tracing", console):
        for phase in ("tracing: 3 calls", "planning: trying greedy"):
            tell_phase(phase)
            end_s = time.monotonic() + 30
            while f"cotrain: {phase}, 0 s" not in lines and time.monotonic() < end_s:
                time.sleep(0.01)
            assert f"cotrain: {phase}, 0 s" in lines
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count  # it ends with the phase


def test_each_phase_is_named_with_its_seconds() -> None:
    text = shown()
    assert "cotrain: tracing 0:00:00" in text
    assert "cotrain: compiling: 4/4 0:00:00" in text
    assert text.endswith("\x1b[2K")  # the line is gone


@pytest.mark.parametrize("given", [{"terminal": False}, {"quiet": True}])
def test_a_log_of_short_phases_and_who_is_quiet_hear_nothing(
    given: dict[str, bool],
) -> None:
    with logged() as lines:
        assert "cotrain" not in shown(**given)
    assert not lines


def test_what_is_told_to_nobody_is_lost() -> None:
    tell_phase("planning")
