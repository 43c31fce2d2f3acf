"""Swapped replicas: each device of a machine runs all layers, of which few are on it at a time.

In: a `LayerProfile` that is a chain, a machine for each device, the samples of a step. Out: a
`SwappedReplicas`: packs of both passes and the size of micro-batches, the step and its peak.

It is Harmony's data parallelism (VLDB 2022) as a captured step runs it whose micro-batches go by
layer: the model rests on the host, a copy for each device. A pack runs all micro-batches back to
back, so that its weights come once for it. A backward makes its pack's forward again from the
pack's input, which rests on the host as all does that is between packs; the last pack has no
forward of its own. All that a device does and copies is one after the other; updates run on the
host beside it, each as soon as the gradients of its pack are there. All sizes of micro-batches that
divide the samples of a device are tried, and for each the packings that fit.

Swapped models on a cluster: the fastest plan on one machine, as it is run here.

In: a `Question`. Out: a plan and the group of machines that it is for. The model rests on the host:
a copy for each device that has all packs, one copy for packs dealt to the devices in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from cotrain_compile.cluster.model.description import MachineGroup, first_of_machine
from cotrain_compile.cluster.model.machines import swapping_machine
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.model.strategy import Question
from cotrain_compile.cluster.steps.fastest import Candidate, fastest
from cotrain_compile.cluster.steps.stage_step import (
    ROUNDING,
    Does,
    Rank,
    Ring,
    StageStep,
    StageTask,
)
from cotrain_compile.cluster.swapped.packs import (
    Pack,
    PackCosts,
    Packs,
    packings,
    packs_too_large,
    require_packing,
)
from cotrain_compile.cluster.swapped.turn_step import StagesInTurn, plan_stages_in_turn
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.machine import Machine
from cotrain_compile.support.units import format_bytes

_LANE = "device0"


@dataclass(frozen=True)
class SwappedReplicas:
    """Packs forward and backward on each of so many devices; those of the forward end where the
    last pack of the backward begins."""

    costs: PackCosts
    machine: Machine
    devices: int
    micro_batch: int
    micro_batches: int
    forward: Packs
    backward: Packs

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of each device."""
        costs, samples = self.costs, self.micro_batch
        forward = [
            costs.forward_task_bytes(samples, pack, self._stored(pack)) for pack in self.forward
        ]
        backward = [costs.backward_task_bytes(samples, pack) for pack in self.backward]
        return (max(map(round, [*forward, *backward])),) * self.devices

    def _stored(self, pack: Pack) -> list[int]:
        """The layers of a pack at which packs of the backward begin, but the last of these."""
        return [own.first for own in self.backward[:-1] if pack.first <= own.first < pack.last]

    @cached_property
    def least_s(self) -> float:
        """All that a device does, and the last update."""
        step = self._of(())
        seconds = self.costs.update_s(self.backward[0])
        for visit in self._visits():
            seconds += sum(map(step.task_s, (visit.weights, *visit.behind)))
            seconds += self.micro_batches * sum(map(step.task_s, visit.turn))
        return seconds * ROUNDING

    @cached_property
    def step(self) -> StageStep:
        """The step of one device; the others do the same beside it."""
        return self._of(tuple(self._tasks()))

    def _of(self, tasks: tuple[StageTask, ...]) -> StageStep:
        network = self.machine.network
        ring = Ring(network, self.devices) if network and self.devices > 1 else None
        return StageStep((Rank(self.machine, _LANE),), tasks, ring)

    def _tasks(self) -> Iterator[StageTask]:
        """Each after the one before it, and updates beside them."""
        after: tuple[str, ...] = ()
        for visit in self._visits():
            for task in visit.tasks(self.micro_batches):
                yield task._replace(after=after)
                after = (task.name,)
            if visit.update:
                yield visit.update._replace(after=after)

    def _visits(self) -> Iterator[_Visit]:
        yield from map(self._forward, self.forward)
        yield from map(self._backward, reversed(self.backward))

    def _forward(self, pack: Pack) -> _Visit:
        """In parts, where packs of the backward begin: what enters these goes to the host."""
        turn = [self._copy("input", Does.FETCH, pack.first)]
        stored = self._stored(pack)
        for first, last in pairwise(sorted({pack.first, *stored, pack.last})):
            if first in stored:
                turn.append(self._copy(f"input of layer {first}", Does.STORE, first))
            turn.append(self._compute(f"forward {first}-{last - 1}", Pack(first, last)))
        turn.append(self._copy("output", Does.STORE, pack.last))
        return _Visit(f"forward {pack.first}-{pack.last - 1}", self._weights(pack), turn)

    def _backward(self, pack: Pack) -> _Visit:
        costs, loss = self.costs, pack == self.backward[-1]
        turn = [
            self._copy("input", Does.FETCH, pack.first),
            self._compute("forward again", pack),
            *([] if loss else [self._copy("gradient of output", Does.FETCH, pack.last)]),
            StageTask("backward", Does.COMPUTE, costs.backward_s(self.micro_batch, pack)),
        ]
        if pack.first:
            turn.append(self._copy("gradient of input", Does.STORE, pack.first))
        nbytes = costs.weight_bytes(pack)
        sums = [StageTask("all-reduce", Does.SUM, nbytes, lane=_LANE)] * (self.devices > 1)
        behind = [*sums, StageTask("gradients", Does.STORE, nbytes)]
        layers = f"{pack.first}-{pack.last - 1}"
        update_s = costs.update_s(pack)
        update = StageTask(f"update {layers}", Does.COMPUTE, update_s, lane=f"{_LANE}/host")
        return _Visit(f"backward {layers}", self._weights(pack), turn, behind, update)

    def _weights(self, pack: Pack) -> StageTask:
        return StageTask("weights", Does.FETCH, self.costs.weight_bytes(pack))

    def _compute(self, name: str, pack: Pack) -> StageTask:
        return StageTask(name, Does.COMPUTE, self.costs.forward_s(self.micro_batch, pack))

    def _copy(self, name: str, does: Does, layer: int) -> StageTask:
        return StageTask(name, does, self.costs.input_bytes(self.micro_batch, layer))


class _Visit(NamedTuple):
    """A pack on the device: its weights, what is done of each micro-batch, and behind them."""

    name: str
    weights: StageTask
    turn: Sequence[StageTask]
    behind: Sequence[StageTask] = ()
    update: StageTask | None = None

    def tasks(self, micro_batches: int) -> Iterator[StageTask]:
        """All but the update, one after the other."""
        yield self.weights._replace(name=f"{self.name}: {self.weights.name}")
        for i in range(micro_batches):
            for task in self.turn:
                yield task._replace(name=f"{self.name}: {task.name}, micro-batch {i}")
        for task in self.behind:
            yield task._replace(name=f"{self.name}: {task.name}")


def plan_swapped_replicas(
    profile: LayerProfile,
    machine: Machine,
    devices: int,
    samples: int,
    packs: tuple[Packs, Packs] | None = None,
) -> SwappedReplicas:
    """The fastest of all that fit; with `packs` of those with these, forward and backward.

    Forward packs end where the last one of the backward begins.

    Raises:
        OptionError: the profile is no chain, has no peaks, or there are fewer samples than devices;
            or `packs` are no packings of its layers.
        PlacementError: a layer alone does not fit, not even with micro-batches of one sample; or
            `packs` do not.
    """
    costs = PackCosts(profile)
    if packs is not None:
        forward, backward = packs
        require_packing(backward, len(costs.layers))
        require_packing(forward, backward[-1].first)
    best = fastest(choices_of(costs, machine, devices, samples, packs))
    if best is None and packs is not None:
        capacity = machine.device.capacity_bytes
        raise packs_too_large(_most_bytes(costs, 1, packs), capacity)
    if best is None:
        raise _nothing_fits(costs, machine.device.capacity_bytes)
    return best


def choices_of(
    costs: PackCosts,
    machine: Machine,
    devices: int,
    samples: int,
    packs: tuple[Packs, Packs] | None = None,
) -> Iterator[SwappedReplicas]:
    """All that are tried, each once, or those with these `packs`."""
    capacity = machine.device.capacity_bytes
    found = {
        (each, forward, backward): None
        for each in equal_micro_batches(samples, devices)
        for forward, backward in (
            _packings(costs, each, capacity)
            if packs is None
            else [packs] * (_most_bytes(costs, each, packs) <= capacity)
        )
    }
    share = -(-samples // devices)  # of the first device, which has the most
    for each, forward, backward in found:
        yield SwappedReplicas(costs, machine, devices, each, share // each, forward, backward)


def equal_micro_batches(samples: int, devices: int) -> tuple[int, ...]:
    """The sizes of micro-batches that divide the samples of every device.

    Raises:
        OptionError: fewer samples than devices.
    """
    if samples < devices:
        raise OptionError(f"{samples} samples cannot be shared by {devices} devices; take more")
    shares = {samples // devices, -(-samples // devices)}
    return tuple(u for u in range(1, min(shares) + 1) if all(s % u == 0 for s in shares))


def _most_bytes(costs: PackCosts, samples: int, packs: tuple[Packs, Packs]) -> float:
    """What the largest of the packs of the forward and of the backward takes."""
    forward, backward = packs
    begins = [pack.first for pack in backward[:-1]]
    needs = [costs.backward_task_bytes(samples, pack) for pack in backward]
    for pack in forward:
        stored = [layer for layer in begins if pack.first <= layer < pack.last]
        needs.append(costs.forward_task_bytes(samples, pack, stored))
    return max(needs)


def _packings(costs: PackCosts, samples: int, capacity: int) -> Iterator[tuple[Packs, Packs]]:
    """Of the forward and the backward; for the forward also those of the backward."""

    def backward_fits(pack: Pack) -> bool:
        return costs.backward_task_bytes(samples, pack) <= capacity

    layers = len(costs.layers)
    for backward in packings(costs, samples, layers, backward_fits, capacity, backward=True):
        *ahead, last = backward
        begins = [pack.first for pack in ahead]

        def forward_fits(pack: Pack, begins: Sequence[int] = begins) -> bool:
            stored = [layer for layer in begins if pack.first <= layer < pack.last]
            return costs.forward_task_bytes(samples, pack, stored) <= capacity

        if not ahead:
            yield (), backward
            continue
        for forward in packings(costs, samples, last.first, forward_fits, capacity, backward=False):
            yield forward, backward
        if all(map(forward_fits, ahead)):
            yield tuple(ahead), backward


def _nothing_fits(costs: PackCosts, capacity: int) -> PlacementError:
    needs = [
        costs.backward_task_bytes(1, Pack(layer, layer + 1)) for layer in range(len(costs.layers))
    ]
    most = max(needs)
    name = costs.layers[needs.index(most)].name
    return PlacementError(
        f"layer {name} alone needs {round(most)} bytes in the backward of one sample, and a device "
        f"may hold {capacity}; cut it in parts or take larger devices",
        shortfall_bytes=round(most - capacity),
    )


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
