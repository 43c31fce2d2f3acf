"""Dataflow: a training step as plain data: ops in program order and the buffers they touch.

A buffer is a *storage*: views of it are folded in, tied weights are one buffer. Made from a
StepGraph by `extract`; everything below (analysis, placement, plan) sees only this. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from cotrain_compile.machine import LARGEST
from cotrain_compile.machine.op_classes import OpKind
from cotrain_compile.regions import Region

# 2: random ops touch the state of their generator.
FORMAT_VERSION = 2

# Of all buffers: sums of it, and of what is copied, fit a 64-bit integer.
MOST_BYTES = 1 << 60

# A ring of 8 ranks with 10 µs a round and 20 GB/s has sent 1.6 MB in the time of its latencies.
# What is larger is worth an exchange of its own.
SMALL_EXCHANGE_BYTES = 1 << 20


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
        _require(self.nbytes >= 0, f"buffer {self.name} has a negative size")
        _require(self.nbytes <= MOST_BYTES, f"buffer {self.name} has more bytes than there are")

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
        _require(self.ranks >= 1 and 0 <= self.nbytes <= MOST_BYTES, "no ranks exchange so much")

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
        _require(known, f"op {self.name} has flops or bytes_moved below 0 or above 1e30")

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


@dataclass(frozen=True)
class Dataflow:
    """A step: `ops` in program order, `buffers`, and which ops update which parameter.

    `symbols` gives each dynamic dimension the value that the integers in `ops` and `buffers` were
    computed for; `expressions` holds the sizes that change with them. `fingerprint` identifies the
    step graph: a plan made for one fingerprint is refused for another. `notes` say in words what of
    the step costs more than it has to, `checkpoints` what the user's checkpoints are about. It is
    the step of one of so many `ranks` that train together, and of a `job`, which no plan asks for.
    Its `regions` may run in parts.
    """

    fingerprint: str
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    updates: tuple[UpdateGroup, ...] = ()
    symbols: Mapping[str, int] = field(default_factory=dict)
    expressions: SizeExpressions = field(default_factory=SizeExpressions)
    notes: tuple[str, ...] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    ranks: int = 1
    job: Job = field(default_factory=Job)
    regions: tuple[Region, ...] = ()
    pieces: Pieces = field(default_factory=Pieces)

    def __post_init__(self) -> None:
        ops = {op.name for op in self.ops}
        self._require_exchanges_awaited_later()
        _require(self.ranks >= 1, f"the step is of {self.ranks} ranks")
        known = {buffer.name for buffer in self.buffers}
        _require(len(known) == len(self.buffers), "two buffers share a name")
        _require(len(ops) == len(self.ops), "two ops share a name")
        params = {buffer.name for buffer in self.buffers if buffer.role is Role.PARAM}
        kept = {buffer.name for buffer in self.buffers if buffer.role in PERSISTENT_ROLES}
        for buffer in self.buffers:
            if buffer.param and buffer.param not in params:
                raise ValueError(
                    f"{buffer.name} is a gradient of {buffer.param}, no parameter here"
                )
        nbytes = sum(buffer.nbytes for buffer in self.buffers)
        _require(nbytes <= MOST_BYTES, f"the buffers have {nbytes} bytes, more than there are")
        for op in self.ops:
            if not known.issuperset(op.touched):
                strange = sorted({*op.touched} - known)
                raise ValueError(f"op {op.name} touches unknown buffers {strange[:3]}")
        for group in self.updates:
            unknown = {group.param, group.gradient, *group.states, *group.scalars} - known
            unknown |= {group.low_precision, *group.recasts} - known - {""}
            unknown |= set(group.ops) - ops
            _require(not unknown, f"the update of {group.param} names {sorted(unknown)[:3]}")
            _require(group.param in params, f"{group.param} is updated and no parameter")
            _require(kept.issuperset(group.states), f"the step does not keep {group.states}")
            _require(bool(group.ops), f"the update of {group.param} has no ops")
        unknown = set(self.checkpoints.values) - known
        _require(not unknown, f"the step's checkpoints name {sorted(unknown)[:3]}")
        self._require_draws_in_order()
        _require(len(self.update) == len(self.updates), "two updates are of one parameter")
        in_updates = [name for group in self.updates for name in group.ops]
        _require(len(set(in_updates)) == len(in_updates), "two updates, or one, name an op twice")

    def _require_draws_in_order(self) -> None:
        """No op of an update, which may run elsewhere and at another time, is kept in order."""
        ordered = {Role.RNG: "draws random numbers", Role.GROUP: "exchanges with other ranks"}
        told = {buffer.name: ordered.get(buffer.role) for buffer in self.buffers}
        in_updates = {name: group.param for group in self.updates for name in group.ops}
        for op in self.ops if any(told.values()) else ():
            if op.name in in_updates:
                does = [word for name in (*op.reads, *op.writes) if (word := told[name])]
                where = f"the update of {in_updates[op.name]}"
                _require(not does, f"op {op.name} of {where} {' and '.join(does[:1])}")

    def _require_exchanges_awaited_later(self) -> None:
        """What an op awaits was begun by an op before it."""
        begun = set[str]()
        for op in self.ops:
            if op.collective is not None:
                begun.add(op.name)
            if op.awaits and op.awaits not in begun:
                raise ValueError(f"op {op.name} awaits {op.awaits}, which has begun no exchange")

    def verify_read(self) -> None:
        """Raise ValueError where this cannot be what `extract` has made: for one from a file."""
        self._require_made()
        for group in self.updates:
            self._require_read(group)
            places = [self.position[name] for name in group.ops]
            _require(places == sorted(places), f"ops of the update of {group.param} are shuffled")

    def _require_made(self) -> None:
        """Whatever an op reads is an input of the step, or was made before."""
        made = {buffer.name for buffer in self.buffers if buffer.is_input}
        for op in self.ops:
            early = [name for name in op.reads if name not in made]
            _require(
                not early,
                f"op {op.name} reads {', '.join(early[:3])}, which no op before it has made; the "
                "ops are in another order than the step's",
            )
            made.update(op.writes)

    def _require_read(self, group: UpdateGroup) -> None:
        """The gradient of an update is another buffer than what it writes, and is read by it."""
        own = {group.param, *group.states}
        _require(group.gradient not in own, f"the update of {group.param} is its own gradient")
        if not self.buffer[group.gradient].is_input:  # else by what follows from it alone
            reads = {name for op in group.ops for name in self.ops[self.position[op]].reads}
            _require(
                group.gradient in reads,
                f"the update of {group.param} does not read {group.gradient}, its gradient",
            )

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each op in program order, by name."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def update(self) -> Mapping[str, UpdateGroup]:
        """Update groups by the name of their parameter."""
        return {group.param: group for group in self.updates}

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Hyper-parameters and constants that the step does not write: every tier has them."""
        roles = (Role.HYPERPARAMETER, Role.CONSTANT)
        return frozenset(b.name for b in self.buffers if b.role in roles) - self.written

    @cached_property
    def written(self) -> frozenset[str]:
        """The buffers that some op writes."""
        return frozenset(name for op in self.ops for name in op.writes)

    @cached_property
    def read_by_updates(self) -> frozenset[str]:
        """The buffers that some update reads."""
        ops = (self.ops[self.position[name]] for group in self.updates for name in group.ops)
        return frozenset(name for op in ops for name in op.reads)

    @cached_property
    def kept_gradients(self) -> Mapping[str, tuple[str, ...]]:
        """The buffers found or kept in the `.grad` of each parameter that has any."""
        found: dict[str, tuple[str, ...]] = {}
        for buffer in self.buffers:
            if buffer.param:
                found[buffer.param] = (*found.get(buffer.param, ()), buffer.name)
        return found

    def with_own_plans(self) -> Dataflow:
        """The same step where each rank has a plan of its own: exchanges are the step's, once."""
        ops = []
        for op in self.ops:
            own = op.collective and replace(op.collective, again=False)
            ops.append(replace(op, collective=own) if own else op)
        return replace(self, ops=tuple(ops))

    def for_machines(self) -> Dataflow:
        """The same step without what readers alone ask for."""
        return replace(self, ops=tuple(replace(op, line="") for op in self.ops), job=Job())

    def with_workspace(self, workspace: Mapping[str, int]) -> Dataflow:
        """The same step, in which kernels take more bytes while they run, given by op."""
        taken = {buffer.name for buffer in self.buffers}
        ops: list[Op] = []
        added: list[Buffer] = []
        for op in self.ops:
            if op.name in workspace:
                name = f"{op.name}.workspace"
                while name in taken:  # a user's parameter may be called so
                    name += "~"
                taken.add(name)
                added.append(Buffer(name, workspace[op.name], Role.WORKSPACE))
                op = replace(op, writes=(*op.writes, name))
            ops.append(op)
        return replace(self, ops=tuple(ops), buffers=(*self.buffers, *added))

    def total_bytes(self, *roles: Role) -> int:
        """Bytes of all buffers with one of `roles`."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.role in roles)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
