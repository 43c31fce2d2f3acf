"""The command line, `cotrain-compile`.

Its commands under their headings, each with examples.

Torch is loaded by the commands that trace or run a step, not by those that read or solve one; sympy
by those that look at steps with symbols.

Option list: what `options={...}` may hold, as a table or as a JSON schema.

Demo: the command that trains a small GPT in less memory than its step needs.

Analyze: the command that says what a step needs, in words or as figures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from cotrain_compile import __version__, files, presets
from cotrain_compile.cli.cluster import cluster
from cotrain_compile.cli.figures import step_figures
from cotrain_compile.cli.from_config import from_config
from cotrain_compile.cli.machines import calibrate, doctor, machines
from cotrain_compile.cli.parameters import MachineName, StepFile, refuse_output_folder, unwritten
from cotrain_compile.cli.show import diff, explain, graph, show
from cotrain_compile.cli.solve import solve
from cotrain_compile.cli.sweep import sweep
from cotrain_compile.cli.terminal import Json, as_flags, console, keep_stdout_for, print_json, speak
from cotrain_compile.cli.trace import trace
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options, options_schema
from cotrain_compile.viz.text.terminal import PlainConsole


def options(as_json: Json = False) -> None:
    """List the options of a compiled step; with --json as a JSON schema, for an editor."""
    keep_stdout_for(as_json)
    schema = options_schema()
    if as_json:
        print_json(schema)
        return
    table = Table("option", "may be", "default", "what it is for", box=None, pad_edge=False)
    for name, told in schema["properties"].items():
        default = told["default"]
        shown = "" if default in (None, []) else str(default)
        table.add_row(name, _may_be(told), shown, told["description"])
    console.print(table, soft_wrap=False)
    console.print("The documentation's page Options says more of each.")


def _may_be(told: Mapping[str, Any]) -> str:
    """The choices of an option, or its types."""
    if "enum" in told:
        return ", ".join(told["enum"])
    types = [_may_be(one) for one in told.get("anyOf", ())] or [
        "path" if told.get("format") == "path" else str(told.get("const", told.get("type", "")))
    ]
    return " or ".join(dict.fromkeys(types))


def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 40,
    output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("demo-output"),
    budget: Annotated[
        str, typer.Option(help='Device memory to keep to: bytes, "32MiB", or "5%" of the device.')
    ] = "32MiB",
    machine: Annotated[
        str,
        typer.Option(
            help="Plan for this preset or machine.json instead of measuring this computer."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Train a small GPT on Python's own sources in less memory than the step needs.

    Under torchrun, several processes train it together.
    """
    from cotrain_compile.demo.run import Settings, run

    refuse_output_folder(output)
    keep_stdout_for(False, Path(files.STANDARD) if as_json else None)
    outcome = run(Settings(steps, output, budget, machine), console)
    if as_json:
        print_json(outcome.figures)


def analyze(
    file: StepFile,
    machine: MachineName = presets.THIS_MACHINE,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help='Device memory to fit into: bytes, "20GiB" or "80%". '
            "Default: what a card leaves to a step."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a step needs: its peak, its time, reuse distances, largest sizes."""
    from cotrain_compile.viz.text.analysis import analysis_figures, describe_analysis  # sympy

    keep_stdout_for(as_json)
    target = presets.find(machine)
    asked = {"memory_budget": memory_budget} if memory_budget else {}
    budget_bytes = Options.parse(asked).budgets(target)[Tier.DEVICE]
    dataflow = files.load(file, Dataflow)
    if as_json:
        figures = analysis_figures(dataflow, target, budget_bytes)
        print_json({**step_figures(dataflow), **figures})
    else:
        console.print(describe_analysis(dataflow, target, budget_bytes))


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
