"""Stages in turn: Harmony's pipeline as it is run here, and what a step takes.

In: a `LayerProfile` that is a chain, a `Server`, the samples of a step. Out: a `TurnsPlan`.

The model rests on the host. Packs of layers are stages, dealt to the devices in turn; a stage runs
all of its micro-batches back to back, forward, and later backward on the same device, as the looped
schedule of `torch.distributed.pipelining` has it. Its parameters come once for either, and once for
both where nothing is between them; its gradients leave once. A backward makes its forward again,
but the last stage does both at once. What enters and leaves stages stays on the devices; at the end
the host updates. Harmony's own plans (`harmony`) have other packs and micro-batches backward than
forward, on other devices, and update as soon as gradients are there.

A device copies and computes one after the other; what it sends goes beside that. The search tries
all sizes of micro-batches that divide the samples, and all multiples of the devices as numbers of
packs, balanced by memory and by time: of more of them fewer stay between their passes, but the next
device begins sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from cotrain_compile.cluster.harmony_lanes import Server
from cotrain_compile.cluster.harmony_packs import Pack, PackCosts, Packs, cut_at_shares
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.placement.simulate.engine import LaneSpec, Work, lower_bound, simulate
from cotrain_compile.placement.simulate.last_end import last_end_s
from cotrain_compile.plan import Timeline
from cotrain_compile.units import format_bytes

# A bound is a sum in another order than the simulator's.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class TurnsPlan:
    """Packs and what a step takes, simulated; `peak_bytes` is by device, `moved_bytes` by link."""

    packs: Packs
    devices: int
    micro_batch: int
    micro_batches: int
    step_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]
    moved_bytes: Mapping[str, float]
    timeline: Timeline


def plan_stages_in_turn(profile: LayerProfile, server: Server, samples: int) -> TurnsPlan:
    """The fastest of all that fit.

    Raises `OptionError` where the profile is no chain or has no peaks, `PlacementError` where
    nothing fits.
    """
    costs = PackCosts(profile)
    drafts = [
        draft
        for each in range(1, samples + 1)
        if samples % each == 0
        for draft in _drafts(costs, server, each, samples // each)
    ]
    if not drafts:
        raise _nothing_fits(costs, server, samples)
    best, best_s = drafts[0], inf
    for draft in sorted(drafts, key=lambda draft: draft.least_s):
        if draft.least_s * _ROUNDING >= best_s:
            break
        step_s = last_end_s(draft.works())
        if step_s < best_s:
            best, best_s = draft, step_s
    return simulated(best)


@dataclass(frozen=True)
class Draft:
    """Packs with micro-batches of a size; the k-th pack is on device k mod the devices."""

    costs: PackCosts
    server: Server
    packs: Packs
    each: int
    micro_batches: int

    def packs_of(self, device: int) -> list[int]:
        """The stages of a device."""
        return list(range(device, len(self.packs), self.server.devices))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """What each device holds: the fullest of its turns, beside what enters and leaves."""
        return tuple(map(self._peak, range(self.server.devices)))

    def _peak(self, device: int) -> int:
        own = [self.packs[k] for k in self.packs_of(device)]
        ends = sum(
            self.costs.input_bytes(self.each, layer)
            for pack in own
            for layer in (pack.first, pack.last)
            if layer  # what the first stage reads is the batch, and has no gradient
        )
        turn = max(self.costs.backward_peak_bytes(self.each, pack) for pack in own)
        return round(turn + 2 * self.micro_batches * ends)

    @cached_property
    def least_s(self) -> float:
        """The busiest device."""
        return max(
            sum(work.seconds for work in self.works_of(device) if work.lane == _lane(device))
            for device in range(self.server.devices)
        )

    def works(self) -> Iterator[Work]:
        """Those of all devices."""
        for device in range(self.server.devices):
            yield from self.works_of(device)

    def works_of(self, device: int) -> Iterator[Work]:
        """What the device does, in its order, and what it sends."""
        *earlier, last = self.packs_of(device)
        there: int | None = None
        for k in (*earlier, last):
            yield from self._forwards(k, device)
            there = k
        for k in (last, *reversed(earlier)):
            is_loss = k == len(self.packs) - 1
            yield from self._backwards(k, device, fetched=k == there, is_loss=is_loss)
        own = [self.packs[k] for k in self.packs_of(device)]
        seconds = sum(map(self.costs.update_s, own))
        ends = [f"gradients of stage {self.packs_of(d)[0]}" for d in range(self.server.devices)]
        updated = self.server.update_s(seconds, shared=True)
        yield Work(f"update of device {device}", _lane(device), updated, tuple(ends))

    def _forwards(self, k: int, device: int) -> Iterator[Work]:
        pack, last = self.packs[k], k == len(self.packs) - 1
        seconds = self.costs.forward_s(self.each, pack)
        if last:
            seconds += self.costs.backward_s(self.each, pack)
        for i in range(self.micro_batches):
            after = (f"activations {i} to stage {k}",) if k else ()
            if i == 0:
                yield self._fetch(f"parameters of stage {k}", pack, device, after)
            yield Work(f"forward {i} of stage {k}", _lane(device), seconds, after)
            if not last:
                made = f"forward {i} of stage {k}"
                yield self._send(
                    f"activations {i} to stage {k + 1}", pack.last, device, k + 1, made
                )

    def _backwards(self, k: int, device: int, *, fetched: bool, is_loss: bool) -> Iterator[Work]:
        pack = self.packs[k]
        seconds = 0.0
        if not is_loss:
            seconds = sum(
                cost(self.each, pack) for cost in (self.costs.forward_s, self.costs.backward_s)
            )
        made = f"forward {self.micro_batches - 1} of stage {k}"
        for place, i in enumerate(reversed(range(self.micro_batches))):
            after = () if is_loss else (f"gradients {i} to stage {k}",)
            if place == 0 and not fetched:
                yield self._fetch(f"parameters of stage {k} again", pack, device, after)
            if not is_loss:
                made = f"backward {i} of stage {k}"
                yield Work(made, _lane(device), seconds, after)
            if k:
                name = f"gradients {i} to stage {k - 1}"
                yield self._send(name, pack.first, device, k - 1, made)
        home_s = self.costs.weight_bytes(pack) / self._swap_bytes_per_s
        yield Work(f"gradients of stage {k}", _lane(device), home_s)

    def _fetch(self, name: str, pack: Pack, device: int, after: tuple[str, ...]) -> Work:
        seconds = self.costs.weight_bytes(pack) / self._swap_bytes_per_s
        return Work(name, _lane(device), seconds, after)

    def _send(self, name: str, layer: int, device: int, to: int, made: str) -> Work:
        nbytes = self.costs.input_bytes(self.each, layer)
        there = to % self.server.devices
        seconds = 0.0 if there == device else nbytes / self.server.peer_bytes_per_s
        return Work(name, f"device{device} to device{there}", seconds, (made,))

    @property
    def _swap_bytes_per_s(self) -> float:
        share = self.server.swap_bytes_per_s / self.server.devices
        return min(self.server.link_bytes_per_s, share)


def _drafts(costs: PackCosts, server: Server, each: int, micro_batches: int) -> Iterator[Draft]:
    alone = [Pack(layer, layer + 1) for layer in range(len(costs.layers))]
    inputs = [costs.input_bytes(each, pack.first) for pack in alone]
    own = [
        costs.backward_peak_bytes(each, pack) - entering
        for pack, entering in zip(alone, inputs, strict=True)
    ]
    seconds = [costs.forward_s(each, pack) + costs.backward_s(each, pack) for pack in alone]
    found: dict[Packs, None] = {}
    for weights in (own, seconds):
        for count in range(server.devices, len(alone) + 1, server.devices):
            packs = cut_at_shares(weights, count)
            if packs is None:
                continue
            draft = Draft(costs, server, packs, each, micro_batches)
            if max(draft.peak_bytes) <= server.cap_bytes and packs not in found:
                found[packs] = None
                yield draft


def _nothing_fits(costs: PackCosts, server: Server, samples: int) -> CotrainError:
    layers = len(costs.layers)
    packs = cut_at_shares([1.0] * layers, layers - layers % server.devices)
    if samples < 1 or layers < server.devices or packs is None:
        return OptionError(
            f"{samples} samples in {layers} layers cannot be dealt to {server.devices} devices in "
            "turn; take fewer devices"
        )
    missing = max(Draft(costs, server, packs, 1, samples).peak_bytes) - round(server.cap_bytes)
    return PlacementError(
        f"the smallest stages need {format_bytes(max(1, missing))} more on {server.devices} "
        "devices, one sample at a time, with what goes between them for all samples; cut layers "
        "in parts, or take larger devices or fewer samples",
        shortfall_bytes=max(1, missing),
    )


def simulated(draft: Draft) -> TurnsPlan:
    """The step of a draft."""
    works = list(draft.works())
    lanes = [LaneSpec(lane) for lane in dict.fromkeys(work.lane for work in works)]
    timeline = simulate(works, lanes)
    return TurnsPlan(
        draft.packs,
        draft.server.devices,
        draft.each,
        draft.micro_batches,
        max(span.end_s for span in timeline.spans),
        lower_bound(works, lanes),
        draft.peak_bytes,
        _moved(draft),
        timeline,
    )


def _moved(draft: Draft) -> dict[str, float]:
    """Bytes of a step, all devices together."""
    costs, packs = draft.costs, draft.packs
    weights = [costs.weight_bytes(pack) for pack in packs]
    stays = sum(weights[-draft.server.devices :])  # from its forwards to its backwards
    crossing = sum(costs.input_bytes(draft.each, pack.first) for pack in packs[1:])
    between = 2 * draft.micro_batches * crossing if draft.server.devices > 1 else 0.0
    return {
        "host to devices": 2 * sum(weights) - stays,
        "devices to host": sum(weights),
        "between devices of a machine": between,
    }


def _lane(device: int) -> str:
    return f"device{device}"
