"""Phase line: what of a first step is going on, and since when.

On a terminal it is one line, which goes at the end. Elsewhere it is a line of the log for what
takes long, so that a log of a busy computer does not look like one of a process that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cotrain_compile.options.parts import OutputOptions
from cotrain_compile.support.phases import is_listened, tell_phase, told_to
from cotrain_compile.viz.text.log import LOG, above_bars
from cotrain_compile.viz.text.narrate import verbosity
from cotrain_compile.viz.text.terminal import PlainConsole

# Seconds from one line of a log to the next.
EVERY_S = 10.0


@contextmanager
def phase_line(
    options: OutputOptions, phase: str, console: Console | None = None
) -> Iterator[None]:
    """Show `phase`, and those told inside, each with the seconds since it began.

    Where stderr is no terminal the logger is told every `EVERY_S` seconds; nothing is shown where
    `options` ask for silence. In another such line the phase is told there.
    """
    if is_listened():
        tell_phase(phase)
        yield
        return
    console = console or PlainConsole(stderr=True)
    if not verbosity(options):
        yield
        return
    if not console.is_terminal:
        with _logged(phase):
            yield
        return
    columns = (SpinnerColumn(), TextColumn("cotrain: {task.description}"), TimeElapsedColumn())
    with above_bars(), Progress(*columns, console=console, transient=True) as line:
        task = line.add_task(phase)

        def show(told: str) -> None:
            nonlocal phase
            if not _is_stage(told, phase):
                line.reset(task)
            phase = told
            line.update(task, description=phase)

        with told_to(show):
            yield


@contextmanager
def _logged(phase: str) -> Iterator[None]:
    """Tell the logger every so often what is going on."""
    began_s, ended = time.monotonic(), threading.Event()

    def note(told: str) -> None:
        nonlocal phase, began_s
        if not _is_stage(told, phase):
            began_s = time.monotonic()
        phase = told

    def tell() -> None:
        while not ended.wait(EVERY_S):
            LOG.info("cotrain: %s, %d s", phase, time.monotonic() - began_s)

    thread = threading.Thread(target=tell, name="cotrain-phases", daemon=True)
    thread.start()
    try:
        with told_to(note):
            yield
    finally:
        ended.set()
        thread.join()


def _is_stage(told: str, phase: str) -> bool:
    """Whether the clock of `phase` goes on: what is behind a colon is a stage of it."""
    return told.partition(":")[0] == phase.partition(":")[0]
