"""Machines: the commands about computers: those that can be planned for, and the one at hand.

`machines` lists rates, `calibrate` measures this computer, `doctor` says what it can do for a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from cotrain_compile import files, presets
from cotrain_compile.cli.parameters import (
    DeviceMemory,
    HostMemory,
    LinkRate,
    refuse_outputs,
    with_changes,
)
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json, say_doing
from cotrain_compile.machine import Machine
from cotrain_compile.options import parts
from cotrain_compile.support.units import format_bytes
from cotrain_compile.viz.text.describe import describe_machine

_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float32")
_ROW = "{:15}{:>11}{:>6}{:>6}{:>6}{:>6}{:>6}{:>11}{:>6}{:>5}{:>5}{:>8}{:>6}"


def machines(
    name: Annotated[
        str, typer.Argument(help="Show all figures of this machine, and their sources.")
    ] = "",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    link: LinkRate = None,
    as_json: Json = False,
) -> None:
    """List the machines to plan for and their rates, or show one with its sources."""
    if name:
        target = with_changes(name, device_memory, host_memory, link)
        if as_json:
            print(files.to_json(target), end="")
        else:
            console.print(describe_machine(target))
    elif as_json:
        print(json.dumps({"machines": _documents()}, indent=1))
    else:
        for line in machine_lines():
            console.print(line)


def _documents() -> dict[str, object]:
    """What machine.json would have of each machine that has a name here."""
    names = (*presets.PRESETS, presets.THIS_MACHINE)
    return {name: json.loads(files.to_json(presets.find(name))) for name in names}


def machine_lines() -> Iterator[str]:
    """Memory, GB/s of it, Tflop/s by dtype; of the host the first two; link, updates, network."""
    above = ("device", "", "", "Tflop", "/s", "", "host", "", "link", "", "update", "ring")
    yield _ROW.format("", *above)
    heads = ("memory", "GB/s", "bf16", "fp16", "fp8", "fp32", "memory", "GB/s", "up", "down")
    yield _ROW.format("name", *heads, "GB/s", "GB/s")
    for name in (*presets.PRESETS, presets.THIS_MACHINE):
        yield _ROW.format(name, *_cells(presets.find(name)))
    yield "of a server (8xh100) what each of its ranks has: an equal share of the host"
    yield "rates as achieved; `cotrain-compile machines NAME` says where they come from"


def _cells(machine: Machine) -> Iterator[str]:
    device, host = machine.device, machine.host
    yield format_bytes(device.capacity_bytes)
    yield f"{device.bytes_per_s / 1e9:.0f}"
    for dtype in _DTYPES:
        rate = device.flops_per_s.get(dtype)
        yield "-" if rate is None else f"{rate / 1e12:.3g}" if rate < 1e15 else f"{rate / 1e12:.0f}"
    yield format_bytes(host.capacity_bytes)
    yield f"{host.bytes_per_s / 1e9:.0f}"
    for link in (machine.h2d, machine.d2h):
        yield f"{link.bytes_per_s / 1e9:.0f}"
    yield f"{machine.host_update.bytes_per_s / 1e9:.0f}"
    yield "-" if machine.network is None else f"{machine.network.bytes_per_s / 1e9:.0f}"


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The machine.json to write.")],
    device: Annotated[
        parts.Device, typer.Option(help="The device to measure; cpu is the emulated one.")
    ] = "cpu",
    disk: Annotated[
        Path | None, typer.Option(help="A folder, whose drive is measured as well.")
    ] = None,
    disk_tbw: Annotated[
        float | None,
        typer.Option(help="Terabytes that the drive is rated to have written (TBW)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this computer, in half a minute: options={"machine": "machine.json"}.

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
        drive = replace(measured_disk(disk, LONG_BYTES), rated_bytes=1e12 * (disk_tbw or 0.0))
        machine = machine.with_disk(drive)
    files.save(machine, output)
    if as_json:
        print(files.to_json(machine), end="")
    console.print(describe_machine(machine))
    for remark in result.remarks:
        console.print(f"- {remark}")
    console.print(f"saved {output}")


_WIDTH = 14


def doctor(as_json: Json = False) -> None:
    """Say what this computer can do, what a step will use of it, and what to change.

    Exit code 1 where something has to be changed before a step can run.
    """
    from cotrain_compile.runtime.examine import examine  # loads torch

    keep_stdout_for(as_json)
    findings = list(examine())
    if as_json:
        print_json({"findings": findings})
    for one in findings:
        console.print(f"{one.topic:{_WIDTH}}{one.found}", soft_wrap=True)
        if one.used:
            console.print(f"{'':{_WIDTH}}used: {one.used}", soft_wrap=True)
        if one.change:
            told = "to change" if one.prevents else "better"
            console.print(f"{'':{_WIDTH}}{told}: {one.change}", soft_wrap=True)
    if any(one.prevents for one in findings):
        raise typer.Exit(1)
