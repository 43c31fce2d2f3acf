"""Placed: a step under a placement, made once: what the device runs, and what lies where.

In: a Problem, or a Dataflow alone where no machine is asked, a Placement, its tasks and moved ops.
Out: a `PlacedStep`, or a `PlacedDataflow`, which knows of order and bytes but of no seconds.
Whoever schedules, simulates, explains or draws a placement reads it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.analysis.held import held_bytes, holding
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.casts import casts_once
from cotrain_compile.placement.host_memory import host_bytes
from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.order.by_layer import in_packs
from cotrain_compile.placement.pieces import in_pieces, pieces_under
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.placement.residency import (
    DeviceProgram,
    device_bytes,
    device_program,
    instances,
)
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import MovedOps, Placement, Plan, Task
from cotrain_compile.plan.on_disk import disk_bytes


@dataclass(frozen=True)
class PlacedDataflow:
    """The `program` that a placement leaves to the device, in the order of the `moved` ops.

    With other tasks (`dataclasses.replace`) the program is the same one.
    """

    program: DeviceProgram
    placement: Placement
    tasks: tuple[Task, ...]
    moved: tuple[MovedOps, ...]

    @property
    def dataflow(self) -> Dataflow:
        """The step that is left: its ops in the placement's order, some of them again."""
        return self.program.dataflow

    @cached_property
    def instances(self) -> tuple[Instance, ...]:
        """Every stretch in which a buffer is on the device."""
        return tuple(instances(self.program, self.placement, self.tasks))

    @cached_property
    def device_bytes(self) -> Sequence[int]:
        """Bytes alive on the device in each slot, the last one being the end of the step."""
        return device_bytes(self.program, self.instances)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files in which states rest."""
        return disk_bytes(self.dataflow, self.placement)


@dataclass(frozen=True)
class PlacedStep(PlacedDataflow):
    """The same with its `problem`: that of the step which is left."""

    problem: Problem

    @cached_property
    def host_bytes(self) -> int:
        """Most bytes that can be held on the host."""
        workers = self.problem.machine.host_update.workers
        return host_bytes(self.program, self.placement, self.tasks, workers)


def place(
    problem: Problem,
    placement: Placement,
    tasks: Sequence[Task] = (),
    moved: Sequence[MovedOps] = (),
) -> PlacedStep:
    """The step of `problem` under `placement`; raises `PlanError` where it has no such order."""
    problem = problem.under(placement)
    program = device_program(problem.dataflow, placement, moved)
    return PlacedStep(program, placement, tuple(tasks), tuple(moved), problem)


def place_plan(problem: Problem, plan: Plan) -> PlacedStep:
    """The step of `problem` as `plan` runs it; raises as `place`."""
    return place(problem, plan.placement, plan.tasks, plan.moved)


def place_dataflow(
    dataflow: Dataflow,
    placement: Placement,
    tasks: Sequence[Task] = (),
    moved: Sequence[MovedOps] = (),
) -> PlacedDataflow:
    """As `place`, where no machine is known."""
    program = device_program(as_placed(dataflow, placement), placement, moved)
    return PlacedDataflow(program, placement, tuple(tasks), tuple(moved))


def place_as_planned(dataflow: Dataflow, plan: Plan) -> PlacedDataflow:
    """The step as `plan` runs it, in the bytes that it was planned with, which it does not say.

    Those of compiled code where op by op the device would hold more than the plan. Raises as
    `place`.
    """
    decided = plan.placement, plan.tasks, plan.moved
    placed = place_dataflow(dataflow, *decided)
    if max(placed.device_bytes) <= plan.predicted.peak_bytes[Tier.DEVICE]:
        return placed
    return place_dataflow(holding(dataflow, held_bytes(dataflow)), *decided)


def as_placed(dataflow: Dataflow, placement: Placement) -> Dataflow:
    """The step that `placement` leaves: in parts, cast once, in order, some again, some in pieces.

    The first passes do the same to the graph. Raises as `place`.
    """
    parts = split_regions(dataflow, placement.splits)
    cast = casts_once(parts) if placement.casts_once else parts
    ordered = in_packs(cast, placement.layers_per_pack)
    again = recomputed(ordered, placement.recomputed, placement.recomputed_apart)
    return in_pieces(again, pieces_under(cast, placement))
