"""Harmony on a cluster: the fastest plan on one machine, as it is run here and as published.

In: a `Question`. Out: a plan and the group of machines that it is for. The model rests on the host:
a copy for each device that has all packs, one copy for packs dealt to the devices in turn; as
published, one copy in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cotrain_compile.cluster.description import MachineGroup
from cotrain_compile.cluster.harmony import HarmonyPlan, plan_harmony
from cotrain_compile.cluster.harmony_server import server_of
from cotrain_compile.cluster.harmony_tasks import HarmonyChoice, Layout
from cotrain_compile.cluster.stages_in_turn import TurnsPlan, plan_stages_in_turn
from cotrain_compile.cluster.strategy import Published, Question
from cotrain_compile.cluster.subsets import first_of_machine
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.units import format_bytes

ServerPlan = TypeVar("ServerPlan", HarmonyPlan, TurnsPlan)


def replicas_by_layer(question: Question) -> tuple[HarmonyPlan, MachineGroup]:
    """Data parallelism in which packs come to a device for all micro-batches of its share.

    Raises `OptionError` where this cannot be judged, `PlacementError` where it does not fit.
    """
    return _fastest_machine(question, _replicas_by_layer)


def stages_by_turns(question: Question) -> tuple[TurnsPlan, MachineGroup]:
    """Packs as stages of one copy of the model; raises as `replicas_by_layer`."""
    return _fastest_machine(question, _stages_by_turns)


def as_published(question: Question, layout: Layout) -> Published | None:
    """What Harmony's own schedule takes, None where it does not fit or cannot be judged.

    Links, rates and memory are the cluster's; 40 ms of deletion a task is the authors' default.
    """
    try:
        plan, _ = _fastest_machine(question, partial(_as_published, layout))
    except (OptionError, PlacementError):
        return None
    choice = plan.choice
    return Published(
        plan.step_s,
        plan.bound_s,
        plan.peak_bytes,
        f"micro-batches of {choice.forward_samples} forward, {choice.backward_samples} backward, "
        f"{packs_in_words(choice)}",
    )


def packs_in_words(choice: HarmonyChoice) -> str:
    """How many packs there are in either pass."""
    forward, backward = len(choice.forward_packs), len(choice.backward_packs)
    if not forward:
        return f"{backward} pack{'s' * (backward > 1)} for both passes"
    packs = "1 pack" if forward == 1 else f"{forward} packs"
    return f"{packs} forward, {backward} backward, the last with its forward"


def _as_published(
    layout: Layout, question: Question, group: MachineGroup, count: int
) -> HarmonyPlan:
    _require_host_memory(question, group, copies=1)
    part = first_of_machine(group, count)
    profile = question.profile.on(part.kinds)
    return plan_harmony(profile, server_of(part), layout, question.samples)


def _fastest_machine(
    question: Question, planned: Callable[[Question, MachineGroup, int], ServerPlan]
) -> tuple[ServerPlan, MachineGroup]:
    """The fastest plan on one machine of the cluster, on any number of its devices."""
    found: list[tuple[ServerPlan, MachineGroup]] = []
    failed: list[CotrainError] = []
    for group in question.cluster.groups:
        if group.devices:
            try:
                best = _fastest(
                    partial(planned, question, group),
                    group.device_count,
                    question.least_device_s,
                )
            except (OptionError, PlacementError) as error:
                failed.append(error)
            else:
                found.append((best, group))
    if not found:
        raise failed[0]
    return min(found, key=lambda one: one[0].step_s)


def _replicas_by_layer(question: Question, group: MachineGroup, count: int) -> HarmonyPlan:
    """Each device has a copy of the model on the host, which it updates beside the others."""
    _require_host_memory(question, group, copies=count)
    part = first_of_machine(group, count)
    profile = question.profile.on(part.kinds)
    copies = replace(
        profile,
        layers=tuple(
            replace(layer, host_update_s=count * layer.host_update_s) for layer in profile.layers
        ),
    )
    server = replace(server_of(part), deletion_s=0.0)
    return plan_harmony(copies, server, Layout.DATA_PARALLEL, question.samples, alike=True)


def _stages_by_turns(question: Question, group: MachineGroup, count: int) -> TurnsPlan:
    """The devices have one copy of the model between them."""
    _require_host_memory(question, group, copies=1)
    part = first_of_machine(group, count)
    return plan_stages_in_turn(question.profile.on(part.kinds), server_of(part), question.samples)


def _require_host_memory(question: Question, group: MachineGroup, copies: int) -> None:
    missing = copies * question.profile.resting_bytes - group.host.capacity_bytes
    if missing > 0:
        told = "the model" if copies == 1 else f"{copies} copies of the model"
        raise PlacementError(
            f"the host of {group.name} needs {format_bytes(missing)} more for {told}, with "
            "gradients and states; take a host with more memory",
            shortfall_bytes=missing,
        )


def _fastest(planned: Callable[[int], ServerPlan], most: int, device_s: float) -> ServerPlan:
    """The fastest plan for 1 to `most` devices, which compute `device_s` at least, all together.

    Where there is none, the error of the most.
    """
    best: ServerPlan | None = None
    first_error: CotrainError | None = None
    for count in range(most, 0, -1):
        if best and device_s / count >= best.step_s:
            break
        try:
            plan = planned(count)
        except (OptionError, PlacementError) as error:
            first_error = first_error or error
            continue
        if best is None or plan.step_s < best.step_s:
            best = plan
    if best is None:
        assert first_error is not None  # there is at least one device
        raise first_error
    return best
