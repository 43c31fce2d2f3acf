"""Option keywords: the names and types of all options, for editors, type checkers and schemas.

Checkers read `Keywords` without running anything, so it is written out; a test compares it with the
table in `parts`. Values are checked by `Options.parse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from cotrain_compile.options import TABLE
from cotrain_compile.options.parts import (
    Checkpoints,
    Device,
    HostKernels,
    Lowering,
    MicroBatchOrder,
    OnBreak,
    Recompute,
    RestsOn,
    Solver,
    Speculate,
    Split,
)


class Keywords(TypedDict, total=False):
    """The options and their types; `docs/options.md` says what each does. What is left out is as
    in `Options`.
    """

    memory_budget: int | float | str
    host_memory_budget: int | float | str
    disk: str | PathLike[str]
    disk_budget: int | float | str
    machine: str | PathLike[str]
    profile: str | PathLike[str]
    policy: str
    rests_on: RestsOn
    plan: str | PathLike[str]
    plan_cache: bool
    solver: Solver
    work_limit: float
    time_limit: float
    gap: float
    seed: int
    overlap_steps: bool
    speculate: Speculate
    recompute: Recompute
    micro_batch_order: MicroBatchOrder
    split: Split

    device: Device
    checkpoints: Checkpoints
    lowering: Lowering
    inductor: Mapping[str, Any]
    eager_segments: Sequence[str]
    remat: bool
    host_kernels: HostKernels
    keep_grads: bool
    on_break: OnBreak
    verify: int

    host_cores: Sequence[int]
    throttle: bool
    timeline: bool
    poison: bool
    check_replicas: int
    watchdog_s: float | Literal[False]

    dump: str | PathLike[str]
    quiet: bool
    live: bool | float


def options_schema() -> dict[str, Any]:
    """The options as a JSON schema (draft 2020-12), with which an editor checks a configuration.

    It has types, choices, defaults and what each is for. Values that depend on each other or on the
    computer, such as core numbers, are checked by `Options.parse` alone.
    """
    from pydantic import ConfigDict, Field, create_model

    settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    options: dict[str, Any] = {
        name: (option.given, Field(option.default, description=option.words))
        for name, option in TABLE.items()
    }
    model = create_model("CotrainOptions", __config__=settings, **options)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(),
        "description": "options of torch.compile(step, backend='cotrain', options={...})",
    }
