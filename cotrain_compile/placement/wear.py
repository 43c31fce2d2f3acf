"""Wear: what a plan writes to a drive, and for how long the drive is rated to bear it.

In: a Problem and a plan of it. Out: a `Wear`, None where nothing is written. Makers rate a drive by
the bytes that may be written to it (TBW), of which a machine says its own, or else the usual ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan, Transfer, UpdateMode
from cotrain_compile.plan.on_disk import resting, whole_blocks

_DAY_S = 86400.0
_TB = 1e12


@dataclass(frozen=True)
class Wear:
    """`step_bytes` are written in each step of `step_s`, `value_bytes` of them of activations.

    The drive is rated for `rated_bytes`, which is `assumed` where its machine does not say.
    """

    step_bytes: int
    value_bytes: int
    step_s: float
    rated_bytes: float
    assumed: bool

    @property
    def day_bytes(self) -> float:
        """Written in a day of training."""
        return self.step_bytes * _DAY_S / self.step_s

    @property
    def steps(self) -> float:
        """Until as much is written as the drive is rated for."""
        return self.rated_bytes / self.step_bytes

    @property
    def words(self) -> str:
        """`25.0 GB written a step, 210 TB a day: 5.7 days to the 1200 TB that it is rated for`."""
        of_values = f", {self.value_bytes / 1e9:.1f} of it activations" if self.value_bytes else ""
        assumed = " (assumed)" if self.assumed else ""
        return (
            f"{self.step_bytes / 1e9:.1f} GB written a step{of_values}, "
            f"{self.day_bytes / _TB:.1f} TB a day: {self.rated_bytes / self.day_bytes:,.1f} days, "
            f"{self.steps:,.0f} steps, to the {self.rated_bytes / _TB:,.0f} TB that the drive is "
            f"rated for{assumed}"
        )


def wear(problem: Problem, plan: Plan) -> Wear | None:
    """Of the drive, where `plan` writes to it."""
    disk, values = problem.machine.disk, sum(_of_values(plan))
    written = sum(_of_updates(problem, plan)) + sum(_of_gradients(plan)) + values
    if disk is None or not written or not plan.predicted.makespan_s:
        return None
    return Wear(
        written, values, plan.predicted.makespan_s, disk.endurance_bytes, not disk.rated_bytes
    )


def _of_updates(problem: Problem, plan: Plan) -> Iterator[int]:
    sizes, modes = problem.dataflow.buffer, plan.placement.updates
    for group in problem.dataflow.updates:
        if modes[group.param] in (UpdateMode.HOST, UpdateMode.HOST_STREAMED):
            for name in resting(plan.placement, group):
                yield whole_blocks(sizes[name].nbytes)


def _of_gradients(plan: Plan) -> Iterator[int]:
    homes = plan.placement.homes
    yield from (t.nbytes for t in _offloads(plan) if homes.get(t.buffer) is Tier.DISK)


def _of_values(plan: Plan) -> Iterator[int]:
    values = set(plan.placement.offloaded_to_disk)
    yield from (t.nbytes for t in _offloads(plan) if t.buffer in values)


def _offloads(plan: Plan) -> Iterator[Transfer]:
    yield from (transfer for transfer in plan.transfers if transfer.is_offload)
