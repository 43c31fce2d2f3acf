"""Run: the demo from start to end. In: `Settings`. Out: text on a console and a folder of files.

1. Everything on the device does not fit the budget: shown in bytes.
2. The same step, placed by the integer program, trains within it.
3. The same steps in eager, from the same state.
4. What was planned, what each simple rule would have cost, what was measured, and both losses
   side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import cotrain_compile
from cotrain_compile import presets
from cotrain_compile.demo.model import Shape
from cotrain_compile.demo.progress import progress
from cotrain_compile.demo.report import report, write_folder
from cotrain_compile.demo.text import standard_library
from cotrain_compile.demo.train import (
    Job,
    Step,
    StepResult,
    compiled,
    load_checkpoint,
    new_job,
    save_checkpoint,
    steps_taken,
    train,
    training_step,
)
from cotrain_compile.errors import OptionError, PlacementError, StepFailed
from cotrain_compile.machine import Rates, Tier
from cotrain_compile.options import Options
from cotrain_compile.units import format_bytes, format_seconds

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


@dataclass(frozen=True)
class Settings:
    """What a user may choose; the rest is the size of the job."""

    steps: int = 40
    output: Path = Path("demo-output")
    budget: str = "128MiB"
    machine: str = presets.THIS_MACHINE
    resume: bool = False
    shape: Shape = field(default_factory=Shape)
    rows: int = 4
    seed: int = 0

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint.pt"


def run(settings: Settings, console: Console) -> int:
    """Run the demo; returns the exit code."""
    budget_bytes = _budget_bytes(settings)
    settings.output.mkdir(parents=True, exist_ok=True)
    text = standard_library()
    job = _job(settings, text)
    (first,) = steps_taken(job)
    if first >= settings.steps:
        raise OptionError(
            f"{settings.checkpoint} is at step {first} already; ask for more with --steps"
        )
    console.print(
        f"A character-level GPT with {job.parameters / 1e6:.1f} M parameters, AdamW, clipped "
        f"gradients.\nText: {len(text) / 1e6:.1f} M characters of Python's standard library.\n"
        f"Device memory budget: {format_bytes(budget_bytes)} ({budget_bytes:,} bytes). The device "
        "is emulated in RAM.",
    )
    console.print("\n1. Everything on the device", style="bold")
    _show_resident(settings, text, console)

    console.print("\n2. The same step, placed over device and host", style="bold")
    options = {**_options(settings), "dump": str(settings.output / "step")}
    step = compiled(training_step(job), options)
    results: list[StepResult] = []
    try:
        _train(job, step, first, settings, console, "train", results, lambda: _peak(step))
    except KeyboardInterrupt:
        return _stopped(settings, job, console)

    console.print("\n3. The same in eager, for comparison", style="bold")
    twin = _job(settings, text)
    eager: list[StepResult] = []
    try:
        _train(twin, training_step(twin), first, settings, console, "eager", eager, lambda: "")
    except KeyboardInterrupt:
        console.print("Comparison stopped; the training above is complete.")

    console.print("\n4. Result", style="bold")
    placed = cotrain_compile.inspect(step)
    report(console, placed, results, eager)
    if placed.plan.rates is Rates.GUESSED:
        console.print(
            "The prediction rests on guessed rates. To measure them: cotrain-compile calibrate -o "
            "machine.json,\nthen cotrain-compile demo --machine machine.json"
        )
    write_folder(settings.output, placed, results, eager)
    _name_the_files(settings.output, console)
    return 0 if len(eager) == len(results) else INTERRUPTED


def _budget_bytes(settings: Settings) -> int:
    budget = Options.parse(_options(settings)).memory_budget
    assert budget is not None
    return budget.of(presets.find(settings.machine).device.capacity_bytes)


def _job(settings: Settings, text: torch.Tensor) -> Job:
    job = new_job(text, shape=settings.shape, rows=settings.rows, seed=settings.seed)
    if settings.resume:
        load_checkpoint(job, settings.checkpoint)
    return job


def _options(settings: Settings) -> dict[str, Any]:
    return {"memory_budget": settings.budget, "machine": settings.machine, "quiet": True}


def _show_resident(settings: Settings, text: torch.Tensor, console: Console) -> None:
    # A job of its own: where the budget suffices after all, the call below trains it one step.
    job = new_job(text, shape=settings.shape, rows=settings.rows, seed=settings.seed)
    step = compiled(training_step(job), {**_options(settings), "policy": "resident"})
    try:
        with console.status("tracing and placing the step ..."):
            list(train(job, step, 0, 1))
    except PlacementError as error:
        console.print(f"refused, as it should be: {error}")
        console.print(f"shortfall: {error.shortfall_bytes:,} bytes")
    else:
        console.print(
            f"fits: device peak {_peak(step)}. Try a smaller --budget to see offloading.",
        )


def _train(
    job: Job,
    step: Step,
    first: int,
    settings: Settings,
    console: Console,
    title: str,
    results: list[StepResult],
    memory: Callable[[], str],
) -> None:
    """Train to `settings.steps`, adding to `results`, which keeps what was done if it stops."""
    with progress(console, title, first, settings.steps) as show:
        for result in train(job, step, first, settings.steps):
            results.append(result)
            detail = f"loss {result.loss:.4f}  {format_seconds(result.seconds)}  {memory()}"
            show(result.number + 1, detail.rstrip())


def _peak(step: Step) -> str:
    placed = cotrain_compile.inspect(step)
    assert placed.measured is not None
    peak, budget = placed.measured.peak_bytes[Tier.DEVICE], placed.plan.budgets[Tier.DEVICE]
    return f"device {format_bytes(peak)} of {format_bytes(budget)}"


def _stopped(settings: Settings, job: Job, console: Console) -> int:
    """What Ctrl-C leaves: a checkpoint after a whole number of steps, and how to go on."""
    counts = steps_taken(job)
    if len(counts) > 1:
        raise StepFailed(
            f"interrupted inside an update: some parameters have had {min(counts)} updates, others "
            f"{max(counts)}, so nothing was saved; start again from the last checkpoint"
        )
    (done,) = counts
    save_checkpoint(job, settings.checkpoint)
    console.print(
        f"\nInterrupted after step {done} of {settings.steps}. Every parameter has had exactly "
        f"{done} updates.\nSaved {settings.checkpoint}; go on with: cotrain-compile demo --resume "
        f"--steps {settings.steps} --output {settings.output}",
    )
    return INTERRUPTED


def _name_the_files(output: Path, console: Console) -> None:
    console.print(
        f"\nLook into {output}/\n"
        "  report.html             one page to look at: words, timelines, memory, parameters\n"
        "  timeline.png            predicted and measured, on one time axis\n"
        "  predicted.trace.json, measured.trace.json   the same, for https://ui.perfetto.dev\n"
        "  losses.csv              every step of both runs\n"
        "  step/summary.txt        the plan in words; step/plan.json: all of it\n"
        "  step/placed.py.txt      the step with its offloads, waits and host updates",
    )
