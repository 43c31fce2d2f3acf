"""Parameters: what several commands take, each with its help, and the machine they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile import options, presets
from cotrain_compile.machine import Machine

StepFile = Annotated[Path, typer.Argument(help="step.json, from trace or from a dump.")]
MachineName = Annotated[str, typer.Option(help="Preset or machine.json.")]

DeviceMemory = Annotated[
    str | None, typer.Option(help='Of the machine, in place of what it has: "24GiB".')
]
HostMemory = Annotated[str | None, typer.Option(help="The same of its host.")]
LinkRate = Annotated[
    str | None, typer.Option("--link", help='Each way between the two, a second: "48GB".')
]
StepRanks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Of the step, which was traced for so many.")
]

Policy = Annotated[
    str,
    typer.Option(help=f"One of {', '.join(options.POLICIES)}, or fraction:F with F from 0 to 1."),
]
TimeLimit = Annotated[float, typer.Option(help="Seconds for each plan, all in all.")]
Gap = Annotated[float, typer.Option(help="Stop when this close to the bound: 0.005 is 0.5 %.")]
Recompute = Annotated[options.Recompute, typer.Option(help="Whether values may be made again.")]
MicroBatchOrder = Annotated[options.MicroBatchOrder, typer.Option(help="How micro-batches run.")]


def with_changes(
    name: str, device_memory: str | None, host_memory: str | None, link: str | None
) -> Machine:
    """The machine called `name`, with what the parameters of a command say otherwise."""
    changed = presets.with_changes(
        name, device_memory=device_memory, host_memory=host_memory, link=link
    )
    return presets.find(changed)
