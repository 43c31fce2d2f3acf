"""Rank plan: the step of one rank of replicas, planned tensor by tensor, as it is when it runs.

In: a traced step with a symbolic batch, a cluster, how many of its devices share the samples. Out:
a `RankPlan`, the solver's plan on what that rank has of its machine. A layer profile tells whole
units apart, and has its samples in micro-batches; a plan decides on each tensor, and has them at
once. The gradients' exchange is not in a step that was traced on one device, and comes on top. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_compile.analysis.symbolic import at
from cotrain_compile.cluster.description import Cluster, rank_machine
from cotrain_compile.cluster.step_on_cluster import runnable_on
from cotrain_compile.cluster.subsets import first_devices
from cotrain_compile.cluster.traced_profile import sample_symbols
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Plan
from cotrain_compile.units import format_bytes, format_seconds


@dataclass(frozen=True)
class RankPlan:
    """One of `devices` ranks with so many samples; seconds are without exchanges.

    `bound_s` is certified, 0 where there is none.
    """

    plan: Plan
    devices: int
    samples: int
    step_s: float
    bound_s: float
    peak_bytes: int
    host_bytes: int

    def __str__(self) -> str:
        least = f", at least {format_seconds(self.bound_s)}" if self.bound_s else ""
        return (
            f"one of {self.devices} ranks with {self.samples} samples, planned tensor by tensor: "
            f"{format_seconds(self.step_s)}{least}, before gradients are exchanged; "
            f"{format_bytes(self.peak_bytes)} on the device, {format_bytes(self.host_bytes)} on "
            "the host"
        )

    def figures(self) -> dict[str, Any]:
        """As JSON has it; the plan is a file of its own."""
        return {name: value for name, value in vars(self).items() if name != "plan"}


def plan_rank(
    step: Dataflow,
    cluster: Cluster,
    devices: int,
    samples: int,
    symbols: Sequence[str] = (),
    settings: SolveSettings | None = None,
) -> RankPlan:
    """The rank with the smallest device, of the first `devices` that share the samples evenly.

    Raises:
        OptionError: they do not share them evenly, or `symbols` are none of the step's.
        PlacementError: its samples do not fit at once, wherever tensors rest.
    """
    if samples % devices:
        raise OptionError(f"{samples} samples are not shared evenly by {devices} devices")
    part, share = first_devices(cluster, devices), samples // devices
    group, device = min(
        {(place.group, place.device) for place in part.devices},
        key=lambda place: part.groups[place[0]].each[place[1]].device.capacity_bytes,
    )
    machine = rank_machine(part.groups[group], device)
    values = dict.fromkeys(sample_symbols(step, symbols), share)
    sized = at(runnable_on(step, machine), {**step.symbols, **values})
    budgets = {
        Tier.DEVICE: machine.device.capacity_bytes,
        Tier.HOST: machine.host.capacity_bytes,
    }
    problem = formulate(sized, machine, budgets)
    plan = solve(problem, settings)
    timeline = predict(problem, plan.placement, plan.tasks, plan.moved)
    return RankPlan(
        plan,
        devices,
        share,
        timeline.makespan_s,
        plan.report.lower_bound_s if plan.report else 0.0,
        timeline.peak_bytes[Tier.DEVICE],
        timeline.peak_bytes[Tier.HOST],
    )
