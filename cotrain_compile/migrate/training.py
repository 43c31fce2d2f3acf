"""Training: what a configuration says of a step, in no framework's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from keyword import iskeyword
from typing import Any

from cotrain_compile.errors import FormatError


class Precision(StrEnum):
    """Which numbers a step computes with, beside the dtype that the model has of itself."""

    AS_BUILT = "as the model is built"
    AUTOCAST_BF16 = "autocast to bfloat16"
    AUTOCAST_FP16 = "autocast to float16 with a scaled loss"
    WEIGHTS_BF16 = "weights in bfloat16"


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
    `offloads` says that something rests off the device, `shards` that several ranks share the
    model; where a file does not say how many ranks there are, there is one.
    `disk` is a folder on a drive to which states go.
    """

    optimizer: Optimizer | None = None
    precision: Precision = Precision.AS_BUILT
    micro_batches: int = 1
    clip: float | None = None
    offloads: bool = False
    shards: bool = False
    disk: str | None = None
