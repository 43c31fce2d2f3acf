"""Turn step: what devices do whose stages have their turns one behind the other.

In: packs on the devices of a machine and micro-batches of a size. Out: a `StagesInTurn`: its step,
and what each device holds. A stage runs all of its micro-batches back to back: a *visit*. What
comes and goes when a visit begins is what `pipelining.swapped` does then.

The model rests on the host. Packs of layers are stages, dealt to the devices in turn, forward, and
later backward on the same device, as the looped schedule of `torch.distributed.pipelining` has it.
Parameters come once for either pass, and once for both where nothing is between them; gradients
leave once. A backward makes its forward again, but the last stage does both at once. What enters
and leaves stages stays on the devices; at the end the host updates. Harmony's own plans (VLDB 2022)
have other packs and micro-batches backward than forward, and update as soon as gradients are there.

What a device sends to others goes beside its computing. With the host it copies and computes one
after the other; or it fetches ahead: while a stage has its visit, the parameters of the next one
come, and the gradients of the one before go home, where both fit beside it. The search
(`plan_stages_in_turn`) tries both, all sizes of micro-batches that divide the samples, and all
multiples of the devices as numbers of packs, balanced by memory and by time: of more of them fewer
stay between their passes, but the next device begins sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.steps.fastest import fastest
from cotrain_compile.cluster.steps.stage_step import (
    ROUNDING,
    Does,
    Rank,
    StageStep,
    StageTask,
)
from cotrain_compile.cluster.swapped.packs import (
    Pack,
    PackCosts,
    Packs,
    cut_at_shares,
    packs_too_large,
    require_packing,
)
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.machine import Machine
from cotrain_compile.support.units import format_bytes


@dataclass(frozen=True)
class Visit:
    """Stage `k` with all micro-batches: its forwards, its backwards, or both at once.

    `again` where its parameters were there before.
    """

    k: int
    forward: bool
    backward: bool
    again: bool = False

    @property
    def parameters(self) -> str:
        """The task that brings them."""
        return f"parameters of stage {self.k}{' again' if self.again else ''}"

    @property
    def gradients(self) -> str:
        """The task that takes them home."""
        return f"gradients of stage {self.k}"

    def turn(self, i: int) -> str:
        """The task of a micro-batch."""
        return f"{'forward' if self.forward else 'backward'} {i} of stage {self.k}"

    def order(self, micro_batches: int) -> list[int]:
        """The micro-batches as they have their turns."""
        numbers = list(range(micro_batches))
        return numbers if self.forward else numbers[::-1]

    def enters(self, i: int) -> tuple[str, ...]:
        """What brings what a turn begins with."""
        if not self.forward:
            return (f"gradients {i} to stage {self.k}",)
        return (f"activations {i} to stage {self.k}",) if self.k else ()


@dataclass(frozen=True)
class StagesInTurn:
    """Packs with micro-batches of a size; the k-th pack is on device k mod the devices, which have
    `machine` each."""

    costs: PackCosts
    machine: Machine
    devices: int
    packs: Packs
    micro_batch: int
    micro_batches: int
    ahead: bool = False

    def packs_of(self, device: int) -> list[int]:
        """The stages of a device."""
        return list(range(device, len(self.packs), self.devices))

    def visits(self, device: int) -> list[Visit]:
        """Forwards of its stages, and backwards in reverse; those of the loss are one."""
        own = self.packs_of(device)
        forth = [Visit(k, forward=True, backward=False) for k in own]
        back = [Visit(k, forward=False, backward=True, again=True) for k in reversed(own)]
        if own[-1] == len(self.packs) - 1:
            forth[-1:] = [Visit(own[-1], forward=True, backward=True)]
            del back[0]
        return forth + back

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """What each device holds: the fullest of its visits, beside what enters and leaves."""
        return tuple(map(self._peak, range(self.devices)))

    def _peak(self, device: int) -> int:
        own = [self.packs[k] for k in self.packs_of(device)]
        ends = sum(
            self.costs.input_bytes(self.micro_batch, layer)
            for pack in own
            for layer in (pack.first, pack.last)
            if layer  # what the first stage reads is the batch, and has no gradient
        )
        visits = self.visits(device)
        most = max(self._visit_bytes(visits, i) for i in range(len(visits)))
        return round(most + 2 * self.micro_batches * ends)

    def _visit_bytes(self, visits: Sequence[Visit], i: int) -> float:
        """What a turn takes, and what comes and goes beside it."""
        of_turn = (
            self.costs.backward_peak_bytes if visits[i].backward else self.costs.forward_peak_bytes
        )
        beside = [*_next(visits, i), *_gone(visits, i - 1)] if self.ahead else []
        return of_turn(self.micro_batch, self.packs[visits[i].k]) + sum(map(self._weights, beside))

    @cached_property
    def least_s(self) -> float:
        """No step takes less: a device with all its turns, and the way there and back.

        A device begins when a micro-batch has passed the stages before its first one; behind its
        last turn the backward goes through these. Then gradients go home, and all update.
        """
        devices = range(self.devices)
        first_s = self._swap_s(self.visits(0)[0])
        least_s, way_s = 0.0, first_s if self.ahead else 0.0
        for device in devices:
            visits = self.visits(device)
            busy_s = self.micro_batches * sum(map(self._turn_s, visits))
            there, back = Visit(device, True, False), Visit(device, False, True)
            passing_s = self._turn_s(there) + self._turn_s(back)
            if not self.ahead:
                passing_s += self._swap_s(there)
                for i in range(len(visits)):
                    swapped = (*_gone(visits, i - 1), *self._coming(visits, i))
                    busy_s += sum(map(self._swap_s, swapped))
            least_s = max(least_s, way_s + busy_s)
            way_s += passing_s
        return (least_s + first_s + max(map(self._update_s, devices))) * ROUNDING

    @cached_property
    def step(self) -> StageStep:
        """All that the devices do."""
        devices = range(self.devices)
        tasks = tuple(task for device in devices for task in self._tasks(device))
        return StageStep(tuple(map(self._rank, devices)), tasks)

    def _rank(self, device: int) -> Rank:
        return Rank(self.machine, f"device{device}")

    def _tasks(self, device: int) -> Iterator[StageTask]:
        """What the device does, in its order, what comes and goes, and what it sends."""
        visits = self.visits(device)
        if self.ahead:
            yield self._fetch(visits[0], device, ())
        for i, visit in enumerate(visits):
            first = visit.order(self.micro_batches)[0]
            begins = (*visit.enters(first), *self._left(visits, i))
            yield from self._swaps(visits, i, device, begins)
            yield from self._turns(visit, device, begins)
        yield self._go_home(visits[-1], device, self._left(visits, len(visits)))
        ends = tuple(f"gradients of stage {d}" for d in range(self.devices))
        update_s = self._update_s(device)
        yield StageTask(f"update of device {device}", Does.COMPUTE, update_s, ends, device)

    def _left(self, visits: Sequence[Visit], i: int) -> tuple[str, ...]:
        """What has to be over when visit `i` begins: the turns before it, and gradients on the way.

        So no more is on the device than what `_visit_bytes` counts.
        """
        ended = [visit.turn(visit.order(self.micro_batches)[-1]) for visit in visits[:i][-1:]]
        return (*ended, *(visit.gradients for visit in _gone(visits, i - 2)))

    def _swaps(
        self, visits: Sequence[Visit], i: int, device: int, begins: tuple[str, ...]
    ) -> Iterator[StageTask]:
        """What goes home and what comes when visit `i` begins."""
        for visit in _gone(visits, i - 1):
            yield self._go_home(visit, device, begins)
        for visit in self._coming(visits, i):
            yield self._fetch(visit, device, begins)

    def _coming(self, visits: Sequence[Visit], i: int) -> Sequence[Visit]:
        """Whose parameters begin to come when visit `i` begins."""
        if i and visits[i - 1].k == visits[i].k:
            return ()  # the stage is there, and what comes after it is on its way
        return _next(visits, i) if self.ahead else visits[i : i + 1]

    def _turns(self, visit: Visit, device: int, begins: tuple[str, ...]) -> Iterator[StageTask]:
        k, seconds = visit.k, self._turn_s(visit)
        # Parameters that were there before stay from the forwards to the backwards, or come again.
        fetched = () if visit.again and k == self.packs_of(device)[-1] else (visit.parameters,)
        after, order = (*begins, *fetched), visit.order(self.micro_batches)
        for i in order:
            made = visit.turn(i)
            yield StageTask(made, Does.COMPUTE, seconds, (*after, *visit.enters(i)), device)
            after = ()
            if not visit.backward:
                yield self._send(f"activations {i}", device, k, k + 1, made)
            elif not visit.forward and k:
                yield self._send(f"gradients {i}", device, k, k - 1, made)
        if visit.forward and visit.backward and k:  # the schedule sends when all are done
            for i in reversed(order):
                yield self._send(f"gradients {i}", device, k, k - 1, visit.turn(order[-1]))

    def _fetch(self, visit: Visit, device: int, after: tuple[str, ...]) -> StageTask:
        return self._swap(visit.parameters, Does.FETCH, visit, device, after)

    def _go_home(self, visit: Visit, device: int, after: tuple[str, ...]) -> StageTask:
        return self._swap(visit.gradients, Does.STORE, visit, device, after)

    def _swap(
        self, name: str, does: Does, visit: Visit, device: int, after: tuple[str, ...]
    ) -> StageTask:
        """Beside computing, or one after the other."""
        lane = "" if self.ahead else self._rank(device).lane
        return StageTask(name, does, self._weights(visit), after, device, lane)

    def _send(self, what: str, device: int, k: int, to: int, made: str) -> StageTask:
        """From stage k to the one before or behind it, which may be on the same device."""
        there = to % self.devices
        crossing = self.packs[max(k, to)].first
        nbytes = self.costs.input_bytes(self.micro_batch, crossing) if there != device else 0.0
        lane = f"device{device} to device{there}"
        return StageTask(f"{what} to stage {to}", Does.SEND, nbytes, (made,), device, lane)

    def _turn_s(self, visit: Visit) -> float:
        """A backward makes its forward again, or is one with it."""
        pack = self.packs[visit.k]
        forward_s = self.costs.forward_s(self.micro_batch, pack)
        backward_s = self.costs.backward_s(self.micro_batch, pack) if visit.backward else 0.0
        return forward_s + backward_s

    def _update_s(self, device: int) -> float:
        """On a host that updates for all devices at once."""
        own = [self.packs[k] for k in self.packs_of(device)]
        return sum(map(self.costs.update_s, own)) * self.devices

    def _swap_s(self, visit: Visit) -> float:
        return self._rank(0).seconds(Does.FETCH, self._weights(visit))

    def _weights(self, visit: Visit) -> float:
        return self.costs.weight_bytes(self.packs[visit.k])


def _next(visits: Sequence[Visit], i: int) -> Sequence[Visit]:
    """The first visit after `i` that is of another stage, if there is one."""
    return [visit for visit in visits[i + 1 :] if visit.k != visits[i].k][:1]


def _gone(visits: Sequence[Visit], i: int) -> Sequence[Visit]:
    """Visit `i`, if there is one that leaves gradients."""
    return [visit for visit in visits[max(0, i) : max(0, i + 1)] if visit.backward]


def plan_stages_in_turn(
    profile: LayerProfile,
    machine: Machine,
    devices: int,
    samples: int,
    packs: Packs | None = None,
) -> StagesInTurn:
    """The fastest of all that fit, with `packs` of those with these.

    Raises `OptionError` where the profile is no chain or has no peaks, or where `packs` are no
    packing of its layers of which each device has as many; `PlacementError` where nothing fits.
    """
    costs = PackCosts(profile)
    if packs is not None:
        require_packing(packs, len(costs.layers))
        if len(packs) % devices:
            raise OptionError(f"{len(packs)} packs cannot be dealt to {devices} devices in turn")
    best = fastest(
        plan
        for each in range(1, samples + 1)
        if samples % each == 0
        for ahead in (False, True)
        for plan in _plans(costs, machine, devices, each, samples // each, ahead, packs)
    )
    if best is None and packs is not None:
        least = StagesInTurn(costs, machine, devices, packs, 1, samples)
        raise packs_too_large(max(least.peak_bytes), machine.device.capacity_bytes)
    if best is None:
        raise _nothing_fits(costs, machine, devices, samples)
    return best


def _plans(
    costs: PackCosts,
    machine: Machine,
    devices: int,
    each: int,
    micro_batches: int,
    ahead: bool,
    given: Packs | None,
) -> Iterator[StagesInTurn]:
    alone = [Pack(layer, layer + 1) for layer in range(len(costs.layers))]
    inputs = [costs.input_bytes(each, pack.first) for pack in alone]
    own = [
        costs.backward_peak_bytes(each, pack) - entering
        for pack, entering in zip(alone, inputs, strict=True)
    ]
    seconds = [costs.forward_s(each, pack) + costs.backward_s(each, pack) for pack in alone]
    found: dict[Packs, None] = {}
    counts = range(devices, len(alone) + 1, devices)
    cuts = (cut_at_shares(weights, count) for weights in (own, seconds) for count in counts)
    for packs in cuts if given is None else [given]:
        if packs is None or packs in found:
            continue
        plan = StagesInTurn(costs, machine, devices, packs, each, micro_batches, ahead)
        if max(plan.peak_bytes) <= machine.device.capacity_bytes:
            found[packs] = None
            yield plan


def _nothing_fits(costs: PackCosts, machine: Machine, devices: int, samples: int) -> CotrainError:
    layers = len(costs.layers)
    packs = cut_at_shares([1.0] * layers, layers - layers % devices)
    if samples < 1 or layers < devices or packs is None:
        return OptionError(
            f"{samples} samples in {layers} layers cannot be dealt to {devices} devices in "
            "turn; take fewer devices"
        )
    peak = max(StagesInTurn(costs, machine, devices, packs, 1, samples).peak_bytes)
    missing = max(1, peak - machine.device.capacity_bytes)
    return PlacementError(
        f"the smallest stages need {format_bytes(missing)} more on {devices} "
        "devices, one sample at a time, with what goes between them for all samples; cut layers "
        "in parts, or take larger devices or fewer samples",
        shortfall_bytes=missing,
    )
