"""Solve: a plan of a saved step for each budget, in words or as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cotrain_compile import files, options, presets
from cotrain_compile.analysis.throughput import Throughput, throughput
from cotrain_compile.cli.figures import solved_figures
from cotrain_compile.cli.machines import (
    POLICY_HELP,
    DeviceMemory,
    HostMemory,
    LinkRate,
    MicroBatchOrder,
    StepRanks,
    changed,
)
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json, say_doing
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.plan import Plan
from cotrain_compile.viz.text.summary import candidates, comparison, summary

Speculate = Annotated[
    options.Speculate, typer.Option(help="Whether host updates begin before the norm is known.")
]
HostKernels = Annotated[options.HostKernels, typer.Option(help="How updates on the host will run.")]


def solve(
    file: Annotated[Path, typer.Argument(help="step.json, from trace or from a dump.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    machine: Annotated[str, typer.Option(help="Preset or machine.json.")] = presets.THIS_MACHINE,
    memory_budget: Annotated[
        list[str] | None,
        typer.Option(help='Device memory: bytes, "20GiB" or "80%". Once for each plan to make.'),
    ] = None,
    host_memory_budget: Annotated[str, typer.Option(help="The same on the host.")] = "100%",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    link: LinkRate = None,
    ranks: StepRanks = None,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "auto",
    solver: Annotated[options.Solver, typer.Option(help="What solves the program.")] = "highs",
    time_limit: Annotated[float, typer.Option(help="Seconds for each plan, all in all.")] = 20.0,
    gap: Annotated[
        float, typer.Option(help="Stop when this close to the bound: 0.005 is 0.5 %.")
    ] = 0.005,
    seed: Annotated[int, typer.Option(help="Of the solver; the same seed, the same plan.")] = 0,
    overlap_steps: Annotated[
        bool, typer.Option("--overlap-steps", help="Let host updates go on under the next step.")
    ] = False,
    speculate: Speculate = "off",
    recompute: Annotated[
        options.Recompute, typer.Option(help="Whether values may be made again.")
    ] = "auto",
    micro_batch_order: MicroBatchOrder = "auto",
    lowering: Annotated[
        options.Lowering | None,
        typer.Option(help="How ops will run; else as a preset's."),
    ] = None,
    host_kernels: HostKernels = "fused",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="In a step: say also tokens per second, and MFU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose a plan for a step: where everything lives, what moves when. Nothing is run."""
    from cotrain_compile.placement.policies import RULES

    shared = {
        "host_memory_budget": host_memory_budget,
        "policy": policy,
        "solver": solver,
        "time_limit": time_limit,
        "gap": gap,
        "seed": seed,
        "overlap_steps": overlap_steps,
        "speculate": speculate,
        "recompute": recompute,
        "micro_batch_order": micro_batch_order,
        "host_kernels": host_kernels,
        **({"lowering": lowering} if lowering else {}),
    }
    budgets = list(dict.fromkeys(memory_budget or ["100%"]))
    asked = [Options.parse({**shared, "memory_budget": budget}) for budget in budgets]
    paths = _plan_paths(output, budgets)
    keep_stdout_for(as_json, *paths)
    target = presets.find(changed(machine, device_memory, host_memory, link))
    with _stages() as say:
        say(f"reading {file}")
        dataflow = files.load(file, Dataflow)
        presets.refuse_other_ranks(dataflow.ranks, ranks, machine)
        answers = _answers(dataflow, target, asked, paths, say)
    rules = (*RULES, "fraction:auto") if policy == "auto" else ()
    rates = _rates(answers, dataflow, target, tokens)
    if as_json:
        print_json(solved_figures(answers, budgets, paths, rates))
    else:
        _print_answers(answers, budgets, dataflow, rules, rates)
    _say_what_is_saved(answers, paths)


def _say_what_is_saved(answers: Sequence[Plan | PlacementError], paths: Sequence[Path]) -> None:
    """Name the file of each plan; then raise the first refusal, if any."""
    for answer, path in zip(answers, paths, strict=True):
        if isinstance(answer, Plan) and str(path) != files.STANDARD:
            console.print(f"saved {path}")
    for answer in answers:
        if isinstance(answer, PlacementError):
            raise answer


def _plan_paths(output: Path, budgets: Sequence[str]) -> list[Path]:
    """Where each plan goes: `output`, or one file beside it for each of several budgets.

    Raises `OptionError` where one cannot be written.
    """
    paths = [output]
    if len(budgets) > 1:
        if str(output) == files.STANDARD:
            raise OptionError("--output - takes one plan: give --memory-budget once, or a file")
        names = ["".join(budget.split()) for budget in budgets]
        paths = [output.with_name(f"{output.stem}-{name}{output.suffix}") for name in names]
    for path in paths:
        files.refuse_unwritable(path)
    return paths


class _Say(Protocol):
    def __call__(self, stage: str, doing: str = "") -> None: ...


@contextmanager
def _stages() -> Iterator[_Say]:
    """A bar and the time of each stage; what it yields is told the stage and what it is doing."""
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


def _answers(
    dataflow: Dataflow,
    machine: Machine,
    asked: Sequence[Options],
    paths: Sequence[Path],
    say: _Say,
) -> list[Plan | PlacementError]:
    """The plan for each of `asked`, checked and saved to its path, or why there is none."""
    from cotrain_compile.choose_plan import solve_settings
    from cotrain_compile.placement.check.check import check
    from cotrain_compile.placement.decisions.find_decisions import decision_space
    from cotrain_compile.placement.problem import formulate
    from cotrain_compile.placement.search.solve import solve as choose

    say(f"{len(dataflow.ops)} ops on {machine.name}")
    captured = asked[0].host_kernels == "captured"
    problem = formulate(dataflow, machine, asked[0].budgets(machine), captured=captured)
    space = decision_space(problem) if len(asked) > 1 else None
    found: dict[Path, Plan | PlacementError] = {}
    # From tight to roomy: what fits less memory is worth looking at with more.
    order = sorted(
        zip(asked, paths, strict=True), key=lambda pair: pair[0].budgets(machine)[Tier.DEVICE]
    )
    for wanted, path in order:
        own = replace(problem, budgets=wanted.budgets(machine))
        say(str(path))
        tighter = [answer for answer in found.values() if isinstance(answer, Plan)]
        try:
            plan = choose(
                own,
                solve_settings(wanted),
                progress=partial(say, str(path)),
                incumbents=tighter,
                space=space,
            )
        except PlacementError as error:
            found[path] = error
            continue
        check(own, plan)
        files.save(plan, path)
        found[path] = plan
    return [found[path] for path in paths]


def _print_answers(
    answers: Sequence[Plan | PlacementError],
    budgets: Sequence[str],
    dataflow: Dataflow,
    rules: Sequence[str],
    rates: Sequence[Throughput | None],
) -> None:
    """One plan in full, several side by side; with either, what the simple `rules` would take."""
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    if len(answers) == len(plans) == 1:
        console.print(summary(plans[0], dataflow, ranked=not rules))
    table = Table(box=None, pad_edge=False)
    table.add_column("a step in")
    for budget in budgets:
        table.add_column(budget, justify="right")
    if any(rates):
        table.add_row("tokens/s", *(f"{rate.tokens_per_s:,.0f}" if rate else "" for rate in rates))
        table.add_row("MFU", *(f"{rate.mfu:.1%}" if rate else "" for rate in rates))
    side_by_side = comparison(answers) if len(answers) > 1 else ()
    for row in chain(side_by_side, candidates(answers, rules) if rules and plans else ()):
        table.add_row(*row)
    if table.row_count:
        console.print(table, soft_wrap=False)


def _rates(
    answers: Sequence[Plan | PlacementError],
    dataflow: Dataflow,
    machine: Machine,
    tokens: int | None,
) -> list[Throughput | None]:
    """What each plan trains on a second, where somebody has said how many `tokens` a step has."""
    return [
        throughput(dataflow, machine, answer.predicted.makespan_s, tokens)
        if tokens and isinstance(answer, Plan) and answer.predicted.makespan_s
        else None
        for answer in answers
    ]
