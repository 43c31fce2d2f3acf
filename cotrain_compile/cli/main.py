"""The command line, `cotrain-compile`.

Torch is loaded by the commands that trace or run a step, not by those that read or solve one; sympy
by those that look at steps with symbols.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.progress import Progress

from cotrain_compile import __version__, files, options, presets
from cotrain_compile.cli import look, option_list
from cotrain_compile.cli.cluster import cluster
from cotrain_compile.cli.flags import as_flags
from cotrain_compile.cli.graph import graph
from cotrain_compile.cli.machines import machines
from cotrain_compile.cli.solve import solve
from cotrain_compile.cli.sweep import sweep
from cotrain_compile.cli.terminal import (
    Json,
    console,
    keep_stdout_for,
    print_json,
    say_doing,
    speak,
)
from cotrain_compile.cli.trace import trace
from cotrain_compile.cli.work_order import PANELS, epilog
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import CotrainError
from cotrain_compile.options import Options
from cotrain_compile.viz.text.describe import describe_machine
from cotrain_compile.viz.text.terminal import PlainConsole

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan and run training steps that need more memory than the device has.",
)
_stderr = PlainConsole(stderr=True)


def main() -> None:
    """Entry point: an error of ours is one line and exit code 1."""
    try:
        app()
    except CotrainError as error:
        _fail(as_flags(str(error)))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(message: str) -> NoReturn:
    _stderr.print(f"error: {message}", style="red")
    sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cotrain-compile {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Say nothing but errors, and what --json asks for."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say also on stderr what is being done.")
    ] = False,
) -> None:
    speak(quiet=quiet, verbose=verbose)


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps to train in all.")] = 40,
    output: Annotated[Path, typer.Option(help="Folder for what the demo leaves.")] = Path(
        "demo-output"
    ),
    budget: Annotated[
        str, typer.Option(help='Device memory: bytes, "32MiB", or "5%" of the device.')
    ] = "32MiB",
    machine: Annotated[
        str, typer.Option(help="Preset or machine.json to plan for; else this computer, measured.")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where Ctrl-C stopped.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small GPT on Python's own sources in less memory than the step needs.

    Started by torchrun, several processes train it together.
    """
    from cotrain_compile.demo.run import run
    from cotrain_compile.demo.settings import Settings

    files.refuse_unwritable_folder(output)
    keep_stdout_for(False, Path(files.STANDARD) if as_json else None)
    code, outcome = run(Settings(steps, output, budget, machine, resume), console)
    if as_json and outcome is not None:
        print_json(outcome.figures)
    raise typer.Exit(code)


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    device: Annotated[
        options.Device, typer.Option(help="What to measure; cpu is the emulated device.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure this computer, for better predictions: options={"machine": "machine.json"}.

    Started by torchrun, also what the ranks reach when they exchange data.
    """
    from cotrain_compile.runtime.calibrate.calibrate import calibrate as measure
    from cotrain_compile.runtime.calibrate.network_bench import ranks_of_torchrun

    files.refuse_unwritable(output)
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
    files.save(result.machine, output)
    if as_json:
        print(files.to_json(result.machine), end="")
    console.print(describe_machine(result.machine))
    for remark in result.remarks:
        console.print(f"- {remark}")
    console.print(f"saved {output}")


def analyze(
    file: Annotated[Path, typer.Argument(help="step.json, from trace or from a dump.")],
    machine: Annotated[str, typer.Option(help="Preset or machine.json.")] = presets.THIS_MACHINE,
    memory_budget: Annotated[
        str, typer.Option(help='Device memory: bytes, "20GiB" or "80%".')
    ] = "100%",
    as_json: Json = False,
) -> None:
    """Say what a step needs: its peak, what the host could take, reuse distances, largest sizes."""
    from cotrain_compile.cli.analysis_figures import analysis_figures
    from cotrain_compile.viz.text.analysis import describe_analysis

    keep_stdout_for(as_json)
    target = presets.find(machine)
    budget = Options.parse({"memory_budget": memory_budget}).memory_budget
    assert budget is not None
    budget_bytes = budget.of(target.device.capacity_bytes)
    dataflow = files.load(file, Dataflow)
    if as_json:
        print_json(analysis_figures(dataflow, target, budget_bytes))
    else:
        console.print(describe_analysis(dataflow, target, budget_bytes))


_COMMANDS = (
    *(trace, analyze, solve, sweep, cluster, option_list.options),
    *(look.show, look.explain, look.diff, graph),
    *(machines, calibrate, demo),
)
_NAMED = {command.__name__: command for command in _COMMANDS}
for _name, _panel in PANELS.items():
    app.command(rich_help_panel=_panel, epilog=epilog(_name))(_NAMED[_name])
