"""Parameters: what several commands take, each with its help, and the machine they name.

Outputs: the files that a command is to write, looked at before there is anything to write.

In: each output with its flag, and what the command reads. Out: a refusal where one cannot be
written or would replace what is read; later, the flag of a file that could not be written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile import files, presets
from cotrain_compile.errors import OptionError
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
        help="How much to search for each plan: a unit is two to three seconds of one core, and "
        "the same everywhere."
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


# What a dump, or `solve` beside its step, leaves: it is read with a plan though nobody names it.
_BESIDE_A_PLAN = ("step.json", "machine.json", "profile.json")
# What only a write meets; every file of ours is named there (`files.write_whole`).
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_flags: dict[str, str] = {}


def refuse_outputs(
    outputs: Mapping[str, Path | None], reads: Iterable[str | os.PathLike[str] | None] = ()
) -> None:
    """Raise `OptionError` where an output, by its flag, cannot be written, is read or written
    otherwise, or should be read and is not there. `reads` may also have names that are of no file,
    such as those of presets.
    """
    named = [Path(name) for name in reads if name]
    read = [path for path in named if path.exists()]
    absent = [path for path in named if path.suffix and path not in read]  # not a preset's name
    asked = {flag: path for flag, path in outputs.items() if path is not None}
    written: dict[str, Path] = {}
    for flag, path in asked.items():
        if any(_are_one(path, other) for other in absent):
            raise OptionError(f"{path} is not there, and this command reads it")
        _flags[str(path)] = flag
        files.refuse_unwritable(path, flag)
        if any(_are_one(path, other) for other in read):
            raise OptionError(
                f"{flag} {path} is a file that this command reads, which would be lost; give "
                "another name"
            )
        for earlier, other in written.items():
            if _are_one(path, other):
                raise OptionError(
                    f"{flag} {path} is the file of {earlier}, too; give each its own name"
                )
        written[flag] = path


def refuse_output_folder(
    folder: Path, names: Iterable[str] = (), reads: Sequence[str | os.PathLike[str] | None] = ()
) -> None:
    """The same of the files called `names` in the folder of --output, which is made if need be."""
    _flags[str(folder)] = "--output"
    files.refuse_unwritable_folder(folder)
    for name in names:
        refuse_outputs({"--output": folder / name}, reads)


def with_those_beside(plan: Path) -> tuple[Path, ...]:
    """What is read of `plan`: itself, and what is beside it under its usual name."""
    return (plan, *(plan.with_name(name) for name in _BESIDE_A_PLAN))


def _are_one(one: Path, other: Path) -> bool:
    """Whether both are names of one file, through links too; a pipe or a device may be both."""
    if files.STANDARD in (str(one), str(other)):
        return False
    try:
        return os.path.samefile(one, other) and one.is_file()
    except (OSError, ValueError):  # one of them is not there yet, or no name of a file
        return os.path.realpath(one) == os.path.realpath(other)


def unwritten(error: OSError) -> str:
    """What to say of an error of the system: which file it was and, of an output, which flag."""
    told = error.strerror or str(error)
    if error.errno in _FULL and not error.filename:
        return f"{told}: standard output, or the folder of temporary files"
    if not error.filename:
        return told
    path = Path(os.fsdecode(error.filename))
    for place in (path, *path.parents):
        if flag := _flags.get(str(place)):
            return f"{flag} {path} cannot be written: {told}; make room there, or give another"
    return f"{path}: {told}"
