"""Explain: the command that says why a parameter is where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile.cli.reading import PlanMachine, Profile, Step, read_problem
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json, say_doing
from cotrain_compile.placement.saved import load_plan


def explain(
    file: Annotated[Path, typer.Argument(help="plan.json.")],
    param: Annotated[str, typer.Argument(help="A parameter, as layers.17.mlp.weight.")],
    step: Step = None,
    machine: PlanMachine = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Say why a parameter is where it is, and what the step would take with it kept otherwise."""
    from cotrain_compile.placement.explain.explain import explain as explained

    keep_stdout_for(as_json)
    with console.status("reading") as status:

        def tell(doing: str) -> None:
            status.update(doing)
            say_doing(doing)

        plan = load_plan(file)
        problem = read_problem(plan, file, step, machine, profile)
        said = explained(problem, plan, param, progress=tell)
    if as_json:
        print_json(said)
    else:
        console.print(str(said))
