"""Solve: a plan of a saved step for each budget, in words or as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cotrain_compile import files, presets
from cotrain_compile.cli.figures import Answered, Asked, answers, ask, solved_figures
from cotrain_compile.cli.parameters import (
    DeviceMemory,
    Gap,
    HostMemory,
    LinkRate,
    MachineName,
    MicroBatchOrder,
    Policy,
    Recompute,
    Split,
    StepFile,
    StepRanks,
    TimeLimit,
    WorkLimit,
    with_changes,
)
from cotrain_compile.cli.terminal import (
    Json,
    SayStage,
    as_flags,
    console,
    keep_stdout_for,
    print_json,
    stages,
)
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Machine
from cotrain_compile.options import parts
from cotrain_compile.plan import Plan
from cotrain_compile.viz.text.summary import candidates, comparison, search, summary

MemoryBudgets = Annotated[
    list[str] | None,
    typer.Option(
        help='Device memory to keep to: bytes, "20GiB" or "80%". Repeat it for several plans. '
        "Default: what a card leaves to a step."
    ),
]
HostBudget = Annotated[str, typer.Option(help="Host memory to keep to, given in the same way.")]
DiskBudget = Annotated[
    str | None,
    typer.Option(help="What may rest on the machine's drive, in the same way; default: nothing."),
]
Solver = Annotated[parts.Solver, typer.Option(help="The solver of the integer program.")]
Seed = Annotated[int, typer.Option(help="Seed of the solver.")]
OverlapSteps = Annotated[
    bool,
    typer.Option("--overlap-steps", help="Let host updates run on while the next step begins."),
]
Speculate = Annotated[
    parts.Speculate,
    typer.Option(help="Whether host updates begin before the gradient norm is known."),
]
Lowering = Annotated[
    parts.Lowering | None,
    typer.Option(help="How ops will run: it decides what they cost; default: as a preset says."),
]
HostKernels = Annotated[
    parts.HostKernels,
    typer.Option(help="How updates run on the host: in one fused loop, or op by op as captured."),
]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens in a step: also say tokens per second and MFU.")
]


def solve(
    file: StepFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The plan.json to write, or - for stdout.")
    ],
    machine: MachineName = presets.THIS_MACHINE,
    memory_budget: MemoryBudgets = None,
    host_memory_budget: HostBudget = "100%",
    disk_budget: DiskBudget = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    link: LinkRate = None,
    ranks: StepRanks = None,
    policy: Policy = "auto",
    solver: Solver = "highs",
    work_limit: WorkLimit = 7.0,
    time_limit: TimeLimit = 300.0,
    gap: Gap = 0.005,
    seed: Seed = 0,
    overlap_steps: OverlapSteps = False,
    speculate: Speculate = "off",
    recompute: Recompute = "auto",
    micro_batch_order: MicroBatchOrder = "auto",
    split: Split = "auto",
    lowering: Lowering = None,
    host_kernels: HostKernels = "fused",
    tokens: Tokens = None,
    as_json: Json = False,
) -> None:
    """Choose a plan for a step: where everything lives, what moves when. Nothing is run."""
    shared = {
        "host_memory_budget": host_memory_budget,
        "policy": policy,
        "solver": solver,
        "work_limit": work_limit,
        "time_limit": time_limit,
        "gap": gap,
        "seed": seed,
        "overlap_steps": overlap_steps,
        "speculate": speculate,
        "recompute": recompute,
        "micro_batch_order": micro_batch_order,
        "split": split,
        "host_kernels": host_kernels,
        "disk_budget": disk_budget,
        "lowering": lowering,
    }
    budgets = [*dict.fromkeys(memory_budget or ())]
    asked = ask(budgets or [None], shared, output, (file, machine))
    keep_stdout_for(as_json, *(one.path for one in asked))
    target = with_changes(machine, device_memory, host_memory, link)
    with stages() as say:
        dataflow = _read(file, ranks, machine, say)
        found = _answered(dataflow, target, asked, tokens, say)
    if as_json:
        print_json(solved_figures(found))
    else:
        _print(found, dataflow, with_rules=policy == "auto")
    _say_what_is_saved(found)


def _read(file: Path, ranks: int | None, machine: str, say: SayStage) -> Dataflow:
    say(f"reading {file}")
    dataflow = files.load(file, Dataflow)
    presets.refuse_other_ranks(dataflow.ranks, ranks, machine)
    return dataflow


def _answered(
    dataflow: Dataflow,
    machine: Machine,
    asked: Sequence[Asked],
    tokens: int | None,
    say: SayStage,
) -> list[Answered]:
    """What comes of each budget, and what each search has done."""
    found = answers(dataflow, machine, asked, tokens, say)
    for one in found:
        if isinstance(one.answer, Plan) and one.answer.report is not None:
            say(search(one.answer.report, with_bound=True))
    return found


def _print(found: Sequence[Answered], dataflow: Dataflow, *, with_rules: bool) -> None:
    """One plan in full, several side by side; with either, what simple rules would take."""
    answers = [one.answer for one in found]
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    if len(answers) == len(plans) == 1:
        console.print("\n".join(_first(found[0], dataflow)))
        console.print(as_flags(summary(plans[0], dataflow, ranked=not with_rules)))
    table = Table(box=None, pad_edge=False)
    table.add_column("a step in")
    for one in found:
        table.add_column(one.asked.budget, justify="right")
    rates = [one.rate for one in found]
    if any(rates):
        table.add_row("tokens/s", *(f"{rate.tokens_per_s:,.0f}" if rate else "" for rate in rates))
        table.add_row("MFU", *(_percent(rate.mfu) if rate else "" for rate in rates))
    side_by_side = comparison(answers) if len(answers) > 1 else ()
    for row in chain(side_by_side, _of_rules(answers) if with_rules and plans else ()):
        table.add_row(*row)
    if table.row_count:
        console.print(table, soft_wrap=False)
    for why in dict.fromkeys(rate.why_no_mfu for rate in rates if rate and rate.why_no_mfu):
        console.print(why)


def _first(one: Answered, dataflow: Dataflow) -> Iterator[str]:
    """Whether it fits, how fast it is, why, and what would help."""
    from cotrain_compile.viz.text.verdict import verdict, verdict_lines

    assert isinstance(one.answer, Plan)
    yield from verdict_lines(verdict(one.problem, one.answer))
    yield ""


def _percent(mfu: float | None) -> str:
    return "unknown" if mfu is None else f"{mfu:.1%}"


def _of_rules(answers: Sequence[Plan | PlacementError]) -> Iterator[tuple[str, ...]]:
    from cotrain_compile.placement.policies import RULES

    return candidates(answers, (*RULES, "fraction:auto"))


def _say_what_is_saved(found: Sequence[Answered]) -> None:
    """Name the file of each plan; then raise the first refusal, if any."""
    for one in found:
        if isinstance(one.answer, Plan) and str(one.asked.path) != files.STANDARD:
            console.print(f"saved {one.asked.path}")
    for one in found:
        if isinstance(one.answer, PlacementError):
            raise one.answer
