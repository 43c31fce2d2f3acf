"""Parameters: what several commands take, each with its help, and the machine they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile import presets
from cotrain_compile.machine import Machine
from cotrain_compile.options import parsers, parts

StepFile = Annotated[
    Path, typer.Argument(help="A step.json, written by `trace` or by the option dump.")
]
MachineName = Annotated[
    str, typer.Option(help="A preset, as `machines` lists them, or a machine.json.")
]

DeviceMemory = Annotated[
    str | None, typer.Option(help='Plan as if its device had this much memory: "24GiB".')
]
HostMemory = Annotated[
    str | None, typer.Option(help='Plan as if its host had this much memory: "128GiB".')
]
LinkRate = Annotated[
    str | None,
    typer.Option("--link", help='Plan as if the link moved this much a second each way: "48GB".'),
]
StepRanks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, help="Refuse a step that was traced for another number of ranks."
    ),
]

Policy = Annotated[
    str,
    typer.Option(help=f"One of {', '.join(parsers.POLICIES)}, or fraction:F with F from 0 to 1."),
]
WorkLimit = Annotated[
    float,
    typer.Option(
        help="How much to search for each plan: a unit is about a second of one core, and the same "
        "everywhere."
    ),
]
TimeLimit = Annotated[
    float, typer.Option(help="Seconds after which a search ends, however far it has come.")
]
Gap = Annotated[
    float, typer.Option(help="Stop when a plan is this close to the best possible: 0.005 is 0.5 %.")
]
Split = Annotated[
    parts.Split,
    typer.Option(help="Whether regions of the step, as its loss, may run in parts."),
]
Recompute = Annotated[
    parts.Recompute,
    typer.Option(help="Whether the plan may recompute activations; exact: with the same bits."),
]
MicroBatchOrder = Annotated[
    parts.MicroBatchOrder,
    typer.Option(help="Whether micro-batches run one after another, or layer by layer."),
]


def with_changes(
    name: str, device_memory: str | None, host_memory: str | None, link: str | None
) -> Machine:
    """The machine called `name`, with what the parameters of a command say otherwise."""
    changed = presets.with_changes(
        name, device_memory=device_memory, host_memory=host_memory, link=link
    )
    return presets.find(changed)
