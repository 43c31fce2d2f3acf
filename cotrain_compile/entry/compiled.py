"""The registry of compiled steps: which `CompiledStep`s stand behind a user's step function.

Read by what looks at a step that runs: `inspect`, `report`, `synchronize`.

`scalars` gives what a step was predicted to take and took, for TensorBoard, W&B or another tracker.
`offload` takes what a step keeps on the card between two calls to the host, as before text is
generated with another engine; `reload`, or its next call, brings it back.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import wait_for_deferred
from cotrain_compile.capture.dynamo.hook import frame_objects
from cotrain_compile.capture.dynamo.settings import FrameObjects
from cotrain_compile.errors import CotrainError
from cotrain_compile.files import write_whole
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
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
    wait_for_deferred()


def last_run(origin: Origin) -> CompiledStep | None:
    """What ran last of this step function with these options."""
    own = [c for c, of in _compiled.items() if of.function == origin.function]
    found = [c for c in own if _compiled[c].options == origin.options and c.steps]
    return max(found, key=lambda compiled: compiled.last_run_s, default=None)


def planned_for_less(before: CompiledStep) -> int | None:
    """The device bytes that a step was planned for where its budget was not there; else None."""
    planned_bytes = before.problem.budgets[Tier.DEVICE]
    return planned_bytes if planned_bytes < before.plan.budgets[Tier.DEVICE] else None


def first_fingerprint(origin: Origin) -> str | None:
    """That of the step as the first trace of this function saw it, of those that still run."""
    found = (c for c, of in _compiled.items() if of.function == origin.function)
    same = (c for c in found if _compiled[c].options == origin.options)
    first = next(same, None)
    return None if first is None else first.problem.dataflow.fingerprint


def scalars(
    step: Callable[..., Any] | CompiledStep, tokens: float | None = None, prefix: str = ""
) -> dict[str, float]:
    """Seconds, bytes and counts of a compiled step, by name; with `tokens` a step their rates too.

    Seconds and peaks are predicted and, once the step has run, measured in its last run. There is
    no `mfu` where the machine's rates are too low for it (`Throughput.why_no_mfu`). Raises
    `CotrainError` as `inspect` does, ValueError where `tokens` is not above 0.
    """
    compiled = step if isinstance(step, CompiledStep) else inspect(step)
    found = _of_plan(compiled)
    if compiled.last_step_s is not None:
        found["measured_s"] = compiled.last_step_s
        for tier, nbytes in compiled.peak_bytes.items():
            found[f"{tier.value}_peak_bytes"] = nbytes
    if (guesses := compiled.guesses) is not None:
        found |= {"wrong_guesses_share": guesses.wrong_share, "guesses": float(guesses.is_open)}
    if tokens is not None:
        rates = compiled.throughput(tokens)
        found["tokens_per_s"] = rates.tokens_per_s
        if rates.mfu is not None:
            found["mfu"] = rates.mfu
    return {f"{prefix}{name}": value for name, value in found.items()}


def _of_plan(compiled: CompiledStep) -> dict[str, float]:
    plan, dataflow = compiled.plan, compiled.problem.dataflow
    again = [name for name in plan.placement.recomputed if name in dataflow.buffer]
    found: dict[str, float] = {
        "predicted_s": plan.predicted.makespan_s,
        "offloaded_bytes": plan.bytes_moved("offload"),
        "prefetched_bytes": plan.bytes_moved("prefetch"),
        "recomputed_bytes": sum(dataflow.buffer[name].nbytes for name in again),
        "host_updates": len(plan.host_updates),
        "steps": compiled.steps,
    }
    for tier in plan.tiers:
        found[f"{tier.value}_predicted_peak_bytes"] = plan.predicted.peak_bytes[tier]
        found[f"{tier.value}_budget_bytes"] = plan.budgets[tier]
    return found


# Of each step that was offloaded, which tensors: by identity, so that none is kept alive.
_offloaded: weakref.WeakKeyDictionary[CompiledStep, frozenset[int]] = weakref.WeakKeyDictionary()


def offload(step: Callable[..., Any], *, keep_parameters: bool = False) -> int:
    """Move parameters, buffers, gradients and optimizer states of a compiled step to the host.

    With `keep_parameters` only gradients and states, to go on with the model on the card. Returns
    the bytes that have left the card, which the allocator has given back to it; what libraries and
    compiled kernels hold stays. On the emulated device nothing moves, and 0 is returned.

    Raises `CotrainError` as `inspect` does, `HostMemoryError` where the host has no room: the next
    call then goes on as if nothing had been asked.
    """
    compiled = inspect(step)
    moved = compiled.rest_on(Tier.HOST, list(_kept(compiled, keep_parameters=keep_parameters)))
    _offloaded[compiled] = _offloaded.get(compiled, frozenset()) | frozenset(map(id, moved))
    return _nbytes(moved)


def reload(step: Callable[..., Any]) -> int:
    """Bring back what `offload` has moved, where it still belongs to the step; the bytes of it.

    Not needed before the next call of the step, which does so itself. Raises `CotrainError` as
    `inspect` does, and torch's out-of-memory error where the card has no room by now.
    """
    compiled = inspect(step)
    moved = _offloaded.pop(compiled, frozenset())
    back = [each for each in _kept(compiled, keep_parameters=False) if id(each) in moved]
    return _nbytes(compiled.rest_on(Tier.DEVICE, back))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages of `tensors`, each once."""
    storages = (each.untyped_storage() for each in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _kept(compiled: CompiledStep, *, keep_parameters: bool) -> Iterator[torch.Tensor]:
    """What the modules and optimizers of the step keep between two calls, each tensor once."""
    seen: set[int] = set()
    for each in _tensors(compiled, keep_parameters=keep_parameters):
        if id(each) not in seen:
            seen.add(id(each))
            yield each


def _tensors(compiled: CompiledStep, *, keep_parameters: bool) -> Iterator[torch.Tensor]:
    for owner in owners_of(compiled):
        if isinstance(owner, torch.nn.Module):
            parameters = list(owner.parameters(recurse=False))
            if not keep_parameters:
                yield from (*parameters, *owner.buffers(recurse=False))
            yield from (p.grad for p in parameters if p.grad is not None)
        else:
            for state in owner.state.values():
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))
