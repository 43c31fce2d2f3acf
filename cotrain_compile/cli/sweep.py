"""Sweep: what a step takes under many budgets, on many machines, solved in parallel."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cotrain_compile import files, presets
from cotrain_compile.choose_plan import solve_settings
from cotrain_compile.cli.machines import (
    POLICY_HELP,
    DeviceMemory,
    HostMemory,
    LinkRate,
    MicroBatchOrder,
    changed,
)
from cotrain_compile.cli.terminal import console
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options, Recompute
from cotrain_compile.placement.explain.carry import Tried, carried, with_plans_of_slower_machines
from cotrain_compile.placement.explain.sweep import (
    Case,
    Sweep,
    device_budgets,
    refuse_if_nothing_fits,
    try_case,
)
from cotrain_compile.placement.search.solve import SolveSettings
from cotrain_compile.sizes import Size


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
) -> None:
    """Solve a step under many device budgets: what would more memory, or another card, buy?"""
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
    sizes = [_sizes(text, dataflow) for text in size or ()]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking for the least budget", total=None)
        cases = [
            case
            for name in dict.fromkeys(machine or [presets.THIS_MACHINE])
            for target in [presets.find(changed(name, device_memory, host_memory, link))]
            for case in _cases(dataflow, target, options, memory_budget, points, sizes)
        ]
        bar.update(task, description="solving", total=len(cases))
        found = []
        for tried in _in_parallel(file, cases, settings, jobs or os.cpu_count() or 1):
            found.append(tried)
            bar.advance(task)
    result = _swept(dataflow, found)
    _write(result, output)
    refuse_if_nothing_fits(result.points)


def _swept(dataflow: Dataflow, found: Sequence[Tried]) -> Sweep:
    """All points by machine and size, with what they say about one another."""
    ordered = sorted(found, key=lambda tried: (tried.point.machine, *tried.point.sizes.items()))
    points = carried(with_plans_of_slower_machines(dataflow, ordered))
    return Sweep(dataflow.fingerprint, points, dataflow.job)


def _cases(
    dataflow: Dataflow,
    machine: Machine,
    options: Options,
    asked: Sequence[str] | None,
    count: int,
    sizes: Sequence[tuple[str, Sequence[int]]],
) -> Iterator[Case]:
    """Each budget at the sizes as traced, then each size at the largest of the budgets."""
    host = options.budgets(machine)[Tier.HOST]
    if asked:
        budgets = [_budget(text).of(machine.device.capacity_bytes) for text in asked]
    else:
        budgets = list(device_budgets(dataflow, machine, host, count))
    for budget in budgets:
        yield Case(machine, {Tier.DEVICE: budget, Tier.HOST: host})
    for symbol, values in sizes:
        for value in values:
            largest = {Tier.DEVICE: max(budgets), Tier.HOST: host}
            yield Case(machine, largest, {symbol: value})


def _budget(text: str) -> Size:
    budget = Options.parse({"memory_budget": text}).memory_budget
    assert budget is not None
    return budget


def _sizes(text: str, dataflow: Dataflow) -> tuple[str, Sequence[int]]:
    symbol, _, values = text.partition("=")
    if symbol not in dataflow.symbols:
        known = ", ".join(dataflow.symbols) or "none; trace it with --dynamic"
        raise OptionError(f"--size {text}: symbols of this step are {known}")
    try:
        sizes = [int(value) for value in values.split(",")]
    except ValueError:
        raise OptionError(f"--size {text}: give it as {symbol}=8,16,32") from None
    from cotrain_compile.analysis.symbolic import at

    for value in sizes:
        at(dataflow, {**dataflow.symbols, symbol: value})  # refused here, before anything is solved
    return symbol, sizes


def _in_parallel(
    file: Path, cases: Sequence[Case], settings: SolveSettings, jobs: int
) -> Iterator[Tried]:
    """What comes of `cases` as they are done. Each process reads the step once.

    The processes end with this one, however that ends, and before it where it is interrupted.
    """
    workers = min(jobs, len(cases))
    context = get_context("spawn")  # a fork would copy the threads of solver and progress bar
    ours, theirs = context.Pipe()
    resource_tracker.ensure_running()  # else the first submit starts it, and unblocks Ctrl-C
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(file, theirs)) as pool:
        try:
            with _interrupts_later():
                futures = [pool.submit(_try, case, settings) for case in cases]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            ours.close()  # nobody waits for plans that nobody will see
            theirs.close()
            raise


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold Ctrl-C back. A process that is started meanwhile never sees it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_steps: list[Dataflow] = []


def _begin(file: Path, theirs: Connection) -> None:
    """Of a process that solves: read the step, and end when the other end of `theirs` is closed."""
    threading.Thread(target=_end_with, args=(theirs,), daemon=True).start()
    _steps.append(files.load(file, Dataflow))


def _end_with(theirs: Connection) -> None:
    wait([theirs])
    os._exit(1)


def _try(case: Case, settings: SolveSettings) -> Tried:
    return Tried(case, *try_case(_steps[0], case, settings))


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
