"""Diff: the command that compares two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile.cli.figures import difference_figures
from cotrain_compile.cli.reading import Step, read_step, step_beside
from cotrain_compile.cli.terminal import Json, console, print_json
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.viz.text.diff import describe_diff


def diff(
    before: Annotated[Path, typer.Argument(help="plan.json.")],
    after: Annotated[Path, typer.Argument(help="plan.json to compare with it.")],
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Say what differs between two plans, and what that does to time and memory."""
    old, new = load_plan(before), load_plan(after)
    dataflow = read_step(old, before, step) if step else step_beside(before, old)
    if as_json:
        print_json(difference_figures(old, new))
        return
    console.print(describe_diff(old, new, dataflow))
