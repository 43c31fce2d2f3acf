"""The command line, `cotrain-compile`.

Its commands under their headings, each with examples.

Torch is loaded by the commands that trace or run a step, not by those that read or solve one; sympy
by those that look at steps with symbols.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from cotrain_compile import __version__
from cotrain_compile.cli.analyze import analyze
from cotrain_compile.cli.cluster import cluster
from cotrain_compile.cli.demo import demo
from cotrain_compile.cli.from_config import from_config
from cotrain_compile.cli.machines import calibrate, doctor, machines
from cotrain_compile.cli.option_list import options
from cotrain_compile.cli.outputs import unwritten
from cotrain_compile.cli.show import diff, explain, graph, show
from cotrain_compile.cli.solve import solve
from cotrain_compile.cli.sweep import sweep
from cotrain_compile.cli.terminal import as_flags, speak
from cotrain_compile.cli.trace import trace
from cotrain_compile.errors import CotrainError
from cotrain_compile.viz.text.terminal import PlainConsole

# Under which heading of the help a command stands, and how it is called.
PLAN, LOOK, MACHINE, TRY = "Plan", "Look at what was saved", "Machines", "Try it"

# Commands in the order in which somebody comes to need them, each with its heading.
PANELS: Mapping[str, str] = {
    "from-config": PLAN,
    "trace": PLAN,
    "analyze": PLAN,
    "solve": PLAN,
    "sweep": PLAN,
    "cluster": PLAN,
    "options": PLAN,
    "show": LOOK,
    "explain": LOOK,
    "diff": LOOK,
    "graph": LOOK,
    "doctor": MACHINE,
    "machines": MACHINE,
    "calibrate": MACHINE,
    "demo": TRY,
}

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "from-config": (
        "from-config ds_config.json",
        "from-config recipe.yaml --step step.json --machine rtx4090",
    ),
    "trace": (
        "trace job.py:step -o step.json",
        "trace job.py:step --machine rtx4090 --dynamic -o step.json",
        "trace llama/config.json --optimizer adamw --batch 4 --length 2048 -o step.json",
    ),
    "analyze": ("analyze step.json --machine rtx4090 --memory-budget 20GiB",),
    "solve": (
        "solve step.json --machine rtx4090 --memory-budget 20GiB -o plan.json",
        "solve step.json --memory-budget 16GiB --memory-budget 20GiB -o plan.json",
    ),
    "sweep": ("sweep step.json --machine rtx4090 --machine h100 -o sweep",),
    "cluster": (
        "cluster step.json --cluster 8xh100 --samples 64 -o cluster-plan.json",
        "cluster profile.json --cluster cluster.json --samples 64 --json",
    ),
    "options": ("options", "options --json > options.schema.json"),
    "show": (
        "show plan.json --html report.html",
        "show plan.json --timeline timeline.png --perfetto trace.json",
    ),
    "explain": ("explain plan.json layers.17.mlp.weight",),
    "diff": ("diff before.json after.json",),
    "graph": ("graph step.json --plan plan.json -o step.svg",),
    "doctor": ("doctor", "doctor --json"),
    "machines": ("machines", "machines rtx4090"),
    "calibrate": ("calibrate -o machine.json --device cuda",),
    "demo": ("demo", "demo --steps 60 --budget 48MiB"),
}


def epilog(command: str) -> str:
    """The examples of `command`; an empty line is what keeps two of them apart."""
    calls = [f"cotrain-compile {call}" for call in EXAMPLES[command]]
    return "\n\n".join(["Examples:" if len(calls) > 1 else "Example:", *calls])


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
        try:
            app()
        finally:
            _flush()
    except CotrainError as error:
        _fail(as_flags(str(error)))
    except OSError as error:
        _fail(unwritten(error))


def _flush() -> None:
    """Write what is printed; raise OSError that names standard output, here and not at the end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):  # Python would tell it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        raise


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
        typer.Option("--quiet", "-q", help="Print errors and JSON only."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also say on stderr what is being done.")
    ] = False,
) -> None:
    speak(quiet=quiet, verbose=verbose)


_COMMANDS = (
    *(from_config, trace, analyze, solve, sweep, cluster, options),
    *(show, explain, diff, graph),
    *(doctor, machines, calibrate, demo),
)
_NAMED = {command.__name__.replace("_", "-"): command for command in _COMMANDS}
for _name, _panel in PANELS.items():
    app.command(rich_help_panel=_panel, epilog=epilog(_name))(_NAMED[_name])
