"""Calibrate: the command that measures this computer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from cotrain_compile import files
from cotrain_compile.cli.outputs import refuse_outputs
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, say_doing
from cotrain_compile.options import parts
from cotrain_compile.viz.text.describe import describe_machine


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The machine.json to write.")],
    device: Annotated[
        parts.Device, typer.Option(help="The device to measure; cpu is the emulated one.")
    ] = "cpu",
    disk: Annotated[
        Path | None, typer.Option(help="A folder, whose drive is measured as well.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this computer, for better predictions: options={"machine": "machine.json"}.

    Under torchrun it also measures how fast the ranks exchange data.
    """
    from cotrain_compile.runtime.calibrate.calibrate import calibrate as measure
    from cotrain_compile.runtime.calibrate.disk_bench import LONG_BYTES, measured_disk
    from cotrain_compile.runtime.calibrate.network_bench import ranks_of_torchrun

    refuse_outputs({"--output": output})
    keep_stdout_for(as_json, output)
    with (
        ranks_of_torchrun(device) as rank,
        Progress(console=console, transient=True, disable=rank > 0 or console.quiet) as bar,
    ):
        task = bar.add_task("", total=1.0)

        def tell(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)
            say_doing(what)

        result = measure(tell, device)
    if rank > 0:
        return
    machine = result.machine
    if disk is not None:
        say_doing("reads and writes on the drive")
        machine = machine.with_disk(measured_disk(disk, LONG_BYTES))
    files.save(machine, output)
    if as_json:
        print(files.to_json(machine), end="")
    console.print(describe_machine(machine))
    for remark in result.remarks:
        console.print(f"- {remark}")
    console.print(f"saved {output}")
