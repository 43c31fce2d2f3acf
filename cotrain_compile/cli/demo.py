"""Demo: the command that trains a small GPT in less memory than its step needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile import files
from cotrain_compile.cli.outputs import refuse_output_folder
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json


def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 40,
    output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("demo-output"),
    budget: Annotated[
        str, typer.Option(help='Device memory to keep to: bytes, "32MiB", or "5%" of the device.')
    ] = "32MiB",
    machine: Annotated[
        str,
        typer.Option(
            help="Plan for this preset or machine.json instead of measuring this computer."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Train a small GPT on Python's own sources in less memory than the step needs.

    Under torchrun, several processes train it together.
    """
    from cotrain_compile.demo.run import Settings, run

    refuse_output_folder(output)
    keep_stdout_for(False, Path(files.STANDARD) if as_json else None)
    outcome = run(Settings(steps, output, budget, machine), console)
    if as_json:
        print_json(outcome.figures)
