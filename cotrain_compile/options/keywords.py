"""Option keywords: the names and types of all options, for editors, type checkers and schemas.

`Keywords` has the names of `Options`, which a test compares. Values are checked by `Options.parse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from typing import Any, Literal, TypedDict, get_type_hints

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
    work_limit: float  # what a search may do, in about seconds of one core
    time_limit: float  # seconds until there is a plan, whatever is done
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
    check_replicas: int  # ranks compare their parameters every so many steps
    watchdog_s: float | Literal[False]  # seconds after which a copy or an update is given up


def options_schema() -> dict[str, Any]:
    """The options as a JSON schema (draft 2020-12), with which an editor checks a configuration.

    It has types, choices and defaults. Values that depend on each other or on the computer, such as
    core numbers, are checked by `Options.parse` alone.
    """
    from pydantic import ConfigDict, create_model

    types = get_type_hints(Keywords)
    settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    options: dict[str, Any] = {
        item.name: (types[item.name], item.default) for item in fields(Options)
    }
    model = create_model("CotrainOptions", __config__=settings, **options)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(),
        "description": "options of torch.compile(step, backend='cotrain', options={...})",
    }
