"""Swapped models on a cluster: the fastest plan on one machine, as it is run here.

In: a `Question`. Out: a plan and the group of machines that it is for. The model rests on the host:
a copy for each device that has all packs, one copy for packs dealt to the devices in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from cotrain_compile.cluster.model.description import MachineGroup, first_of_machine
from cotrain_compile.cluster.model.machines import swapping_machine
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.model.strategy import Question
from cotrain_compile.cluster.steps.stage_step import Candidate
from cotrain_compile.cluster.swapped.replicas import SwappedReplicas, plan_swapped_replicas
from cotrain_compile.cluster.swapped.turn_step import StagesInTurn, plan_stages_in_turn
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.machine import Machine
from cotrain_compile.support.units import format_bytes

P = TypeVar("P", bound=Candidate)

# Of a profile, what each device has, their number and the samples.
Planner = Callable[[LayerProfile, Machine, int, int], P]


def replicas_by_layer(question: Question) -> tuple[SwappedReplicas, MachineGroup]:
    """Data parallelism in which packs come to a device for all micro-batches of its share.

    Raises `OptionError` where this cannot be judged, `PlacementError` where it does not fit.
    """
    return _fastest_machine(question, _replicas, copies=True)


def stages_by_turns(question: Question) -> tuple[StagesInTurn, MachineGroup]:
    """Packs as stages of one copy of the model; raises as `replicas_by_layer`."""
    return _fastest_machine(question, plan_stages_in_turn, copies=False)


def _replicas(
    profile: LayerProfile, machine: Machine, devices: int, samples: int
) -> SwappedReplicas:
    """Each device has a copy of the model on the host, which it updates beside the others."""
    layers = tuple(
        replace(layer, host_update_s=devices * layer.host_update_s) for layer in profile.layers
    )
    return plan_swapped_replicas(replace(profile, layers=layers), machine, devices, samples)


def _fastest_machine(
    question: Question, planner: Planner[P], *, copies: bool
) -> tuple[P, MachineGroup]:
    """The fastest plan on one machine of the cluster, on any number of its devices."""
    found: list[tuple[P, MachineGroup]] = []
    failed: list[CotrainError] = []
    for group in question.cluster.groups:
        if group.devices:
            try:
                found.append((_fastest(question, group, planner, copies=copies), group))
            except (OptionError, PlacementError) as error:
                failed.append(error)
    if not found:
        raise failed[0]
    return min(found, key=lambda one: one[0].step.seconds)


def _fastest(question: Question, group: MachineGroup, planner: Planner[P], *, copies: bool) -> P:
    """The fastest plan for any number of devices of a machine, with a copy for each or with one.

    They compute what the question says at least, all together. Where there is no plan, the error of
    the most.
    """
    best: P | None = None
    errors: list[CotrainError] = []
    for count in range(group.device_count, 0, -1):
        if best and question.least_device_s / count >= best.step.seconds:
            break
        try:
            _require_host_memory(question, group, count if copies else 1)
            part = first_of_machine(group, count)
            profile = question.profile.on(part.kinds)
            plan = planner(profile, swapping_machine(part), count, question.samples)
        except (OptionError, PlacementError) as error:
            errors.append(error)
            continue
        if best is None or plan.step.seconds < best.step.seconds:
            best = plan
    if best is None:
        raise errors[0]
    return best


def _require_host_memory(question: Question, group: MachineGroup, copies: int) -> None:
    missing = copies * question.profile.resting_bytes - group.host.capacity_bytes
    if missing > 0:
        told = "the model" if copies == 1 else f"{copies} copies of the model"
        raise PlacementError(
            f"the host of {group.name} needs {format_bytes(missing)} more for {told}, with "
            "gradients and states; take a host with more memory",
            shortfall_bytes=missing,
        )
