"""The registry of compiled steps: which `CompiledStep`s stand behind a user's step function.

Read by what looks at a step that runs: `inspect`, `report`, `synchronize`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import CodeType
from typing import Any

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import wait_for_tails
from cotrain_compile.capture.dynamo.hook import frame_objects
from cotrain_compile.capture.dynamo.session import FrameObjects
from cotrain_compile.errors import CotrainError
from cotrain_compile.files import write_whole
from cotrain_compile.options import Options
from cotrain_compile.plan import Placement
from cotrain_compile.support.units import format_bytes
from cotrain_compile.viz.text.live import LiveLine


@dataclass(frozen=True)
class Origin:
    """The step function that was compiled, and how. It keeps no tensor of the user's alive.

    `owners` are the modules and optimizers that the trace has met; `live` is the line of its run.
    """

    code: CodeType
    frame_objects: FrameObjects
    options: Options
    keeping_gradient: frozenset[int]
    owners: tuple[weakref.ref[Any], ...]
    live: LiveLine | None

    @property
    def function(self) -> tuple[CodeType, FrameObjects]:
        return self.code, self.frame_objects


_compiled: weakref.WeakKeyDictionary[CompiledStep, Origin] = weakref.WeakKeyDictionary()


def register(compiled: CompiledStep, origin: Origin) -> None:
    """Let `inspect` find `compiled`, for as long as something runs it."""
    _compiled[compiled] = origin


def owners_of(compiled: CompiledStep) -> list[Any]:
    """The modules and optimizers of a step, of those that are still alive."""
    return [owner for ref in _compiled[compiled].owners if (owner := ref()) is not None]


def newest() -> CompiledStep | None:
    """What ran last of all that is compiled."""
    return max(_compiled, key=lambda compiled: compiled.last_run_s, default=None)


def inspect(step: Callable[..., Any]) -> CompiledStep:
    """The `CompiledStep` behind a function compiled with this backend, after its first call.

    Where it was compiled more than once (another batch shape, a learning rate that became an
    input), the one that ran last. Raises `CotrainError` when there is none.
    """
    function: Any = getattr(step, "_torchdynamo_orig_callable", step)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    key = frame_objects(code, function.__closure__) if code is not None else ()
    found = [c for c, origin in _compiled.items() if origin.function == (code, key)]
    if not found:  # the same step made anew: the cells of its numbers are others
        of_objects = {c: _objects(o.frame_objects) for c, o in _compiled.items() if o.code is code}
        found = [c for c, objects in of_objects.items() if objects == _objects(key)]
    if not found:
        raise CotrainError(
            'this step has not been compiled yet: compile it with backend="cotrain" and call it '
            "once before inspecting it"
        )
    return max(found, key=lambda compiled: compiled.last_run_s)


def _objects(key: FrameObjects) -> FrameObjects:
    return tuple(entry for entry in key if entry[0] == "object")


@dataclass(frozen=True, repr=False)
class Report:
    """The page about a compiled step; a notebook shows it."""

    html: str

    def __repr__(self) -> str:
        return f"<Report, an HTML page of {format_bytes(len(self.html.encode()))}>"

    def _repr_html_(self) -> str:
        # A page of its own, so that its styles and those of the notebook stay apart.
        page = escape(self.html)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 50em; border: 0"></iframe>'


def report(step: Callable[..., Any], path: str | os.PathLike[str] | None = None) -> Report:
    """One HTML page about a compiled step: its plan, beside what it measured last.

    Written to `path`, if there is one; a notebook shows what is returned. Raises `CotrainError` as
    `inspect` does, OSError when `path` cannot be written.
    """
    # Bokeh takes a while to import, and is needed for reports alone.
    from cotrain_compile.viz.report.page import report_html

    compiled = inspect(step)
    measured = () if compiled.measured is None else (compiled.measured,)
    page = Report(report_html(compiled.problem, compiled.plan, measured))
    if path is not None:
        write_whole(Path(path), page.html)
    return page


def synchronize() -> None:
    """Wait until every compiled step has finished all its work.

    A step is complete when it returns, but for what the option `overlap_steps` lets go on under the
    next one. Raises `StepFailed` where that failed; it says what is left of the parameters.
    """
    wait_for_tails()


def last_placement(origin: Origin) -> Placement | None:
    """The placement of what ran last of this step function with these options."""
    found = [c for c, of in _compiled.items() if c.steps and of.function == origin.function]
    found = [c for c in found if _compiled[c].options == origin.options]
    newest = max(found, key=lambda compiled: compiled.last_run_s, default=None)
    return None if newest is None else newest.plan.placement


def first_fingerprint(origin: Origin) -> str | None:
    """That of the step as the first trace of this function saw it, of those that still run."""
    found = (c for c, of in _compiled.items() if of.function == origin.function)
    same = (c for c in found if _compiled[c].options == origin.options)
    first = next(same, None)
    return None if first is None else first.problem.dataflow.fingerprint
