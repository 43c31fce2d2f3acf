"""Stages: on a terminal, a bar with the time of each thing that a command does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cotrain_compile.cli.terminal import console, say_doing


class SayStage(Protocol):
    """Told which stage begins or goes on, and what is done in it."""

    def __call__(self, stage: str, doing: str = "") -> None: ...


@contextmanager
def stages() -> Iterator[SayStage]:
    """What it yields is told the stage and what it is doing; the bars go at the end."""
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal or console.quiet
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:

        def say(stage: str, doing: str = "") -> None:
            if stage not in bars:
                for before in bars.values():
                    progress.update(before, total=1, completed=1)
                bars[stage] = progress.add_task(stage, total=None)
            told = f"{stage}: {doing}" if doing else stage
            progress.update(bars[stage], description=told)
            say_doing(told)

        yield say
