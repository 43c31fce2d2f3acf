"""Narrate: what compiling a step says, on one ladder from nothing to every transfer.

0 is silent, 1 a summary of a screen, 2 adds how each parameter is kept, 3 what each pass changes in
the graph, 4 every task with its predicted times. `COTRAIN_DEBUG` in the environment chooses;
without it the option `quiet` and the level of the logger do, between 0 and 2. All is said by the
logger `cotrain_compile`, which writes on stderr; off a terminal lines are plain.

What is going on of a first step, and since when (`phase_line`), is on a terminal one line, which
goes at the end. Elsewhere it is a line of the log for what takes long, so that a log of a busy
computer does not look like one of a process that hangs.

Log: what is said while a step is compiled goes through Python's `logging`, as a library's does.

The logger is `cotrain_compile`, its level INFO unless somebody has set another. Its handler writes
records on stderr as they are, above the bars of tqdm, unless `TORCH_LOGS` or the program has given
the logger one before; a program that wants them among its own sets `propagate = True`.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.graph import StepGraph
from cotrain_compile.options.parts import OutputOptions
from cotrain_compile.placement.explain.explain import every_strategy
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.wear import wear
from cotrain_compile.plan import Plan, Transfer
from cotrain_compile.support.phases import is_listened, tell_phase, told_to
from cotrain_compile.support.plan_words import plan_words
from cotrain_compile.support.units import format_bytes, format_seconds, printable
from cotrain_compile.viz.kinds import lane_titles
from cotrain_compile.viz.text.summary import WHERE, order_words, recompute_words, search_words
from cotrain_compile.viz.text.terminal import PlainConsole

VARIABLE = "COTRAIN_DEBUG"
SUMMARY, PARAMETERS, PASSES, TASKS = 1, 2, 3, 4
_BAR = 24


def verbosity(options: OutputOptions) -> int:
    """How much to say, 0 to 4; raises `OptionError` when the environment says anything else."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return 0 if options.quiet else _of_level(LOG.getEffectiveLevel())
    if asked not in map(str, range(TASKS + 1)):
        raise OptionError(f"{VARIABLE} is {asked!r}, but must be a number from 0 to {TASKS}")
    return int(asked)


def _of_level(level: int) -> int:
    if level > INFO:
        return 0
    return SUMMARY if level == INFO else PARAMETERS


@dataclass(frozen=True)
class Narrator:
    """Tells the logger what `level` allows."""

    level: int

    @property
    def observer(self) -> Callable[[str, StepGraph, StepGraph], None] | None:
        """Says what each pass has changed; None where that is not to be said."""
        return self._observe if self.level >= PASSES else None

    def _observe(self, name: str, before: StepGraph, after: StepGraph) -> None:
        say(map(Text, pass_lines(name, _body(before), _body(after))))

    def tell(self, problem: Problem, plan: Plan) -> None:
        """Say what the plan is."""
        if self.level >= SUMMARY:
            rows = summary_rows(plan, problem.dataflow, bars=on_a_terminal())
            worn = wear(problem, plan)
            rows = itertools.chain(rows, [("wear", worn.words)] if worn is not None else [])
            say(itertools.starmap(_row, rows))
        if self.level >= PARAMETERS:
            kept = map(Text, parameter_lines(problem, plan))
            say([_row("step", plan.fingerprint), *kept])
        if self.level >= TASKS:
            say(map(Text, task_lines(plan)))

    def tell_again(self, why: str) -> None:
        """Say why a step that has a graph gets another."""
        if self.level >= SUMMARY:
            say([_row("again", f"the step is compiled again: {why}")])

    def tell_surplus(self, plan: Plan) -> None:
        """Say what the dry run of `plan` has added to its notes."""
        if self.level >= SUMMARY:
            say([_row("dry run", plan.notes[-1])])


def _row(heading: str, words: str) -> Text:
    return Text.assemble((f"{heading:11}", "bold"), printable(words))


def summary_rows(plan: Plan, dataflow: Dataflow, *, bars: bool) -> Iterator[tuple[str, str]]:
    """Heading and words of each line of the summary of a plan for the step `dataflow`.

    `bars` draws how full the tiers are.
    """
    step_s = plan.predicted.makespan_s
    yield "cotrain", f"{plan_words(plan.placement.policy)} on {plan.on_machine}"
    for note in plan.notes:
        yield "", note
    yield "a step", f"{format_seconds(step_s)} {plan.foreseen}"
    if plan.tasks and plan.report:
        yield "search", search_words(plan.report)
    for tier in plan.tiers:
        peak, budget = plan.predicted.peak_bytes[tier], plan.budgets[tier]
        bar = f"{_bar(peak / budget)}  " if bars else ""
        yield tier.value, f"{bar}{format_bytes(peak)} of {format_bytes(budget)} at the peak"
    for told in order_words(plan, dataflow):
        yield "order", told
    for told in recompute_words(plan, dataflow):
        yield "recomputes", told
    if not plan.tasks:
        yield "moves", "nothing: everything fits on the device"
        return
    down, up = plan.bytes_moved("offload"), plan.bytes_moved("prefetch")
    yield "moves", f"{format_bytes(down)} down, {format_bytes(up)} up in each step"
    modes = Counter(WHERE[mode] for mode in plan.placement.updates.values())
    if modes:  # none in a call that only adds gradients up
        yield "updates", ", ".join(f"{count} {mode}" for mode, count in modes.items())
    busy = (
        f"{title} {plan.predicted.busy_s(lane) / step_s:.0%}"
        for lane, title in lane_titles(plan.predicted).items()
    )
    yield "busy", ", ".join(busy)


def parameter_lines(problem: Problem, plan: Plan) -> Iterator[str]:
    """How each parameter is kept, and what leaves the device between its uses."""
    strategies, on_disk = (
        every_strategy(problem, plan.placement),
        {*plan.placement.offloaded_to_disk},
    )
    for param in plan.placement.updates:
        kept = strategies[param].words
        nbytes = problem.dataflow.buffer[param].nbytes
        yield f"  {format_bytes(nbytes):>10}  {param}: {kept}"
    for name in plan.placement.offloaded:
        nbytes = problem.dataflow.buffer[name].nbytes
        where = " to disk" if name in on_disk else ""
        yield f"  {format_bytes(nbytes):>10}  {name}: offloaded{where} between its uses"


def task_lines(plan: Plan) -> Iterator[str]:
    """Every task in the order of issue: when it runs, what it moves, what waits for it."""
    spans = {span.name: span for span in plan.predicted.spans}
    for task in plan.tasks:
        span = spans[task.name]
        when = f"{format_seconds(span.start_s)} to {format_seconds(span.end_s)}"
        size = f" {format_bytes(task.nbytes)}" if isinstance(task, Transfer) else ""
        issued = f"after {task.issue_after}" if task.issue_after else "at the start"
        awaited = f"before {task.wait_before}" if task.wait_before else "at the end"
        yield f"  {task.lane.value:5} {task.name}{size}: {when}, issued {issued}, awaited {awaited}"


def pass_lines(name: str, before: str, after: str) -> Iterator[str]:
    """What the pass `name` made of the text of a graph, as a unified diff."""
    lines = list(
        difflib.unified_diff(
            before.splitlines(),
            after.splitlines(),
            f"before {name}",
            f"after {name}",
            "",
            "",
            1,
            "",
        )
    )
    if not lines:
        yield f"pass {name}: no change"
    yield from lines


def _body(step: StepGraph) -> str:
    """The text of a graph without the name of its class, which a copy changes."""
    return "\n".join(line for line in step.text().splitlines() if not line.startswith("class "))


def _bar(share: float) -> str:
    full = round(_BAR * min(1.0, share))
    return "[" + "#" * full + "." * (_BAR - full) + "]"


# Seconds from one line of a log to the next.
EVERY_S = 10.0


@contextmanager
def phase_line(
    options: OutputOptions, phase: str, console: Console | None = None
) -> Iterator[None]:
    """Show `phase`, and those told inside, each with the seconds since it began.

    Where stderr is no terminal the logger is told every `EVERY_S` seconds; nothing is shown where
    `options` ask for silence. In another such line the phase is told there.
    """
    if is_listened():
        tell_phase(phase)
        yield
        return
    console = console or PlainConsole(stderr=True)
    if not verbosity(options):
        yield
        return
    if not console.is_terminal:
        with _logged(phase):
            yield
        return
    columns = (SpinnerColumn(), TextColumn("cotrain: {task.description}"), TimeElapsedColumn())
    with above_bars(), Progress(*columns, console=console, transient=True) as line:
        task = line.add_task(phase)

        def show(told: str) -> None:
            nonlocal phase
            if not _is_stage(told, phase):
                line.reset(task)
            phase = told
            line.update(task, description=phase)

        with told_to(show):
            yield


@contextmanager
def _logged(phase: str) -> Iterator[None]:
    """Tell the logger every so often what is going on."""
    began_s, ended = time.monotonic(), threading.Event()

    def note(told: str) -> None:
        nonlocal phase, began_s
        if not _is_stage(told, phase):
            began_s = time.monotonic()
        phase = told

    def tell() -> None:
        while not ended.wait(EVERY_S):
            LOG.info("cotrain: %s, %d s", phase, time.monotonic() - began_s)

    thread = threading.Thread(target=tell, name="cotrain-phases", daemon=True)
    thread.start()
    try:
        with told_to(note):
            yield
    finally:
        ended.set()
        thread.join()


def _is_stage(told: str, phase: str) -> bool:
    """Whether the clock of `phase` goes on: what is behind a colon is a stage of it."""
    return told.partition(":")[0] == phase.partition(":")[0]


LOG = logging.getLogger("cotrain_compile")


def say(lines: Iterable[Text]) -> None:
    """Tell the logger `lines` as one record; on a terminal they keep their style."""
    if text := Text("\n").join(lines):
        LOG.info("%s", text)


def on_a_terminal() -> bool:
    """Whether what is said is read on a terminal, which has room for a bar."""
    return PlainConsole(stderr=True).is_terminal


@contextmanager
def above_bars() -> Iterator[None]:
    """Within it, the bars of tqdm are off the terminal; after it they are drawn again."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        yield
        return
    # Without its lock: what goes on inside may take minutes, and other threads may have bars.
    with tqdm.external_write_mode(file=sys.stderr, nolock=True):
        yield


class _OnStderr(logging.Handler):
    """Writes a record as it is; stderr is looked up anew, as a program may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        if LOG.propagate:
            return  # the program's own handlers have it
        said = record.args[0] if isinstance(record.args, tuple) and record.args else None
        with above_bars():
            PlainConsole(stderr=True).print(said if isinstance(said, Text) else self.format(record))


if not LOG.level:
    LOG.setLevel(logging.INFO)
if not LOG.handlers:
    LOG.addHandler(_OnStderr())
    LOG.propagate = False
