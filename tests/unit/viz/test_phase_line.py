"""The line that says what of a first step is going on: on a terminal alone, gone at the end."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from cotrain_compile.options import Options
from cotrain_compile.phases import is_listened, tell_phase
from cotrain_compile.viz.text.phase_line import phase_line


def shown(*, terminal: bool = True, quiet: bool = False) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=80, no_color=True)
    options = Options(quiet=quiet)
    with phase_line(options, "tracing", console):
        tell_phase("planning: trying greedy")
        with phase_line(options, "compiling: 3/4", console):
            assert is_listened() == (terminal and not quiet)
            tell_phase("compiling: 4/4")
    assert not is_listened()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_each_phase_is_named_with_its_seconds() -> None:
    text = shown()
    assert "cotrain: tracing 0:00:00" in text
    assert "cotrain: compiling: 4/4 0:00:00" in text
    assert text.endswith("\x1b[2K")  # the line is gone


@pytest.mark.parametrize("given", [{"terminal": False}, {"quiet": True}])
def test_a_log_and_who_asked_for_silence_hear_nothing(given: dict[str, bool]) -> None:
    assert "cotrain" not in shown(**given)


def test_what_is_told_to_nobody_is_lost() -> None:
    tell_phase("planning")
