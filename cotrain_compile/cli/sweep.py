"""Sweep: what a step takes under many budgets, on many machines, solved in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cotrain_compile import files, presets
from cotrain_compile.cli.parameters import (
    DeviceMemory,
    Gap,
    HostMemory,
    LinkRate,
    MicroBatchOrder,
    Policy,
    Recompute,
    Split,
    StepFile,
    TimeLimit,
    WorkLimit,
    refuse_output_folder,
    with_changes,
)
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, say_doing
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.options import Options

if TYPE_CHECKING:
    from cotrain_compile.placement.explain.sweep import Case, Sweep, Tried

Machines = Annotated[
    list[str] | None, typer.Option(help="A preset or a machine.json. Repeat it to compare several.")
]
Points = Annotated[int, typer.Option(min=2, help="How many device budgets to try on each machine.")]
MemoryBudgets = Annotated[
    list[str] | None,
    typer.Option(help="A device budget to try, instead of --points. Repeat it for several."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        help="SYMBOL=8,16,32: sizes to try at the largest budget; `analyze` names the symbols."
    ),
]

_WRITTEN = ("sweep.html", "sweep.png", "sweep.svg", "sweep.json")


def sweep(
    file: StepFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    machine: Machines = None,
    points: Points = 8,
    memory_budget: MemoryBudgets = None,
    host_memory_budget: Annotated[str, typer.Option(help="Host memory to keep to.")] = "100%",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    link: LinkRate = None,
    size: Sizes = None,
    policy: Policy = "auto",
    work_limit: WorkLimit = 7.0,
    time_limit: TimeLimit = 300.0,
    gap: Gap = 0.005,
    recompute: Recompute = "auto",
    micro_batch_order: MicroBatchOrder = "auto",
    split: Split = "auto",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Solve in so many processes; default: one for each core."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Solve a step under many device budgets: what would more memory, or another card, buy?"""
    from cotrain_compile.cli.sweep_cases import cases_of, sizes_of, swept
    from cotrain_compile.placement.explain.sweep import refuse_if_nothing_fits

    keep_stdout_for(as_json)
    options = Options.parse(
        {
            "policy": policy,
            "work_limit": work_limit,
            "time_limit": time_limit,
            "gap": gap,
            "recompute": recompute,
            "micro_batch_order": micro_batch_order,
            "split": split,
            "host_memory_budget": host_memory_budget,
        }
    )
    refuse_output_folder(output, _WRITTEN, (file, *(machine or ())))
    dataflow = files.load(file, Dataflow)
    sizes = [sizes_of(text, dataflow) for text in size or ()]
    names = dict.fromkeys(machine or [presets.THIS_MACHINE])
    targets = [with_changes(name, device_memory, host_memory, link) for name in names]
    with console.status("looking for the least budgets"):
        cases = [
            case
            for target in targets
            for case in cases_of(dataflow, target, options, memory_budget, points, sizes)
        ]
    read = _readable(file, dataflow, output)
    result = swept(dataflow, list(_solved(read, cases, options, jobs or os.cpu_count() or 1)))
    _write(result, output)
    if as_json:
        print(files.to_json(result), end="")
    refuse_if_nothing_fits(result.points)


def _readable(file: Path, dataflow: Dataflow, folder: Path) -> Path:
    """Where each process reads the step: `file`, or a copy in `folder` where it came by stdin."""
    if str(file) != files.STANDARD:
        return file
    copy = folder / "step.json"
    files.save(dataflow, copy)
    return copy


def _solved(file: Path, cases: Sequence[Case], options: Options, jobs: int) -> Iterator[Tried]:
    """What comes of `cases`, as it comes; a bar meanwhile."""
    from cotrain_compile.cli.sweep_cases import in_parallel
    from cotrain_compile.entry.choose_plan import solve_settings

    settings = solve_settings(options, options.compiled)
    hidden = not console.is_terminal or console.quiet
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("solving", total=len(cases))
        for done, tried in enumerate(in_parallel(file, cases, settings, jobs), 1):
            yield tried
            bar.advance(task)
            say_doing(f"solved {done} of {len(cases)}")


def _write(result: Sweep, folder: Path) -> None:
    from cotrain_compile.viz.sweep import note, sweep_table, write_pictures

    headings, rows = sweep_table(result)
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading == "limited by" else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    if told := note(result.points):
        console.print(told)
    files.save(result, folder / "sweep.json")
    write_pictures(result, folder)
    console.print(f"wrote {folder}/{', '.join(_WRITTEN[:-1])} and {_WRITTEN[-1]}")
