"""Options: what a user may pass to `torch.compile(..., backend="cotrain", options={...})`.

The table of them is in `parts`, what reads their values in `parsers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.options.parts import (
    LoweringOptions,
    OutputOptions,
    PlanningOptions,
    RunningOptions,
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
