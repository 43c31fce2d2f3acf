"""Away: which of a rank's units rest on its host, as little as makes the others fit.

In: the `RankMemory` of a rank, the memory of its device and of its host. Out: `Away`s, each of
which fits, or what is missing where none does. No torch.

Away are whole units, counted from the first. First go optimizer states, unit by unit: the host
updates these. Then gradients, which the host adds up over micro-batches. Then parameters, which
come for each forward and backward. Apart from these, what layers keep for their backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Away:
    """The first so many units whose states, gradients, parameters and kept values are away."""

    states: int = 0
    gradients: int = 0
    params: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        if not self.states >= self.gradients >= self.params >= 0 <= self.kept:
            raise ValueError(f"{self!r}: gradients go after states, and parameters after gradients")

    def in_words(self, units: int) -> str:
        """What is away, of so many units; "" where nothing is."""
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


NOTHING = Away()


@dataclass(frozen=True)
class Room:
    """What a choice takes of a device and of a rank's host, and what these have.

    Of `units` units; parameters may be away where they are `streamed` anyway.
    """

    units: int
    streamed: bool
    peak_bytes: Callable[[Away], int]
    host_bytes: Callable[[Away], int]
    capacity_bytes: int
    host_capacity_bytes: int

    def fits(self, away: Away) -> bool:
        """Whether the device has room for the rest, and the host for what is away."""
        return not self.missing_bytes(away) and self._on_host(away)

    def missing_bytes(self, away: Away) -> int:
        """On the device."""
        return max(0, self.peak_bytes(away) - self.capacity_bytes)

    def placements(self) -> list[Away]:
        """Those that fit with little away: nothing, or as few units of one kind beside others."""
        if self.fits(NOTHING):
            return [NOTHING]
        return [away for away in dict.fromkeys(self._tried()) if self.fits(away)]

    def nearest(self) -> Away:
        """What leaves least missing on the device, of what the host has room for."""
        states = _first(self.units, lambda count: not self._on_host(Away(count + 1)))
        tried = [NOTHING, Away(states)]
        tried += [ladder(whole * self.units, self.units) for whole in self._whole]
        tried += [replace(away, kept=self._all_kept) for away in tried]
        return min(filter(self._on_host, tried), key=self.missing_bytes)

    def _tried(self) -> Iterator[Away]:
        ends = [ladder(whole * self.units, self.units) for whole in self._whole]
        for kept in (0, self._all_kept):
            yield self._least_resting(kept)
        for resting in ends:
            yield resting
            yield self._least_kept(resting)

    def _least_resting(self, kept: int) -> Away:
        def rested(steps: int) -> Away:
            return replace(ladder(steps, self.units), kept=kept)

        last = self._whole[-1] * self.units
        return rested(_first(last, lambda steps: not self.missing_bytes(rested(steps))))

    def _least_kept(self, resting: Away) -> Away:
        def kept(count: int) -> Away:
            return replace(resting, kept=count)

        return kept(_first(self._all_kept, lambda count: not self.missing_bytes(kept(count))))

    @property
    def _all_kept(self) -> int:
        """All units but the last one, which wants what it keeps at once."""
        return max(self.units - 1, 0)

    @property
    def _whole(self) -> range:
        """How many kinds of what rests may be away: none, states, gradients, parameters."""
        return range(4 if self.streamed else 3)

    def _on_host(self, away: Away) -> bool:
        return self.host_bytes(away) <= self.host_capacity_bytes


def ladder(steps: int, units: int) -> Away:
    """One unit more each step: the states of all, then the gradients of all, then parameters."""
    return Away(*(min(max(steps - kind * units, 0), units) for kind in range(3)))


def _first(last: int, holds: Callable[[int], bool]) -> int:
    """The first number up to `last` for which it holds, where it goes on to hold; else `last`."""
    return bisect_left(range(last), True, key=holds)
