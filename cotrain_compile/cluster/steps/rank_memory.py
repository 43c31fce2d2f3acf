"""Rank memory: what a rank that has all layers, or a part of each, holds on its device and host.

In: a profile, the samples of a micro-batch, in how many parts layers are split, and what rests on
the host. Out: bytes that are never passed, however long works take. No torch.

    rests      of N parts: what stays of parameters, gradients and states, / N; all buffers
    whole      parameters that are gathered or fetched: all, or those of two neighbouring units, or
               of one at a time
    leaving    gradients of as many units that are scattered or go to the host
    kept       until the backward of a layer, by it and all layers before it; of those offloaded, by
               its unit and the one before
    working    of a layer: its peak beyond its parameters, gradients and what it keeps, and the
               gradients of all outputs that it makes or that wait for the layers before it

The largest sum over all layers is the peak. Nothing is gathered or scattered where N is 1.

Which units rest on the host (`RankDemand`, `Residence`) is as little as makes the others fit: whole
units, counted from the first. First go optimizer states, unit by unit: the host updates these. Then
gradients, which the host adds up over micro-batches. Then parameters, which come for each forward
and backward. Apart from these, what layers keep for their backward. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from cotrain_compile.cluster.model.profiles import BATCH, LayerProfile, Unit, units_of


@dataclass(frozen=True)
class Residence:
    """How many units, from the first on, have states, gradients, parameters, kept values on the
    host."""

    states: int = 0
    gradients: int = 0
    params: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        if not self.states >= self.gradients >= self.params >= 0 <= self.kept:
            raise ValueError(f"{self!r}: gradients go after states, and parameters after gradients")

    def in_words(self, units: int) -> str:
        """What is on the host, of so many units; "" where nothing is."""
        counts = {
            "states": self.states,
            "gradients": self.gradients,
            "parameters": self.params,
            "kept values": self.kept,
        }
        said = [
            what if count == units else f"{what} of {count} of {units} units"
            for what, count in counts.items()
            if count
        ]
        return f"on the host {', '.join(said)}" if said else ""


ON_DEVICE = Residence()


@dataclass(frozen=True)
class RankDemand:
    """What a choice takes of a device and of a rank's host, and what these have.

    Of `units` units; parameters may be offloaded where they are `streamed` anyway.
    """

    units: int
    streamed: bool
    peak_bytes: Callable[[Residence], int]
    host_bytes: Callable[[Residence], int]
    capacity_bytes: int
    host_capacity_bytes: int

    def fits(self, residence: Residence) -> bool:
        """Whether the device has memory for the rest, and the host for what is offloaded."""
        return not self.missing_bytes(residence) and self._on_host(residence)

    def missing_bytes(self, residence: Residence) -> int:
        """On the device."""
        return max(0, self.peak_bytes(residence) - self.capacity_bytes)

    def fitting(self) -> list[Residence]:
        """Those that fit with little on the host: nothing, or few units of a kind beside others."""
        if self.fits(ON_DEVICE):
            return [ON_DEVICE]
        return [residence for residence in dict.fromkeys(self._tried()) if self.fits(residence)]

    def nearest(self) -> Residence:
        """What leaves least missing on the device, of what the host has memory for."""
        states = _first(self.units, lambda count: not self._on_host(Residence(count + 1)))
        tried = [ON_DEVICE, Residence(states)]
        tried += [ladder(whole * self.units, self.units) for whole in self._whole]
        tried += [replace(residence, kept=self._all_kept) for residence in tried]
        return min(filter(self._on_host, tried), key=self.missing_bytes)

    def _tried(self) -> Iterator[Residence]:
        ends = [ladder(whole * self.units, self.units) for whole in self._whole]
        for kept in (0, self._all_kept):
            yield self._least_resting(kept)
        for resting in ends:
            yield resting
            yield self._least_kept(resting)

    def _least_resting(self, kept: int) -> Residence:
        def rested(steps: int) -> Residence:
            return replace(ladder(steps, self.units), kept=kept)

        last = self._whole[-1] * self.units
        return rested(_first(last, lambda steps: not self.missing_bytes(rested(steps))))

    def _least_kept(self, resting: Residence) -> Residence:
        def kept(count: int) -> Residence:
            return replace(resting, kept=count)

        return kept(_first(self._all_kept, lambda count: not self.missing_bytes(kept(count))))

    @property
    def _all_kept(self) -> int:
        """All units but the last one, which wants what it keeps at once."""
        return max(self.units - 1, 0)

    @property
    def _whole(self) -> range:
        """How many kinds of what rests may be offloaded: none, states, gradients, parameters."""
        return range(4 if self.streamed else 3)

    def _on_host(self, residence: Residence) -> bool:
        return self.host_bytes(residence) <= self.host_capacity_bytes


def ladder(steps: int, units: int) -> Residence:
    """One unit more each step: the states of all, then the gradients of all, then parameters."""
    return Residence(*(min(max(steps - kind * units, 0), units) for kind in range(3)))


def _first(last: int, holds: Callable[[int], bool]) -> int:
    """The first number up to `last` for which it holds, where it goes on to hold; else `last`."""
    return bisect_left(range(last), True, key=holds)


@dataclass(frozen=True)
class WorkingMemory:
    """What layers keep and take at work on a micro-batch of `samples`, parameters apart."""

    profile: LayerProfile
    samples: int

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return units_of(self.profile)

    def most_bytes(self, offloaded: int) -> float:
        """At the fullest layer, where what the first `offloaded` units keep is on the host.

        A unit that computes has its own, and that of the unit before: it leaves still, or comes.
        """
        if offloaded not in self._most:
            self._most[offloaded] = self._fullest(offloaded)
        return self._most[offloaded]

    @cached_property
    def _most(self) -> dict[int, float]:
        return {}

    @cached_property
    def kept(self) -> list[list[float]]:
        """Of each unit what it keeps up to each of its layers."""
        return [
            list(accumulate(layer.kept(self.samples) for layer in unit.layers))
            for unit in self.units
        ]

    def _fullest(self, offloaded: int) -> float:
        kept = [held[-1] for held in self.kept]
        most = resting = 0.0
        working = iter(self.beside)
        for i, held_by in enumerate(self.kept):
            before = kept[i - 1] if 0 < i <= offloaded else 0.0
            for held in held_by:
                own = kept[i] if i < offloaded else resting + held
                most = max(most, before + own + next(working))
            resting += kept[i] if i >= offloaded else 0.0
        return most

    @cached_property
    def beside(self) -> list[float]:
        """Of each layer what its backward takes beside what rests and is kept."""
        out = _output_bytes(self.profile, self.samples)
        last = {
            name: max((self.profile.index[reader] for reader in readers), default=-1)
            for name, readers in self.profile.readers.items()
        }
        beside = []
        for i, layer in enumerate(self.profile.layers):
            waiting = [out[j.name] for j in self.profile.layers[: i + 1] if last[j.name] >= i]
            held = layer.param_bytes + layer.buffer_bytes + layer.kept(self.samples)
            peak = layer.backward_peak(self.samples) - layer.grad_bytes
            if layer.forward_peak_bytes:
                peak = max(peak, layer.forward_peak(self.samples))
            beside.append(max(0.0, peak - held) + sum(waiting))
        return beside


@dataclass(frozen=True)
class RankMemory:
    """Of layers in `parts`, in a step of so many micro-batches.

    `streamed`: a split parameter is whole around its use alone, else from forward to backward.
    `ahead` is 2 or 1: as many units are whole, or leave, at once.
    """

    working: WorkingMemory
    parts: int
    streamed: bool
    micro_batches: int = 1
    ahead: int = 2

    def peak_bytes(self, residence: Residence) -> int:
        """Of the device."""
        units = self.working.units
        rests = (
            sum(unit.state_bytes for unit in units[residence.states :])
            + sum(unit.grad_bytes for unit in units[residence.gradients :])
            + sum(unit.param_bytes for unit in units[residence.params :])
        )
        buffers = sum(layer.buffer_bytes for layer in self.working.profile.layers)
        passing = self._whole_bytes(residence.params) + self._leaving_bytes(residence.gradients)
        return (
            ceil(rests / self.parts)
            + buffers
            + ceil(passing)
            + ceil(self.working.most_bytes(residence.kept))
        )

    def host_bytes(self, residence: Residence) -> int:
        """Of the rank's host: all of the units that it updates, with gradients that come to be
        added to those that rest there, and what is kept there."""
        units = self.working.units
        updated = sum(unit.resting_bytes for unit in units[: residence.states])
        coming = 2 * max([unit.grad_bytes for unit in units[: residence.gradients]], default=0)
        kept = sum(held[-1] for held in self.working.kept[: residence.kept])
        return ceil((updated + coming) / self.parts + kept)

    def _whole_bytes(self, offloaded: int) -> float:
        """Gathered parameters, and those that come from the host, at most.

        Behind the first unit's backward its forward of the next micro-batch may come.
        """
        split = self.parts > 1
        params = [
            unit.param_bytes * (split + (i < offloaded) / self.parts)
            for i, unit in enumerate(self.working.units)
        ]
        if split and not self.streamed:
            twice = self.micro_batches > 1 and self.ahead > 1
            return max(sum(params), 2 * params[0] if twice else 0)
        if self.ahead == 1:
            return max(params)
        return max([2 * params[0], *map(sum, pairwise(params))])

    def _leaving_bytes(self, offloaded: int) -> float:
        """Gradients that are not yet scattered, or not yet on the host, at most.

        Behind the first backward of them that of the last in the next micro-batch may come.
        """
        split = self.parts > 1
        grads = [
            unit.grad_bytes * (split + (i < offloaded) / self.parts)
            for i, unit in enumerate(self.working.units)
            if unit.grad_bytes and (split or i < offloaded)
        ]
        if not grads or self.ahead == 1:
            return max(grads, default=0.0)
        around = grads[0] + (grads[-1] if self.micro_batches > 1 else 0.0)
        return max([around, *map(sum, pairwise(grads))])


def _output_bytes(profile: LayerProfile, samples: int) -> dict[str, float]:
    """What each layer gives to those that read it; the most of what they say."""
    out = dict.fromkeys((BATCH, *profile.index), 0.0)
    for layer in profile.layers:
        for read in layer.reads:
            out[read.source] = max(out[read.source], read.nbytes.at(samples))
    return out
