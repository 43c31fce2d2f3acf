"""Sweep cases: the budgets and sizes of a sweep, and what comes of them, solved in parallel."""

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

from cotrain_compile import files
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.options.parts import PlanningOptions
from cotrain_compile.placement.explain.sweep import (
    Case,
    Sweep,
    Tried,
    carry_over,
    device_budgets,
    try_case,
    with_plans_of_slower_machines,
)
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.support.units import Size


def swept(dataflow: Dataflow, found: Sequence[Tried]) -> Sweep:
    """All points by machine and size, with what they say about one another."""
    ordered = sorted(found, key=lambda tried: (tried.point.machine, *tried.point.sizes.items()))
    points = carry_over(with_plans_of_slower_machines(dataflow, ordered))
    return Sweep(dataflow.fingerprint, points, dataflow.job)


def cases_of(
    dataflow: Dataflow,
    machine: Machine,
    options: PlanningOptions,
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


def sizes_of(text: str, dataflow: Dataflow) -> tuple[str, Sequence[int]]:
    """The symbol and its sizes in `text`, as `s0=8,16`; `OptionError` where the step has none."""
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


def in_parallel(
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
