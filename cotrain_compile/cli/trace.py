"""Trace: the dataflow of a step, from a user's file or from a model's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cotrain_compile import files
from cotrain_compile.cli.figures import step_figures
from cotrain_compile.cli.parameters import refuse_outputs
from cotrain_compile.cli.terminal import (
    Json,
    console,
    keep_stdout_for,
    print_json,
    saying_phases,
)
from cotrain_compile.errors import OptionError
from cotrain_compile.jobs import OptimizerName, Precision, is_file_job, load_job
from cotrain_compile.options import Options, parts
from cotrain_compile.viz.text.describe import describe_step

Job = Annotated[
    str,
    typer.Argument(
        help="FILE.py:FUNCTION, whose source is executed; or a language model's "
        "configuration: config.json, or a name on the Hugging Face Hub."
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The step.json to write, or - for stdout.")
]
Optimizer = Annotated[
    OptimizerName | None, typer.Option(help="Optimizer for a configuration; default: adamw.")
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences in a step, for a configuration; default: 1."),
]
Length = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens in a sequence, for a configuration; default: 2048."),
]
ModelPrecision = Annotated[
    Precision | None, typer.Option(help="Precision for a configuration; default: bf16-mixed.")
]
Dynamic = Annotated[
    bool, typer.Option(help="Keep batch and lengths as symbols, to plan for other sizes.")
]
TracedDevice = Annotated[
    parts.Device | None, typer.Option(help="Trace as on this device; cuda needs no GPU here.")
]
TracedMachine = Annotated[
    str | None, typer.Option(help="Trace as on the GPU of this preset or machine.json.")
]
Checkpoints = Annotated[
    parts.Checkpoints,
    typer.Option(help="Keep to torch.utils.checkpoint, or let the plan decide."),
]
Ranks = Annotated[int, typer.Option(min=1, help="Trace as the first of so many ranks.")]


def trace(
    job: Job,
    output: Output,
    optimizer: Optimizer = None,
    batch: Batch = None,
    length: Length = None,
    precision: ModelPrecision = None,
    dynamic: Dynamic = False,
    device: TracedDevice = None,
    machine: TracedMachine = None,
    checkpoints: Checkpoints = "respect",
    ranks: Ranks = 1,
    as_json: Json = False,
) -> None:
    """Capture a training step, a file's or a model's; nothing is allocated or run.

    A FUNCTION returns the step and a tuple of its arguments. For a configuration the step is the
    usual one: next-token loss, gradients clipped to a norm of 1, then the optimizer.
    """
    from cotrain_compile.entry.tracing import trace as capture
    from cotrain_compile.viz.text.narrate import phase_line

    refuse_outputs({"--output": output}, (job.rpartition(":")[0], job, machine))
    keep_stdout_for(as_json, output)
    with phase_line(Options(quiet=console.quiet), f"reading {job}"), saying_phases():
        dataflow = capture(
            _build(job, optimizer, batch, length, precision),
            dynamic=dynamic,
            device=device,
            machine=machine,
            checkpoints=checkpoints,
            ranks=ranks,
        )
    files.save(dataflow, output)
    if as_json:
        print_json(step_figures(dataflow))
    else:
        console.print(describe_step(dataflow))
        if str(output) != files.STANDARD:
            console.print(f"saved {output}")


def _build(
    job: str,
    optimizer: OptimizerName | None,
    batch: int | None,
    length: int | None,
    precision: Precision | None,
) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What builds the step of `job`, as its kind is."""
    if not is_file_job(job):
        from cotrain_compile.jobs.config_job import config_job

        return config_job(
            job,
            optimizer=optimizer or "adamw",
            batch=batch or 1,
            length=length or 2048,
            precision=precision or "bf16-mixed",
        )
    told = {"optimizer": optimizer, "batch": batch, "length": length, "precision": precision}
    if given := [f"--{name}" for name, value in told.items() if value is not None]:
        raise OptionError(
            f"{' and '.join(given)}: for configurations only; what {job} trains stands in its file"
        )
    return load_job(job)
