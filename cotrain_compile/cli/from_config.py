"""From config: what a configuration of another framework is here, setting by setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotrain_compile import files, presets
from cotrain_compile.cli.parameters import MachineName, WorkLimit
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json, stages
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.options import Options
from cotrain_compile.plan import Plan
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_seconds
from cotrain_compile.viz.text.summary import candidates

if TYPE_CHECKING:
    from cotrain_compile.migrate.counterparts import Counterpart

_HEADS = {
    "option": "Options of this backend",
    "in the step": "In the step",
    "decided by the plan": "Decided by the plan",
    "stays yours": "Stays as it is",
    "no counterpart": "No counterpart",
    "not known": "Not known to this command",
}


def from_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="A DeepSpeed JSON, or a YAML of Accelerate, axolotl or a torchtune recipe.",
            exists=True,
            dir_okay=False,
        ),
    ],
    step: Annotated[
        Path | None,
        typer.Option(help="A traced step.json: also say what the plan would gain on it."),
    ] = None,
    machine: MachineName = presets.THIS_MACHINE,
    memory_budget: Annotated[
        str | None, typer.Option(help="The budget of that plan; default: what a card leaves.")
    ] = None,
    work_limit: WorkLimit = 20.0,
    as_json: Json = False,
) -> None:
    """Read a configuration of another framework: the step, our options, what has no counterpart."""
    from cotrain_compile.migrate.read import options_of, read, step_text

    keep_stdout_for(as_json)
    found = read(file)
    text = step_text(found.training)
    asked = {"work_limit": work_limit, "memory_budget": memory_budget}
    plan = _solved(step, machine, asked) if step else None
    if as_json:
        told: dict[str, Any] = {
            "framework": found.framework,
            "options": options_of(found.training),
            "step": text,
            "settings": found.counterparts,
        }
        print_json({**told, "gain": list(_gain(plan))} if plan else told)
        return
    console.print(f"{file}: {found.framework}, {len(found.counterparts)} settings\n")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    for way, head in _HEADS.items():
        if group := [one for one in found.counterparts if one.way.value == way]:
            console.print(head, style="bold")
            _print_group(group)
    if plan:
        console.print(f"\nThe step of {step} on {machine}", style="bold", soft_wrap=True)
        for name, took in _gain(plan):
            console.print(f"  {name:32}{took}", markup=False, highlight=False, soft_wrap=True)


def _print_group(group: Sequence[Counterpart]) -> None:
    """Settings with one counterpart under each other, and what that is below them."""
    told = dict.fromkeys(one.told for one in group)
    for words in told:
        for one in group:
            if one.told == words:
                console.print(
                    f"  {one.setting}: {one.value}", markup=False, highlight=False, soft_wrap=True
                )
        console.print(f"      {words}", markup=False, highlight=False, soft_wrap=True, style="dim")


def _solved(step: Path, machine: str, asked: Mapping[str, Any]) -> Plan:
    """A plan of the step in `step`; raises `OptionError` or `PlacementError` without one."""
    from cotrain_compile.entry.choose_plan import solve_settings
    from cotrain_compile.placement.check.check import check
    from cotrain_compile.placement.problem import formulate
    from cotrain_compile.placement.search.solve import solve

    if not step.is_file():
        raise OptionError(f"--step {step} is not there; `cotrain-compile trace` makes one")
    target = presets.find(machine)
    options = Options.parse(asked)
    with stages() as say:
        dataflow = files.load(step, Dataflow)
        problem = formulate(dataflow, target, options.budgets(target), compiled=options.compiled)
        say(f"{len(dataflow.ops)} ops on {target.name}")
        plan = solve(problem, solve_settings(options, options.compiled))
    check(problem, plan)
    return plan


def _gain(plan: Plan) -> Iterator[tuple[str, str]]:
    """A step as planned, and as simple rules of other frameworks would place it."""
    from cotrain_compile.placement.policies import RULES

    yield "this plan", format_seconds(plan.predicted.makespan_s)
    rules = {plan_words(rule) for rule in RULES}
    yield from ((name, took) for name, took in candidates([plan], tuple(RULES)) if name in rules)
