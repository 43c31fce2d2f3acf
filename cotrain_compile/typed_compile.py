"""Typed compile: `torch.compile(step, backend="cotrain")` with every option as a keyword.

An editor completes the keywords and a type checker reads their types; their values are checked by
the call itself. `Keywords` has the names of `Options`, which a test compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_type_hints, overload

import torch
from torch import nn

from cotrain_compile.compile_step import cotrain
from cotrain_compile.errors import CotrainError, OptionError
from cotrain_compile.options import (
    Checkpoints,
    Device,
    HostKernels,
    Lowering,
    MicroBatchOrder,
    OnBreak,
    Options,
    Recompute,
    RestsOn,
    Solver,
    Speculate,
)

P = ParamSpec("P")
R = TypeVar("R")


class Keywords(TypedDict, total=False):
    """The options and their types; `docs/options.md` says what each does. What is left out is as
    in `Options`.
    """

    memory_budget: int | float | str  # bytes on the device, "20GiB" or "80%"
    host_memory_budget: int | float | str  # the same on the host
    device: Device  # where the step computes; else where the model lives
    policy: str  # "auto", a rule or a solver
    rests_on: RestsOn  # where parameters and states are between two calls
    plan: str | PathLike[str]  # a file with the plan to use
    plan_cache: bool  # keep plans on disk for the next process
    solver: Solver
    time_limit: float  # seconds until there is a plan
    gap: float  # a fraction: as near to the bound counts as solved
    seed: int  # of the solver
    overlap_steps: bool  # updates on the host may go on under the next step
    speculate: Speculate  # updates on the host may begin before the norm is known
    recompute: Recompute  # whether the plan may make values again
    checkpoints: Checkpoints  # whether the step's own checkpoints are followed
    micro_batch_order: MicroBatchOrder
    lowering: Lowering  # whether device ops are compiled
    inductor: Mapping[str, Any]  # settings of torch._inductor.config
    eager_segments: Sequence[str]  # segments that are not compiled, by name or pattern
    remat: bool  # make cheap values again, as torch.compile does
    host_kernels: HostKernels  # how updates on the host run
    host_cores: Sequence[int]  # the cores they run on
    keep_grads: bool  # keep p.grad after the step
    on_break: OnBreak  # what to do with a step that cannot be captured
    dump: str | PathLike[str]  # a folder for graph, plan and report
    quiet: bool  # say nothing while compiling
    live: bool | float  # one line about the run, every so many seconds
    machine: str | PathLike[str]  # a preset or a file of `cotrain-compile calibrate`
    throttle: bool  # copies take as long as the machine's links say
    timeline: bool  # time every op and copy on a card
    poison: bool  # fill what a copy has not yet written with NaN
    profile: str | PathLike[str]  # a file with measured times of this step
    verify: int  # steps that are compared with the step without its plan
    watchdog_s: float | Literal[False]  # seconds after which a copy or an update is given up


@overload
def compile(
    step: Callable[P, R], *, dynamic: bool | None = ..., **options: Unpack[Keywords]
) -> Callable[P, R]: ...


@overload
def compile(
    *, dynamic: bool | None = ..., **options: Unpack[Keywords]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def compile(step: Any = None, *, dynamic: bool | None = None, **options: Unpack[Keywords]) -> Any:
    """`step`, a function that is a whole training step, planned over device and host memory.

        step = cotrain_compile.compile(step, memory_budget="20GiB")

    It is `torch.compile(step, backend="cotrain", options={...})`; `dynamic` is torch's own. Without
    `step` it is a decorator: `@cotrain_compile.compile(memory_budget="20GiB")`. Raises
    `OptionError` at once for an unknown option, a bad value or a file that is not there, and
    `FormatError` for a file that is not what it should be. `docs/options.md` describes the options.
    """
    if isinstance(step, nn.Module) or not (step is None or callable(step)):
        raise OptionError(
            f"compile() got {_described(step)}, but needs the function that runs a whole training "
            "step: the one that calls the model, backward() and optimizer.step()"
        )
    given: dict[str, Any] = {**options}
    try:
        return torch.compile(step, backend=cotrain, dynamic=dynamic, options=given)
    except CotrainError as error:
        raise error.with_traceback(None) from None


def _described(value: object) -> str:
    name = type(value).__name__
    return f"the module {name}" if isinstance(value, nn.Module) else repr(value)


def _signature() -> inspect.Signature:
    """That of `compile`, with the options spelled out for `help` and notebooks."""
    given = [p for p in inspect.signature(compile).parameters.values() if p.name != "options"]
    types = get_type_hints(Keywords)
    options = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=types[item.name],
        )
        for item in fields(Options)
    ]
    return inspect.Signature([*given, *options], return_annotation=Callable)


compile.__signature__ = _signature()  # type: ignore[attr-defined]
