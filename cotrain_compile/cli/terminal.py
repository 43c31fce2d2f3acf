"""Terminal: where the command line writes, and how much.

Words go to stdout, or to stderr where stdout carries a file called "-"; with --json there are none.
What is being done goes to stderr with --verbose, a line each, and on a terminal as a bar. Messages
call options as the command line does (`as_flags`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import pydantic_core
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cotrain_compile.files import STANDARD
from cotrain_compile.support.phases import also_told_to
from cotrain_compile.viz.text.terminal import PlainConsole

console = PlainConsole()
_doing = PlainConsole(stderr=True, quiet=True)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of text.")]


def speak(*, quiet: bool, verbose: bool) -> None:
    """From now on say nothing but documents, or also what is being done."""
    console.quiet, console.stderr = quiet, False
    _doing.quiet = not verbose


def keep_stdout_for(as_json: bool, *files: Path | None) -> None:
    """No words where JSON is asked for; on stderr where one of `files` goes to stdout: "-"."""
    console.quiet = console.quiet or as_json
    console.stderr = any(str(file) == STANDARD for file in files)


def print_json(value: Any) -> None:
    """`value`, plain data of ours, on stdout."""
    print(pydantic_core.to_json(value, indent=1).decode())


def say_doing(what: str) -> None:
    """Say with --verbose what is done from now on."""
    _doing.print(f"cotrain: {what}")


@contextmanager
def saying_phases() -> Iterator[None]:
    """Say with --verbose each phase that is told inside, once, whatever its counts."""
    if _doing.quiet:
        yield
        return
    said: set[str] = set()

    def say(told: str) -> None:
        phase = told.rpartition(": ")[0] or told
        if phase not in said:
            said.add(phase)
            say_doing(phase)

    with also_told_to(say):
        yield


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


# Options that messages name as `options={...}` has them, and that some command has as a flag.
FLAGS = (
    *("checkpoints", "device", "gap", "host_kernels", "host_memory_budget", "lowering", "machine"),
    *(
        "memory_budget",
        "micro_batch_order",
        "overlap_steps",
        "policy",
        "recompute",
        "seed",
        "split",
    ),
    *("solver", "speculate", "split", "time_limit", "work_limit"),
)
_ANY = "|".join(FLAGS)
# A name of one word is an ordinary word, too, if nothing says that it is an option.
_UNLIKE_A_WORD = "|".join(name for name in FLAGS if "_" in name)
_FORMS = re.compile(
    rf"option '(?P<option>{_ANY})'"
    rf"|\b(?P<set>{_ANY})=(?:'(?P<text>[^']*)'|(?P<value>[\w.]+))"
    rf"|(?<![\w'-])(?P<bare>{_UNLIKE_A_WORD})\b(?!['=])"
)


def as_flags(message: str) -> str:
    """`message` in the words of somebody who has typed a command.

    `option 'memory_budget' is ...` becomes `--memory-budget is ...`, and `policy='auto'` becomes
    `--policy auto`. Options that no command has as a flag keep their names.
    """
    return _FORMS.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name = found["option"] or found["set"] or found["bare"]
    flag = f"--{name.replace('_', '-')}"
    value = found["text"] or found["value"]
    return f"{flag} {value}" if value and value != "True" else flag
