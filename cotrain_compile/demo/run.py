"""Run: the demo from start to end. In: `Settings`. Out: text on a console and a folder of files.

1. This computer is measured.
2. What everything on the device, and each simple rule, would need: shown in bytes.
3. The first steps, by a plan from these rates; they say what each op takes.
4. The others, by a plan from these times, whose prediction is then judged.
5. The same steps in eager, from the same state.
6. What was planned, predicted and measured, and both losses side by side.

Where torchrun has started several processes, they train together, each within its own budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.computer import device_and_host, measured_computer
from cotrain_compile.demo.outcome import Outcome
from cotrain_compile.demo.progress import progress
from cotrain_compile.demo.report import name_the_files, report, show_rules, write_folder
from cotrain_compile.demo.settings import Settings
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
from cotrain_compile.errors import OptionError, StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Timeline
from cotrain_compile.runtime.calibrate.network_bench import ranks_of_torchrun
from cotrain_compile.support.units import format_bytes, format_rate, format_seconds

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


def run(settings: Settings, console: Console) -> tuple[int, Outcome | None]:
    """Run the demo; returns the exit code, and what it has found if it came so far."""
    with ranks_of_torchrun("cpu") as rank, device_and_host():
        if settings.resume and dist.is_initialized():
            raise OptionError("--resume goes on with a run of one process; start it without ranks")
        return _run(settings, console if rank == 0 else Console(quiet=True))


def _run(settings: Settings, console: Console) -> tuple[int, Outcome | None]:
    settings.output.mkdir(parents=True, exist_ok=True)
    text = standard_library()
    job = _job(settings, text)
    (first,) = steps_taken(job)
    if (least := first + settings.least_steps) > settings.steps:
        raise OptionError(
            f"{settings.checkpoint} is at step {first}: ask for at least {least} with --steps"
        )
    _say_what_it_is(job, text, console)

    console.print("\n1. This computer", style="bold")
    machine = _machine(settings, console)

    try:
        outcome = _train_by_plans(job, first, machine, settings, console)
    except KeyboardInterrupt:
        if dist.is_initialized():
            raise
        return _stopped(settings, job, console), None

    console.print("\n5. The same in eager, for comparison", style="bold")
    twin = _job(settings, text)
    eager: list[StepResult] = []
    try:
        _train(twin, training_step(twin), (first, settings.steps), console, "eager", eager)
    except KeyboardInterrupt:
        console.print("Comparison stopped; the training above is complete.")

    console.print("\n6. Result", style="bold")
    outcome = replace(outcome, eager=eager)
    report(console, outcome)
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_folder(settings.output, outcome)
        name_the_files(settings.output, console)
    return 0 if len(eager) == len(outcome.results) else INTERRUPTED, outcome


def _job(settings: Settings, text: torch.Tensor) -> Job:
    job = new_job(text, shape=settings.shape, rows=settings.rows, seed=settings.seed)
    if settings.resume:
        load_checkpoint(job, settings.checkpoint)
    return job


def _say_what_it_is(job: Job, text: torch.Tensor, console: Console) -> None:
    console.print(
        f"A character-level GPT with {job.parameters / 1e6:.1f} M parameters, AdamW, clipped "
        f"gradients.\nText: {len(text) / 1e6:.1f} M characters of Python's standard library.\n"
        f"The device is emulated: {torch.get_num_threads()} of this computer's cores, and a part "
        "of its RAM.",
    )
    if dist.is_initialized():
        console.print(
            f"{dist.get_world_size()} processes train it together (DistributedDataParallel, "
            f"{dist.get_backend()}), each within its own budget. What follows is rank 0's."
        )


def _machine(settings: Settings, console: Console) -> Path | str:
    """The machine to plan for: the one that is asked for, or this computer, measured now."""
    if settings.machine:
        console.print(f"not measured, as --machine {settings.machine} says what to plan for")
        return settings.machine
    with console.status("measuring ..."):
        machine, path = measured_computer(settings.output)
    device, link = machine.device, machine.h2d
    console.print(
        f"device      {device.flops_per_s['float32'] / 1e9:.0f} Gflop/s in float32, "
        f"{format_rate(device.bytes_per_s)} of memory\n"
        f"link        {format_rate(link.bytes_per_s)} each way between device and host, as "
        "slow beside\n            this device as a link may be beside a card; copies wait for it"
    )
    if network := machine.network:
        console.print(f"network     {format_rate(network.bytes_per_s)} between the processes")
    console.print(f"saved       {path}")
    return path


def _train_by_plans(
    job: Job, first: int, machine: Path | str, settings: Settings, console: Console
) -> Outcome:
    """All steps of the demo: some by a plan from the machine's rates, the others from times."""
    results: list[StepResult] = []
    budget = format_bytes(settings.budget_bytes(machine))
    console.print(f"\n2. {budget} on the device: what simple rules need", style="bold")
    timelines: list[Timeline] = []
    step = compiled(training_step(job), settings.options(machine))
    with console.status("tracing and planning the step ..."):
        results.extend(train(job, step, first, first + 1))
    placed = cotrain_compile.inspect(step)
    show_rules(console, placed)

    console.print("\n3. The first steps by a plan, each op timed", style="bold")
    measured = first + settings.measured_steps
    _train(job, step, (first + 1, measured), console, "measure", results, timelines)
    profile = settings.output / "profile.json"
    _save_profile(placed, timelines, profile)

    console.print("\n4. Planned again with these times", style="bold")
    again = settings.options(machine, profile=str(profile), dump=str(settings.output / "step"))
    step = compiled(training_step(job), again)
    with console.status("planning and compiling it again ..."):
        results.extend(train(job, step, measured, measured + 1))
    judged: list[Timeline] = []
    _train(job, step, (measured + 1, settings.steps), console, "train", results, judged)
    return Outcome(cotrain_compile.inspect(step), results, judged)


def _save_profile(placed: CompiledStep, timelines: Sequence[Timeline], path: Path) -> None:
    """What ops and updates of `placed` took; of several ranks, the first one's, which plans."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        files.save(measured_costs(timelines, placed.plan), path)
    if dist.is_initialized():
        dist.barrier()


def _train(
    job: Job,
    step: Step,
    steps: tuple[int, int],
    console: Console,
    title: str,
    results: list[StepResult],
    timelines: list[Timeline] | None = None,
) -> None:
    """Train from the first of `steps` up to the second, adding to `results` as it goes.

    Of a compiled step the measured `timelines` are added as well.
    """
    with progress(console, title, *steps) as show:
        for result in train(job, step, *steps):
            results.append(result)
            detail = f"loss {result.loss:.4f}  {format_seconds(result.seconds)}"
            if timelines is not None:
                placed = cotrain_compile.inspect(step)
                assert placed.measured is not None
                timelines.append(placed.measured)
                detail += f"  {_peak(placed)}"
            show(result.number + 1, detail)


def _peak(placed: CompiledStep) -> str:
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
