"""Budgets: a plan of one step for each budget that somebody asks for, checked and saved.

In: a step, a machine, and what is asked for. Out: for each a plan, or why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cotrain_compile import files
from cotrain_compile.analysis.throughput import Throughput, throughput
from cotrain_compile.cli.outputs import refuse_outputs
from cotrain_compile.cli.terminal import SayStage
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan


@dataclass(frozen=True)
class Asked:
    """A budget in the words of who asks for it, the options with it, and where its plan goes.

    Where nobody asked for one it is called "default".
    """

    budget: str
    options: Options
    path: Path


@dataclass(frozen=True)
class Answered:
    """What came of it for `problem`, and what it trains on a second where that is asked for."""

    asked: Asked
    problem: Problem
    answer: Plan | PlacementError
    rate: Throughput | None = None


def ask(
    budgets: Sequence[str | None],
    shared: Mapping[str, Any],
    output: Path,
    reads: Sequence[str | Path],
) -> list[Asked]:
    """Each of `budgets`, all with the `shared` options; several plans go beside `output`.

    Raises `OptionError` where an option is wrong, or a file cannot be written or is one of `reads`.
    """
    several = len(budgets) > 1
    if several and str(output) == files.STANDARD:
        raise OptionError("--output - takes one plan: give --memory-budget once, or a file")
    asked = [
        Asked(
            budget or "default",
            Options.parse({**shared, "memory_budget": budget}),
            _beside(output, budget) if several and budget else output,
        )
        for budget in budgets
    ]
    for one in asked:
        refuse_outputs({"--output": one.path}, reads)
    return asked


def _beside(output: Path, budget: str) -> Path:
    name = "".join(budget.split())
    return output.with_name(f"{output.stem}-{name}{output.suffix}")


def answers(
    dataflow: Dataflow,
    machine: Machine,
    asked: Sequence[Asked],
    tokens: int | None,
    say: SayStage,
) -> list[Answered]:
    """What comes of each of `asked`, in their order; plans are saved as soon as they are found.

    With `tokens`, so many in a step, also how many a second.
    """
    found = {one.path: (own, answer) for one, own, answer in _found(dataflow, machine, asked, say)}
    return [
        Answered(one, *found[one.path], _rate(found[one.path][1], dataflow, machine, tokens))
        for one in asked
    ]


def _found(
    dataflow: Dataflow, machine: Machine, asked: Sequence[Asked], say: SayStage
) -> Iterator[tuple[Asked, Problem, Plan | PlacementError]]:
    """From tight to roomy: what fits less memory is worth looking at with more."""
    from cotrain_compile.entry.choose_plan import solve_settings
    from cotrain_compile.placement.check.check import check
    from cotrain_compile.placement.decisions.find_decisions import decision_space
    from cotrain_compile.placement.problem import formulate
    from cotrain_compile.placement.search.solve import solve

    say(f"{len(dataflow.ops)} ops on {machine.name}")
    first = asked[0].options
    captured = first.host_kernels == "captured"
    problem = formulate(
        dataflow, machine, first.budgets(machine), captured=captured, compiled=first.compiled
    )
    space = decision_space(problem) if len(asked) > 1 else None
    tighter: list[Plan] = []
    for one in sorted(asked, key=lambda one: one.options.budgets(machine)[Tier.DEVICE]):
        own = replace(problem, budgets=one.options.budgets(machine))
        stage = str(one.path)
        say(stage)
        settings = solve_settings(one.options, one.options.compiled)
        doing = partial(say, stage)
        try:
            plan = solve(own, settings, progress=doing, incumbents=tuple(tighter), space=space)
        except PlacementError as error:
            yield one, own, error
            continue
        check(own, plan)
        files.save(plan, one.path)
        tighter.append(plan)
        yield one, own, plan


def _rate(
    answer: Plan | PlacementError, dataflow: Dataflow, machine: Machine, tokens: int | None
) -> Throughput | None:
    if not tokens or not isinstance(answer, Plan) or not answer.predicted.makespan_s:
        return None
    return throughput(dataflow, machine, answer.predicted.makespan_s, tokens)
