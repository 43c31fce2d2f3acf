"""Sweep: what a step takes under many budgets, on many machines, solved in parallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cotrain_compile import files, presets
from cotrain_compile.cli.machines import (
    POLICY_HELP,
    DeviceMemory,
    HostMemory,
    LinkRate,
    MicroBatchOrder,
    changed,
)
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, say_doing
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.options import Options, Recompute

if TYPE_CHECKING:
    from cotrain_compile.placement.explain.sweep import Sweep


def sweep(
    file: Annotated[Path, typer.Argument(help="step.json, from trace or from a dump.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    machine: Annotated[
        list[str] | None, typer.Option(help="Preset or machine.json. Once for each to compare.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, help="Budgets to try on each machine.")] = 8,
    memory_budget: Annotated[
        list[str] | None, typer.Option(help="Budgets to try, in place of --points.")
    ] = None,
    host_memory_budget: Annotated[str, typer.Option(help="On the host.")] = "100%",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    link: LinkRate = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="SYMBOL=8,16,32: sizes to try, at the largest budget (analyze names)."),
    ] = None,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = "auto",
    time_limit: Annotated[float, typer.Option(help="Seconds for each plan, all in all.")] = 20.0,
    gap: Annotated[
        float, typer.Option(help="Stop when this close to the bound: 0.005 is 0.5 %.")
    ] = 0.005,
    recompute: Annotated[
        Recompute, typer.Option(help="Whether values may be made again.")
    ] = "auto",
    micro_batch_order: MicroBatchOrder = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; else one a core.")] = None,
    as_json: Json = False,
) -> None:
    """Solve a step under many device budgets: what would more memory, or another card, buy?"""
    from cotrain_compile.choose_plan import solve_settings
    from cotrain_compile.cli.sweep_cases import cases_of, in_parallel, sizes_of, swept
    from cotrain_compile.placement.explain.sweep import refuse_if_nothing_fits

    keep_stdout_for(as_json)
    options = Options.parse(
        {
            "policy": policy,
            "time_limit": time_limit,
            "gap": gap,
            "recompute": recompute,
            "micro_batch_order": micro_batch_order,
            "host_memory_budget": host_memory_budget,
        }
    )
    settings = solve_settings(options)
    files.refuse_unwritable_folder(output)
    dataflow = files.load(file, Dataflow)
    if str(file) == files.STANDARD:  # each process reads it
        file = output / "step.json"
        files.save(dataflow, file)
    sizes = [sizes_of(text, dataflow) for text in size or ()]
    with Progress(
        console=console, transient=True, disable=not console.is_terminal or console.quiet
    ) as bar:
        task = bar.add_task("looking for the least budget", total=None)
        cases = [
            case
            for name in dict.fromkeys(machine or [presets.THIS_MACHINE])
            for target in [presets.find(changed(name, device_memory, host_memory, link))]
            for case in cases_of(dataflow, target, options, memory_budget, points, sizes)
        ]
        bar.update(task, description="solving", total=len(cases))
        found = []
        for tried in in_parallel(file, cases, settings, jobs or os.cpu_count() or 1):
            found.append(tried)
            bar.advance(task)
            say_doing(f"solved {len(found)} of {len(cases)}")
    result = swept(dataflow, found)
    _write(result, output)
    if as_json:
        print(files.to_json(result), end="")
    refuse_if_nothing_fits(result.points)


def _write(result: Sweep, folder: Path) -> None:
    from cotrain_compile.viz.sweep import note, sweep_table, write_pictures

    headings, rows = sweep_table(result)
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "limited by" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    if told := note(result.points):
        console.print(told)
    files.save(result, folder / "sweep.json")
    write_pictures(result, folder)
    console.print(f"wrote {folder}/sweep.html, sweep.png, sweep.svg and sweep.json")
