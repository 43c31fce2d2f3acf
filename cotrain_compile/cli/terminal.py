"""Terminal: where the command line writes, and how much.

Words go to stdout, or to stderr where stdout carries a file called "-"; with --json there are none.
What is being done goes to stderr with --verbose, a line each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pydantic_core
import typer

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
