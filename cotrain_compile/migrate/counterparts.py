"""Counterparts: for each setting of a file, what stands for it here.

In: a document of nested mappings, and a framework's rules. Out: one counterpart a setting, in the
file's order: a setting that no rule knows is told as such, none is left out.

A `Training` is what a configuration says of a step, in no framework's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from keyword import iskeyword
from typing import Any

from cotrain_compile.errors import FormatError


class Precision(StrEnum):
    """Which numbers a step computes with, beside the dtype that the model has of itself."""

    AS_BUILT = "as the model is built"
    AUTOCAST_BF16 = "autocast to bfloat16"
    AUTOCAST_FP16 = "autocast to float16 with a scaled loss"
    WEIGHTS_BF16 = "weights in bfloat16"


class Ranks(StrEnum):
    """Who trains; where a file does not say how many ranks there are, there is one."""

    ONE = "one"
    REPLICAS = "each rank has the model"
    SHARDS = "ranks share the model"


@dataclass(frozen=True)
class Optimizer:
    """A class by its full name, such as `torch.optim.AdamW`, and its arguments.

    Raises `FormatError` where either is no name: they become code.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.name.split("."), *self.arguments):
            if not name.isidentifier() or iskeyword(name):
                raise FormatError(f"optimizer {self.name!r}: {name!r} is no name in Python")


@dataclass(frozen=True)
class Training:
    """A step as a file configures it.

    `optimizer` is None where the file leaves it to code, `clip` where gradients are not clipped.
    `offloads` says that something rests off the device; `disk` is a folder on a drive to which
    states go.
    """

    optimizer: Optimizer | None = None
    precision: Precision = Precision.AS_BUILT
    micro_batches: int = 1
    clip: float | None = None
    offloads: bool = False
    ranks: Ranks = Ranks.ONE
    disk: str | None = None


class Way(StrEnum):
    """Where a setting of another framework goes."""

    OPTION = "option"
    STEP = "in the step"
    PLAN = "decided by the plan"
    YOURS = "stays yours"
    NONE = "no counterpart"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Counterpart:
    """One setting of a file, by its dotted path, and what stands for it here."""

    setting: str
    value: str
    way: Way
    told: str


@dataclass(frozen=True)
class Rule:
    """What stands for settings whose dotted path matches one of `patterns`, as file names do."""

    patterns: tuple[str, ...]
    way: Way
    told: str


def rule(way: Way, told: str, *patterns: str) -> Rule:
    """The rule by which `patterns` go `way`."""
    return Rule(patterns, way, told)


def counterparts(document: Mapping[str, Any], rules: Sequence[Rule]) -> tuple[Counterpart, ...]:
    """A counterpart for each leaf of `document`; the first rule that matches says which."""
    return tuple(_counterpart(path, value, rules) for path, value in settings(document))


def settings(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of `document` with their dotted paths; a list, or nothing in braces, is a leaf."""
    for key, value in document.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from settings(value, f"{path}.")
        else:
            yield path, value


def _counterpart(path: str, value: Any, rules: Sequence[Rule]) -> Counterpart:
    for one in rules:
        if any(fnmatchcase(path, pattern) for pattern in one.patterns):
            return Counterpart(path, shown(value), one.way, one.told)
    told = "this command does not know it: look whether the step depends on it"
    return Counterpart(path, shown(value), Way.UNKNOWN, told)


def shown(value: Any) -> str:
    """A value as JSON would have it, a long one shortened."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_LONGEST = 40


class Reader:
    """Values of a document by dotted path; a section that is absent has none."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._values = dict(settings(document))

    def __call__(self, path: str, default: Any = None) -> Any:
        value = self._values.get(path, default)
        return default if value is None else value

    def number(self, path: str) -> float | None:
        """The number at `path`, None where there is none: YAML reads `1e-5` as a word."""
        value = self._values.get(path)
        if value is None or isinstance(value, bool):
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            return None

    def count(self, path: str, default: int) -> int:
        """The whole number from 1 at `path`, else `default`."""
        value = self.number(path)
        return int(value) if value is not None and value >= 1 else default

    def is_on(self, path: str) -> bool:
        """Whether the setting is there and neither false, none nor empty, nor left to others."""
        value = self._values.get(path)
        return bool(value) and str(value).lower() not in ("none", "false", "no", "off", "auto")

    def below(self, path: str) -> dict[str, Any]:
        """What stands below `path`, by the last part of its name."""
        start = f"{path}."
        return {k[len(start) :]: v for k, v in self._values.items() if k.startswith(start)}

    def folder_of_a_drive(self, kinds: str, device: str, path: str) -> str | None:
        """The folder at `path` of one of `kinds`, states or parameters, that go to a drive."""
        for of in (f"{kinds}.offload_optimizer", f"{kinds}.offload_param"):
            if self(of + device) == "nvme" and self.is_on(of + path):
                return str(self(of + path))
        return None
