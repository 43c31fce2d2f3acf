"""The command line, `cotrain-compile`. Torch is loaded by the commands that compute, not by those
that read a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cotrain_compile import __version__, files, presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import CotrainError, FormatError, OptionError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.units import format_bytes
from cotrain_compile.viz.analysis import describe_analysis
from cotrain_compile.viz.describe import describe_machine, describe_step, describe_timeline
from cotrain_compile.viz.summary import summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Training steps that need more memory than the device has.",
)
# Lines are left for the terminal to wrap, so that a log can be searched.
console = Console(markup=False, highlight=False, soft_wrap=True)
_stderr = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: an error of ours is one line and exit code 1."""
    try:
        app()
    except CotrainError as error:
        _fail(str(error))
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say it.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps to train in all.")] = 80,
    output: Annotated[Path, typer.Option(help="Folder for what the demo leaves.")] = Path(
        "demo-output"
    ),
    budget: Annotated[
        str, typer.Option(help='Device memory: bytes, "128MiB", or "5%" of the device.')
    ] = "128MiB",
    machine: Annotated[
        str, typer.Option(help="Preset or machine.json whose rates the prediction uses.")
    ] = presets.THIS_MACHINE,
    resume: Annotated[bool, typer.Option(help="Go on where Ctrl-C stopped.")] = False,
) -> None:
    """Train a small GPT on Python's own sources in less memory than the step needs."""
    from cotrain_compile.demo.run import Settings, run

    settings = Settings(steps, output, budget, machine, resume)
    raise typer.Exit(run(settings, console))


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    device: Annotated[str, typer.Option(help="'cpu' (the emulated device) or 'cuda'.")] = "cpu",
) -> None:
    """Measure this computer, for better predictions: options={"machine": "machine.json"}."""
    from cotrain_compile.runtime.calibrate import calibrate as measure

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        result = measure(
            lambda what, done: bar.update(task, description=what, completed=done), device
        )
    files.save(result.machine, output)
    console.print(describe_machine(result.machine))
    for remark in result.remarks:
        console.print(f"- {remark}")
    console.print(f"saved {output}")


@app.command()
def machines() -> None:
    """The machines that a step can be planned for, and where their figures come from."""
    table = Table(box=None, pad_edge=False, show_lines=True)
    for heading in ("name", "device", "host", "source"):
        table.add_column(heading, no_wrap=heading != "source", overflow="fold")
    for name in (*presets.PRESETS, presets.THIS_MACHINE):
        machine = presets.find(name)
        sizes = [format_bytes(machine.tier(tier).capacity_bytes) for tier in Tier]
        table.add_row(name, *sizes, machine.source)
    console.print(table, soft_wrap=False)


class _Kind(NamedTuple):
    """A type that `show` reads, and how it is put into words."""

    type: type
    describe: Callable[[Any], str]


_KINDS: Mapping[str, _Kind] = {
    "plan": _Kind(Plan, summary),
    "dataflow": _Kind(Dataflow, describe_step),
    "machine": _Kind(Machine, describe_machine),
    "timeline": _Kind(Timeline, describe_timeline),
}


@app.command()
def trace(
    job: Annotated[str, typer.Argument(help="FILE.py:FUNCTION; its source is executed.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    dynamic: Annotated[bool, typer.Option(help="Keep batch and lengths as symbols.")] = False,
) -> None:
    """Capture the step that FUNCTION() returns with its arguments; nothing is allocated or run."""
    from cotrain_compile.compile import trace as capture
    from cotrain_compile.jobs import load_job

    with console.status("tracing"):
        dataflow = capture(load_job(job), dynamic=dynamic)
    files.save(dataflow, output)
    console.print(describe_step(dataflow))
    console.print(f"saved {output}")


@app.command()
def analyze(
    file: Annotated[Path, typer.Argument(help="step.json, from trace or from a dump.")],
    machine: Annotated[str, typer.Option(help="Preset or machine.json.")] = presets.THIS_MACHINE,
    memory_budget: Annotated[
        str, typer.Option(help='Device memory: bytes, "20GiB" or "80%".')
    ] = "100%",
) -> None:
    """Say what a step needs: its peak, what the host could take, reuse distances, largest sizes."""
    target = presets.find(machine)
    budget = Options.parse({"memory_budget": memory_budget}).memory_budget
    assert budget is not None
    budget_bytes = budget.of(target.device.capacity_bytes)
    console.print(describe_analysis(files.load(file, Dataflow), target, budget_bytes))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="plan.json, step.json or machine.json.")],
    timeline: Annotated[
        Path | None, typer.Option(help="Also draw the timeline of a plan into this PNG.")
    ] = None,
) -> None:
    """Say in words what a file holds."""
    kind = _KINDS[_kind_of(file)]
    value: object = files.load(file, kind.type)
    console.print(kind.describe(value))
    if timeline is not None:
        _draw(value, file, timeline)
        console.print(f"drew {timeline}")


def _kind_of(file: Path) -> str:
    """The kind of document in `file`. Raises `FormatError` when it is none of ours."""
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise FormatError(
            f"{file}: not a whole JSON document ({error}); make the file again"
        ) from None
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind not in _KINDS:
        raise FormatError(f"{file}: kind is {kind!r}; show reads {', '.join(_KINDS)}")
    return str(kind)


def _draw(value: object, file: Path, picture: Path) -> None:
    from cotrain_compile.viz.timeline import draw_timelines, kinds_of

    if isinstance(value, Timeline):
        draw_timelines([value], picture)
    elif isinstance(value, Plan):
        kinds = kinds_of(value, _phases_beside(file, value))
        budget_bytes = value.budgets[Tier.DEVICE]
        draw_timelines([value.predicted], picture, kinds=kinds, budget_bytes=budget_bytes)
    else:
        raise OptionError(f"{file} has no timeline; give --timeline with a plan.json")


def _phases_beside(file: Path, plan: Plan) -> Mapping[str, Any]:
    """Phases of the ops by name, from the step.json that a dump puts beside its plan.json."""
    beside = file.with_name("step.json")
    if not beside.is_file():
        return {}
    dataflow = files.load(beside, Dataflow)
    same = dataflow.fingerprint == plan.fingerprint
    return {op.name: op.phase for op in dataflow.ops} if same else {}
