"""Doctor: what this computer can do for a step, what will be used, and what to change."""

from __future__ import annotations

import typer

from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json

_WIDTH = 14


def doctor(as_json: Json = False) -> None:
    """Say what this computer can do, what a step will use of it, and what to change.

    Exit code 1 where something has to be changed before a step can run.
    """
    from cotrain_compile.runtime.examine import examine  # loads torch

    keep_stdout_for(as_json)
    findings = list(examine())
    if as_json:
        print_json({"findings": findings})
    for one in findings:
        console.print(f"{one.topic:{_WIDTH}}{one.found}", soft_wrap=True)
        if one.used:
            console.print(f"{'':{_WIDTH}}used: {one.used}", soft_wrap=True)
        if one.change:
            told = "to change" if one.prevents else "better"
            console.print(f"{'':{_WIDTH}}{told}: {one.change}", soft_wrap=True)
    if any(one.prevents for one in findings):
        raise typer.Exit(1)
