"""Dataflow: a training step as plain data: ops in program order and the buffers they touch.

A buffer is a *storage*: views of it are folded in, tied weights are one buffer. Made from a
StepGraph by `extract`; everything below (analysis, placement, plan) sees only this. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cotrain_compile.dataflow import sound
from cotrain_compile.dataflow.parts import (
    MOST_BYTES,
    PERSISTENT_ROLES,
    SMALL_EXCHANGE_BYTES,
    Buffer,
    Checkpoints,
    Collective,
    Job,
    Op,
    Phase,
    Pieces,
    Role,
    SizeExpressions,
    UpdateGroup,
)
from cotrain_compile.dataflow.regions import Region

__all__ = [
    "MOST_BYTES",
    "PERSISTENT_ROLES",
    "SMALL_EXCHANGE_BYTES",
    "Buffer",
    "Checkpoints",
    "Collective",
    "Dataflow",
    "Job",
    "Op",
    "Phase",
    "Pieces",
    "Role",
    "SizeExpressions",
    "UpdateGroup",
]

# 2: random ops touch the state of their generator.
FORMAT_VERSION = 2


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
        sound.require_sound(self)

    def verify_read(self) -> None:
        """Raise ValueError where this cannot be what `extract` has made: for one from a file."""
        sound.require_made_by_extract(self)

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
