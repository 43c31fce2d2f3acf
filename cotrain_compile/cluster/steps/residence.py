"""Residence: which of a rank's units rest on its host, as little as makes the others fit.

In: what a rank takes of its device and of its host, and what these have. Out: `Residence`s, each of
which fits, or what is missing where none does. No torch.

Whole units are offloaded, counted from the first. First go optimizer states, unit by unit: the host
updates these. Then gradients, which the host adds up over micro-batches. Then parameters, which
come for each forward and backward. Apart from these, what layers keep for their backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


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
