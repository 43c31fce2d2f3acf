"""Progress: a bar on a terminal, a line every few steps in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES_IN_A_LOG = 10

Report = Callable[[int, str], None]


@contextmanager
def progress(console: Console, title: str, first: int, total: int) -> Iterator[Report]:
    """Within it, `report(done, detail)` shows how far the work is; it starts at `first`."""
    if not console.is_terminal:
        every = max(1, total // LINES_IN_A_LOG)

        def print_line(done: int, detail: str) -> None:
            if done % every == 0 or done in (first + 1, total):
                console.print(f"{title} {done}/{total}  {detail}")

        yield print_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, completed=first, detail="first step ...")
        yield lambda done, detail: bar.update(task, completed=done, detail=detail)
