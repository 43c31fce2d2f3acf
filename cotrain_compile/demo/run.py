"""Run: the demo from start to end. In: `Settings`. Out: text on a console and a folder of files.

1. This computer is measured.
2. What everything on the device, and each simple rule, would need: shown in bytes.
3. The first steps, by a plan from these rates; they say what each op takes.
4. The others, by a plan from these times, whose prediction is then judged.
5. The same steps in eager, from the same state.
6. What was planned, predicted and measured, and how far the losses are apart.

Where torchrun has started several processes, they train together, each within its own budget.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.demo.job import (
    DemoJob,
    Shape,
    Step,
    StepResult,
    compiled,
    new_job,
    standard_library,
    train,
    training_step,
)
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Link, Machine, Tier
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.plan import Timeline
from cotrain_compile.runtime.calibrate.calibrate import calibrate
from cotrain_compile.runtime.calibrate.first_use import QUICK
from cotrain_compile.runtime.calibrate.network_bench import ranks_here, ranks_of_torchrun
from cotrain_compile.support import limits
from cotrain_compile.support.units import format_bytes, format_rate, format_seconds
from cotrain_compile.viz.report.page import write_report
from cotrain_compile.viz.specification import specify
from cotrain_compile.viz.text.summary import summary
from cotrain_compile.viz.text.verdict import verdict, verdict_lines
from cotrain_compile.viz.timeline import draw_timelines

# Host and device of the emulated device are one memory, so a copy between them costs next to
# nothing. The demo's link is as slow beside the device's matmuls as a plan has to reckon with: a
# step takes longer to move all that it could than to compute.
FLOPS_PER_LINK_BYTE = 800
# An emulated copy takes that much however small it is: its thread is woken, and waits for Python.
LATENCY_S = 250e-6
# Steps whose ops are measured before the step is planned with their times; the first is left out.
MEASURED_STEPS = 8
LINES = 10


@dataclass(frozen=True)
class Settings:
    """What may be chosen. `machine` is a preset or a file, "" for this computer, measured.

    Raises `OptionError` where there are too few `steps` to measure some and to judge by others.
    """

    steps: int = 40
    output: Path = Path("demo-output")
    budget: str = "32MiB"
    machine: str = ""
    shape: Shape = field(default_factory=lambda: Shape(width=256, layers=4, heads=4))
    rows: int = 8
    seed: int = 0
    measured_steps: int = MEASURED_STEPS

    def __post_init__(self) -> None:
        # Those that are measured, one that holds the tracing, and one to judge by.
        least = self.measured_steps + 2
        if self.steps < least:
            raise OptionError(
                f"--steps is {self.steps}, but must be at least {least}: the first "
                f"{self.measured_steps} are measured, for a plan that the others run by"
            )

    def options(self, machine: Path | str, **more: Any) -> dict[str, Any]:
        """What the step is compiled with."""
        return {
            "memory_budget": self.budget,
            "machine": str(machine),
            "throttle": True,
            "poison": False,
            "quiet": True,
            **more,
        }


@dataclass(frozen=True)
class DemoOutcome:
    """All steps by plans and in eager; `timelines` are those that the last plan is judged by."""

    placed: CompiledStep
    results: Sequence[StepResult]
    timelines: Sequence[Timeline]
    eager: Sequence[StepResult]

    @property
    def seconds(self) -> list[float]:
        """What each of the last steps took."""
        return [result.seconds for result in self.results[-len(self.timelines) :]]

    @property
    def error(self) -> float:
        """How far the prediction is from the median of the last steps: 0.1 is 10 % above it."""
        return self.placed.predicted.makespan_s / statistics.median(self.seconds) - 1

    @property
    def typical(self) -> Timeline:
        """The step that half of the others are faster than."""
        by_time = sorted(self.timelines, key=lambda timeline: timeline.makespan_s)
        return by_time[len(by_time) // 2]

    @property
    def figures(self) -> dict[str, object]:
        """What the demo has found, as plain data."""
        placed = self.placed
        return {
            "policy": placed.plan.placement.policy,
            "budget_bytes": placed.plan.budgets,
            "predicted_s": placed.predicted.makespan_s,
            "measured_s": statistics.median(self.seconds),
            "error": self.error,
            "eager_s": statistics.median(result.seconds for result in self.eager[1:]),
            "predicted_peak_bytes": placed.predicted.peak_bytes,
            "measured_peak_bytes": self.typical.peak_bytes,
            "recomputed_values": len(placed.plan.placement.recomputed),
            "host_updates": len(placed.plan.host_updates),
            "losses": [result.loss for result in self.results],
            "eager_losses": [result.loss for result in self.eager],
        }


def run(settings: Settings, console: Console) -> DemoOutcome:
    """Run the demo and return what it has found."""
    with ranks_of_torchrun("cpu") as rank, device_and_host():
        settings.output.mkdir(parents=True, exist_ok=True)
        return _run(settings, console if rank == 0 else Console(quiet=True))


def _run(settings: Settings, console: Console) -> DemoOutcome:
    text = standard_library()
    job = new_job(text, shape=settings.shape, rows=settings.rows, seed=settings.seed)
    _say_what_it_is(job, console)
    console.print("\n1. This computer", style="bold")
    machine = _machine(settings, console)
    placed, results, timelines = _train_by_plans(job, machine, settings, console)

    console.print("\n5. The same in eager, for comparison", style="bold")
    twin = new_job(text, shape=settings.shape, rows=settings.rows, seed=settings.seed)
    eager, _ = _train(twin, training_step(twin), (0, settings.steps), console, "eager")

    console.print("\n6. Result", style="bold")
    outcome = DemoOutcome(placed, results, timelines, eager)
    _report(console, outcome)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write_folder(settings.output, outcome, console)
    return outcome


@contextmanager
def device_and_host() -> Iterator[None]:
    """Within it half of the cores of this rank are the device, so that the host has the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, limits.usable_core_count() // ranks_here() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say_what_it_is(job: DemoJob, console: Console) -> None:
    console.print(
        f"A character-level GPT with {job.parameters / 1e6:.1f} M parameters, AdamW, clipped "
        f"gradients.\nText: {len(job.text) / 1e6:.1f} M characters of Python's standard library.\n"
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
        found = calibrate(sizes=QUICK).machine
    link = Link(found.device.flops_per_s["float32"] / FLOPS_PER_LINK_BYTE, LATENCY_S)
    path = settings.output / "machine.json"
    machine = _of_the_first_rank(found.but(h2d=link, d2h=link, duplex=2.0), path)
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


def _of_the_first_rank(machine: Machine, path: Path) -> Machine:
    """What the first rank has measured, saved at `path`; every rank has to call it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        files.save(machine, path)
    if dist.is_initialized():
        dist.barrier()
    return files.load(path, Machine)


def _train_by_plans(
    job: DemoJob, machine: Path | str, settings: Settings, console: Console
) -> tuple[CompiledStep, list[StepResult], list[Timeline]]:
    """All steps of the demo: some by a plan from the machine's rates, the others from times."""
    step = compiled(training_step(job), settings.options(machine))
    with console.status("tracing and planning the step ..."):
        traced = list(train(job, step, 0, 1))
    placed = cotrain_compile.inspect(step)
    budget = format_bytes(placed.plan.budgets[Tier.DEVICE])
    console.print(f"\n2. {budget} on the device: what simple rules need", style="bold")
    _show_rules(console, placed)

    console.print("\n3. The first steps by a plan, each op timed", style="bold")
    measured = settings.measured_steps
    first, timelines = _train(job, step, (1, measured), console, "measure")
    profile = settings.output / "profile.json"
    _save_profile(placed, timelines, profile)

    console.print("\n4. Planned again with these times", style="bold")
    again = settings.options(machine, profile=str(profile), dump=str(settings.output / "step"))
    step = compiled(training_step(job), again)
    with console.status("planning and compiling it again ..."):
        retraced = list(train(job, step, measured, measured + 1))
    last, judged = _train(job, step, (measured + 1, settings.steps), console, "train")
    return cotrain_compile.inspect(step), [*traced, *first, *retraced, *last], judged


def _save_profile(placed: CompiledStep, timelines: Sequence[Timeline], path: Path) -> None:
    """What ops and updates of `placed` took; of several ranks, the first one's, which plans."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        files.save(measured_costs(timelines, placed.plan), path)
    if dist.is_initialized():
        dist.barrier()


def _train(
    job: DemoJob, step: Step, steps: tuple[int, int], console: Console, title: str
) -> tuple[list[StepResult], list[Timeline]]:
    """Train from the first of `steps` up to the second; with the timelines of a compiled step."""
    results: list[StepResult] = []
    timelines: list[Timeline] = []
    first, last = steps
    every = max(1, last // LINES)
    for result in train(job, step, first, last):
        results.append(result)
        done, said = result.number + 1, f"loss {result.loss:.4f}  {format_seconds(result.seconds)}"
        if title != "eager":
            placed = cotrain_compile.inspect(step)
            assert placed.measured is not None
            timelines.append(placed.measured)
            peak, budget = placed.measured.peak_bytes, placed.plan.budgets
            said += f"  device {format_bytes(peak[Tier.DEVICE])} of "
            said += format_bytes(budget[Tier.DEVICE])
        if done % every == 0 or done in (first + 1, last):
            console.print(f"{title} {done}/{last}  {said}")
    return results, timelines


def _show_rules(console: Console, placed: CompiledStep) -> None:
    """What everything on the device, and each simple rule, needs there beside the budget."""
    budget = placed.plan.budgets[Tier.DEVICE]
    table = Table("policy", "needs on the device", "")
    table.columns[1].justify = "right"
    for rule in RULES:
        try:
            plan = solve(placed.problem, SolveSettings(policy=rule))
        except PlacementError as error:
            short = format_bytes(error.shortfall_bytes)
            table.add_row(rule, format_bytes(budget + error.shortfall_bytes), f"{short} short")
        else:
            peak, a_step = plan.predicted.peak_bytes[Tier.DEVICE], plan.predicted.makespan_s
            table.add_row(rule, format_bytes(peak), f"fits, {format_seconds(a_step)} a step")
    console.print(table, soft_wrap=False)


def _report(console: Console, outcome: DemoOutcome) -> None:
    """Plan, memory and times, and how far the losses of both runs are apart."""
    placed, results, eager = outcome.placed, outcome.results, outcome.eager
    peak = max(timeline.peak_bytes[Tier.DEVICE] for timeline in outcome.timelines)
    predicted, budget = placed.predicted.peak_bytes[Tier.DEVICE], placed.plan.budgets[Tier.DEVICE]
    measured_s = statistics.median(outcome.seconds)
    eager_s = statistics.median(result.seconds for result in eager[1:])
    apart = max(abs(a.loss - b.loss) for a, b in zip(results, eager, strict=True))
    console.print(
        "\n".join(verdict_lines(verdict(placed.problem, placed.plan, [outcome.typical])))
        + f"\n\n{summary(placed.plan, placed.problem.dataflow)}\n"
        f"device      measured peak {peak:,} bytes, predicted {predicted:,}, budget {budget:,}\n"
        f"            {format_bytes(budget - peak)} to spare\n"
        f"predicted   {format_seconds(placed.predicted.makespan_s)} a step\n"
        f"measured    {format_seconds(measured_s)} a step, the median of {len(outcome.seconds)}; "
        f"off by {outcome.error:+.1%}\n"
        f"eager       {format_seconds(eager_s)} a step, with all it needs on the device\n"
        f"losses      from {results[0].loss:.4f} to {results[-1].loss:.4f}, at most {apart:.1e} "
        f"from eager's over {len(eager)} steps.\n"
        "            What may differ and why: the documentation's page Architecture, Exactness.",
    )


def _write_folder(folder: Path, outcome: DemoOutcome, console: Console) -> None:
    """Report and timelines, beside the step's own files, and a line for each file."""
    problem, plan = outcome.placed.problem, outcome.placed.plan
    timelines = (outcome.placed.predicted, outcome.typical)
    draw_timelines(specify(timelines, plan, problem.dataflow), folder / "timeline.png")
    write_report(folder / "report.html", problem, plan, [outcome.typical])
    console.print(
        f"\nLook into {folder}/\n"
        "  report.html             one page to look at: words, timelines, memory, parameters\n"
        "  timeline.png            predicted and measured, on one time axis\n"
        "  machine.json            this computer; profile.json: what each op took\n"
        "  step/summary.txt        the plan in words; step/plan.json: all of it\n"
        "  step/placed.py.txt      the step with its offloads, waits and host updates\n"
        "  step/predicted.trace.json   its timeline, for https://ui.perfetto.dev",
    )
