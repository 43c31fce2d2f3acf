"""Options: what a user may pass to `torch.compile(..., backend="cotrain", options={...})`.

The table of them is in `parts`, what reads their values in `parsers`.

Option keywords: the names and types of all options, for editors, type checkers and schemas.

Checkers read `Keywords` without running anything, so it is written out; a test compares it with the
table in `parts`. Values are checked by `Options.parse`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict

from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.options.parts import (
    Checkpoints,
    Device,
    HostKernels,
    Lowering,
    LoweringOptions,
    MicroBatchOrder,
    OnBreak,
    OutputOptions,
    PlanningOptions,
    Recompute,
    RestsOn,
    RunningOptions,
    Solver,
    Speculate,
    Split,
    table_of,
)


@dataclass(frozen=True)
class Options(OutputOptions, RunningOptions, LoweringOptions, PlanningOptions):
    """All options with their defaults; `docs/options.md` is the reference page.

    For the user it is one flat dictionary. A room asks for the part that it needs.
    """

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Check a user's dictionary. Raises `OptionError` naming the key and what it may be."""
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            raise OptionError(
                f"options are {options!r}, but must be a dictionary of options by name, such as "
                '{"memory_budget": "20GiB"}'
            )
        values: dict[str, Any] = {}
        for key, value in options.items():
            if key not in TABLE:
                meant = did_you_mean(key, list(TABLE))
                raise OptionError(f"unknown option {key!r}{meant}; options are {', '.join(TABLE)}")
            default = TABLE[key].default
            if type(value) is type(default) and value == default:
                continue  # as if it were left out
            try:
                values[key] = TABLE[key].parse(value)
            except ValueError as error:
                raise OptionError(f"option {key!r} is {value!r}, but must be {error}") from None
        if values.get("verify") and values.get("lowering") == "inductor":
            raise OptionError(
                "option 'verify' compares bit by bit, which compiled ops do not allow; verify the "
                "plan with lowering 'eager', then leave 'verify' out"
            )
        return cls(**values)


TABLE = table_of(Options)


@contextmanager
def as_option_error(option: str, value: str) -> Iterator[None]:
    """Turns an OSError met inside into an `OptionError` about `option`, whose path is `value`."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"option {option!r} is {value!r}: {error.strerror}") from error


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
