"""Phase line: on a terminal, one line that says what of a first step is going on and since when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cotrain_compile.options import Options
from cotrain_compile.phases import is_listened, tell_phase, told_to
from cotrain_compile.viz.text.log import above_bars
from cotrain_compile.viz.text.narrate import verbosity
from cotrain_compile.viz.text.terminal import PlainConsole


@contextmanager
def phase_line(options: Options, phase: str, console: Console | None = None) -> Iterator[None]:
    """Show `phase`, and those told inside, each with the seconds since it began.

    Nothing where stderr is no terminal, or `options` ask for silence; the line goes at the end. In
    another such line the phase is told there.
    """
    if is_listened():
        tell_phase(phase)
        yield
        return
    console = console or PlainConsole(stderr=True)
    if not verbosity(options) or not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("cotrain: {task.description}"), TimeElapsedColumn())
    with above_bars(), Progress(*columns, console=console, transient=True) as line:
        task = line.add_task(phase)

        def show(told: str) -> None:
            nonlocal phase
            # What is behind a colon is a stage of the phase, whose clock goes on.
            if told.partition(":")[0] != phase.partition(":")[0]:
                line.reset(task)
            phase = told
            line.update(task, description=phase)

        with told_to(show):
            yield
