"""Analyze: the command that says what a step needs, in words or as figures."""

from __future__ import annotations

from typing import Annotated

import typer

from cotrain_compile import files, presets
from cotrain_compile.cli.figures import step_figures
from cotrain_compile.cli.parameters import MachineName, StepFile
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options


def analyze(
    file: StepFile,
    machine: MachineName = presets.THIS_MACHINE,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help='Device memory to fit into: bytes, "20GiB" or "80%". '
            "Default: what a card leaves to a step."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a step needs: its peak, its time, reuse distances, largest sizes."""
    from cotrain_compile.viz.text.analysis import analysis_figures, describe_analysis  # sympy

    keep_stdout_for(as_json)
    target = presets.find(machine)
    asked = {"memory_budget": memory_budget} if memory_budget else {}
    budget_bytes = Options.parse(asked).budgets(target)[Tier.DEVICE]
    dataflow = files.load(file, Dataflow)
    if as_json:
        figures = analysis_figures(dataflow, target, budget_bytes)
        print_json({**step_figures(dataflow), **figures})
    else:
        console.print(describe_analysis(dataflow, target, budget_bytes))
