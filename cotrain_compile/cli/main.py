"""The command line, `cotrain-compile`.

Torch is loaded by the commands that trace or run a step, not by those that read or solve one; sympy
by those that look at steps with symbols.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from cotrain_compile import __version__
from cotrain_compile.cli.analyze import analyze
from cotrain_compile.cli.calibrate import calibrate
from cotrain_compile.cli.cluster import cluster
from cotrain_compile.cli.demo import demo
from cotrain_compile.cli.diff import diff
from cotrain_compile.cli.doctor import doctor
from cotrain_compile.cli.explain import explain
from cotrain_compile.cli.flags import as_flags
from cotrain_compile.cli.from_config import from_config
from cotrain_compile.cli.graph import graph
from cotrain_compile.cli.machines import machines
from cotrain_compile.cli.option_list import options
from cotrain_compile.cli.outputs import unwritten
from cotrain_compile.cli.show import show
from cotrain_compile.cli.solve import solve
from cotrain_compile.cli.sweep import sweep
from cotrain_compile.cli.terminal import speak
from cotrain_compile.cli.trace import trace
from cotrain_compile.cli.work_order import PANELS, epilog
from cotrain_compile.errors import CotrainError
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
