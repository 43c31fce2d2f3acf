"""Parts: what a dataflow is made of: buffers, ops, updates, and what is known of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from cotrain_compile.machine import LARGEST
from cotrain_compile.machine.op_classes import OpKind

# Of all buffers: sums of it, and of what is copied, fit a 64-bit integer.
MOST_BYTES = 1 << 60

# A ring of 8 ranks with 10 µs a round and 20 GB/s has sent 1.6 MB in the time of its latencies.
# What is larger is worth an exchange of its own.
SMALL_EXCHANGE_BYTES = 1 << 20


def require(condition: bool, message: str) -> None:
    """Raise ValueError, which says what a step has that none can have."""
    if not condition:
        raise ValueError(message)


class Role(StrEnum):
    """What a buffer is to the training step."""

    PARAM = "param"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    BATCH = "batch"
    HYPERPARAMETER = "hyperparameter"
    RNG = "rng"
    MESH = "mesh"
    GROUP = "group"
    CONSTANT = "constant"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"


# Roles of buffers that outlive the step and that a plan may give a home.
PERSISTENT_ROLES = frozenset({Role.PARAM, Role.OPTIMIZER_STATE, Role.BUFFER, Role.GRADIENT})


class Phase(StrEnum):
    """Which part of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Buffer:
    """A storage. `nbytes` is its whole size, however little of it a view shows.

    `is_input` buffers exist before the first op; `is_output` buffers are still needed after the
    last one (the user holds them, or they are returned). `param` is the parameter in whose `.grad`
    a gradient is found before the step or kept after it, "" for all else. With role RNG it is the
    state of a random generator, which every op that draws from it reads and writes; with role GROUP
    the order of exchanges in a process group, which every collective in it reads and writes; with
    role WORKSPACE what the kernel of one op takes while it runs, which that op writes.
    """

    name: str
    nbytes: int
    role: Role
    is_input: bool = False
    is_output: bool = False
    param: str = ""

    def __post_init__(self) -> None:
        require(self.nbytes >= 0, f"buffer {self.name} has a negative size")
        require(self.nbytes <= MOST_BYTES, f"buffer {self.name} has more bytes than there are")

    @property
    def is_passing(self) -> bool:
        """Whether it is neither there before the step nor needed after it."""
        return not (self.is_input or self.is_output)


@dataclass(frozen=True)
class Collective:
    """What an op exchanges with the other ranks of its group, as a ring of them does it.

    `kind` is the name of the functional collective, `nbytes` are those of the whole: of a gradient
    that is reduced, of what is gathered from all parts or scattered into them. `wire_bytes` is what
    one rank sends, in `rounds` (Patarasuk and Yuan, JPDC 2009). It may run `again` where
    all ranks have one plan.
    """

    kind: str
    ranks: int
    nbytes: int
    again: bool = True

    def __post_init__(self) -> None:
        require(self.ranks >= 1 and 0 <= self.nbytes <= MOST_BYTES, "no ranks exchange so much")

    @property
    def rounds(self) -> int:
        twice = self.kind.startswith("all_reduce")  # scattered in parts, then gathered
        return (2 if twice else 1) * (self.ranks - 1)

    @property
    def wire_bytes(self) -> float:
        if self.kind == "broadcast":  # each passes on all of it, while it comes
            return float(self.nbytes) if self.ranks > 1 else 0.0
        return self.rounds * self.nbytes / self.ranks


@dataclass(frozen=True)
class Op:
    """One call of the step, named as the node of the graph it came from.

    `reads` and `writes` are buffer names; a buffer that is both was updated in place. A view has
    neither flops nor bytes and writes nothing. `flops` counts a multiply-add as two; `bytes_moved`
    is what the op reads and writes. `dtype` is the one its flops run in. `module` is the dotted
    path of the module that called it, empty outside any. Where not `cost_is_known` nobody knows the
    flops: they are 0 here, and its bytes say the least that it can take. A `collective` op begins
    an exchange, which goes on beside the device until an op `awaits` it, by its name. `line` is
    the user's, or a library's, that called it, as `model.py:57`: for readers alone, as `module`.
    By its `kind` a machine says at which part of its rates it runs.
    """

    name: str
    target: str
    phase: Phase
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: int = 0
    bytes_moved: int = 0
    dtype: str = "float32"
    module: str = ""
    cost_is_known: bool = True
    collective: Collective | None = None
    awaits: str = ""
    line: str = ""
    kind: OpKind = OpKind.UNSAID

    def __post_init__(self) -> None:
        known = 0 <= self.flops <= LARGEST and 0 <= self.bytes_moved <= LARGEST
        require(known, f"op {self.name} has flops or bytes_moved below 0 or above 1e30")

    @cached_property
    def touched(self) -> tuple[str, ...]:
        """What it reads or writes, each once."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))


@dataclass(frozen=True)
class UpdateGroup:
    """Everything that turns one parameter's gradient into its next value.

    `ops` run only for this parameter, in program order. `gradient` is the buffer that leaves the
    backward; `states` are the optimizer's own; `scalars` are small values shared with other groups
    (a clipping coefficient, a bias correction). `low_precision` is the copy of the parameter that
    autocast makes for the forward, "" where the parameter itself is used, and `recasts` are equal
    copies that are made later in the step: for another micro-batch, or by a checkpoint. `has_loop`
    says whether the host has a fused loop for the optimizer; else it runs the ops one by one. Where
    each of its `elements` is updated by itself, in memory without gaps, they may go in pieces; 0
    where not.
    """

    param: str
    gradient: str
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    ops: tuple[str, ...]
    low_precision: str = ""
    has_loop: bool = True
    elements: int = 0
    recasts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """What of a step is in pieces: none in a step as it is written, see `placement.pieces`.

    `wholes` has, for each buffer that is a piece of one elsewhere, the name of that; `parts` the
    ops of each piece of an update that goes in pieces, by its parameter.
    """

    wholes: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SizeExpressions:
    """Sizes that depend on a dynamic dimension, as sympy source over the symbols' names."""

    buffer_nbytes: Mapping[str, str] = field(default_factory=dict)
    op_flops: Mapping[str, str] = field(default_factory=dict)
    op_bytes_moved: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoints:
    """What the step's own checkpoints (`torch.utils.checkpoint`) say to make again, as buffers.

    Where they are respected these are what is made in the backward; where they are dissolved, they
    are values of the forward, which the step keeps unless a plan makes them again.
    """

    values: tuple[str, ...] = ()
    dissolved: bool = False


@dataclass(frozen=True)
class Job:
    """What readers know a step by: the class of its model, the shapes of its batch as traced."""

    model: str = ""
    batch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
