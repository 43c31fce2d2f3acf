"""Regions: ops of a step that may run in parts along one dimension, as plain data.

All ops of a region treat its dimension alike: for rows i to j of what they make they need rows i to
j of some values and the whole of others, or they make a share of a sum over all rows. What of it a
part has follows from the numbers here alone, so that a saved step can be planned in parts without
its graph. Made by `extract`; `placement.split` makes of a step the one that runs in parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cotrain_compile.dataflow.parts import require
from cotrain_compile.machine import LARGEST


@dataclass(frozen=True)
class RegionOp:
    """An op of a region, by its name in the step.

    Of the bytes it moves `whole_bytes` do not shrink with the part: what it reads or makes whole.
    A view is one of them, and none of the step in parts, where each part has its own.
    """

    name: str
    whole_bytes: int = 0

    def __post_init__(self) -> None:
        known = 0 <= self.whole_bytes <= LARGEST
        require(known, f"region op {self.name} has bytes below 0 or above 1e30")


@dataclass(frozen=True)
class Collected:
    """A buffer that `op` makes and the rest of the step reads: rows of each part, or their sum.

    It is there before the first part, made by an op of the name `value`, as the buffer is called
    from then on. A sum whose parts are less precise than it must be is added up in `sum_nbytes`
    bytes beside it, in float32; so is a mean, which is divided by the value `divided_by` in the
    end. A part puts there what it has as soon as it has it, or `at_end` behind its last op: what is
    small keeps no two ops apart that are compiled as one. Of a value whose dimensions are
    `permuted` in memory the buffer is the room that it is a view of.
    """

    value: str
    op: str
    buffer: str
    is_sum: bool
    dtype: str = "float32"
    sum_nbytes: int = 0
    divided_by: str = ""
    at_end: bool = False
    permuted: bool = False

    @property
    def room(self) -> str:
        """The name of the buffer that is there before the first part, where no sum is beside it."""
        return f"{self.value}_room" if self.permuted and not self.sum_nbytes else self.value


@dataclass(frozen=True)
class Counted:
    """A buffer that `op` makes, and that no part knows: how many rows of a loss count.

    It is made by an op of the name `value` where `op` was, from `targets` of `nbytes` in `reads`,
    which say each of itself whether it counts.
    """

    value: str
    op: str
    buffer: str
    reads: str
    targets: int
    nbytes: int


@dataclass(frozen=True)
class Ends:
    """A buffer that says behind which rows groups of them end, as experts' tokens do.

    A part has its own, counted from its first row and of no more rows than it has. It makes them
    before `op`, the first that reads them, from the value `value`.
    """

    value: str
    op: str
    buffer: str
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Window:
    """Ops of a region that run part after part at one place of the step, in the step's order.

    `later` are the ops of the step between the first and the last of them that need what they make,
    and so run behind the parts; the others run before, among them `unread`, which look at nothing
    but the shape of what comes behind, and are made without it. Where the loss allows it, forward
    and backward of a part are `joined` in one window, and all of it is backward.
    """

    ops: tuple[RegionOp, ...]
    collected: tuple[Collected, ...] = ()
    counted: tuple[Counted, ...] = ()
    unread: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    joined: bool = False


@dataclass(frozen=True)
class Region:
    """Ops that may run in parts of a dimension of `length` rows.

    `kind` says what it is in the model: "loss", "attention", "experts", "dispatch", "mlp" or
    "convolution".
    `sliced` are buffers that a part has its rows of, in place of the whole; what else the ops make,
    and nobody else reads, each part makes whole. A part may have any number of rows.
    """

    name: str
    kind: str
    length: int
    windows: tuple[Window, ...]
    sliced: tuple[str, ...] = ()
    ends: tuple[Ends, ...] = ()

    def __post_init__(self) -> None:
        require(self.length >= 1, f"region {self.name} has {self.length} rows")
        require(any(w.ops for w in self.windows), f"region {self.name} has no ops")

    @property
    def ops(self) -> Iterator[RegionOp]:
        """The ops of all windows."""
        return (op for window in self.windows for op in window.ops)


def part_rows(length: int, parts: int) -> tuple[int, ...]:
    """Rows of each part: equal ones, the last may have less.

    There may be fewer than asked for, as 5 rows in 4 parts are 2, 2 and 1.
    """
    require(parts >= 1, f"a region cannot run in {parts} parts")
    rows = -(-length // parts)
    return tuple(min(rows, length - start) for start in range(0, length, rows))


def part_name(name: str, part: int) -> str:
    """The name of what part number `part` does or has of `name`."""
    return f"{name}_part{part}"


def whole_name(name: str) -> str:
    """The name that what some part has is of; `name` itself where that is no part's."""
    return re.sub(r"_part\d+(?=\.|$)", "", name, count=1)


def collect_name(value: str, part: int) -> str:
    """The name of the op that puts what a part has of `value` where the whole is."""
    return f"{value}_part{part}_collected"


def sum_name(value: str) -> str:
    """The name of the op that makes room for a sum in more precision than that of `value`."""
    return f"{value}_sum"


def counts_name(value: str) -> str:
    """The name of the op that says of each row whether it is counted in `value`."""
    return f"{value}_counts"


def ends_name(value: str, part: int) -> str:
    """The name of where groups of rows end in a part, by `value` which says so of all."""
    return f"{value}_part{part}_ends"


def shifted_name(value: str, part: int) -> str:
    """The name of the same, before it is held to the rows of the part."""
    return f"{value}_part{part}_shifted"
