"""Greedy: decisions one by one, the cheapest per byte at the peak first, until the step fits.

In: `Choices` and budgets. Out: `Decisions`. No solver: it is the incumbent that the program has to
beat, and the fallback where no solver is installed. Memory is counted as if every copy were made at
the last moment; `schedule` says by how much that is too little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.placement.choices import Activations, Choices, Decisions, Way, Weights
from cotrain_compile.plan import UpdateMode

Profile = NDArray[np.float64]


def greedy(choices: Choices, budget_bytes: float, host_bytes: float = math.inf) -> Decisions:
    """Decisions under which about `budget_bytes` do, or, where nothing does, the fewest bytes.

    None of them takes the host beyond `host_bytes`.
    """
    state = _State(choices, host_bytes)
    while state.peak_bytes > budget_bytes and state.improve():
        pass
    return state.decisions()


def least_memory(choices: Choices) -> Decisions:
    """Everything leaves: every update on the host, every weight fetched as often as it can be."""
    ways = tuple(max(bundle.ways, key=_frugality) for bundle in choices.weights)
    return Decisions(ways, (True,) * len(choices.activations))


def _frugality(way: Way) -> tuple[bool, int]:
    return way.mode is None or way.on_host, way.trips


@dataclass(frozen=True)
class _Change:
    """Activations `index` leave, or weights `index` are kept in another `way`; what that changes.

    `profile` has the bytes of the device at each checkpoint.
    """

    index: int
    way: Way | None
    seconds: float
    profile: Profile
    host_bytes: int


class _State:
    """Current decisions, the profile of memory over the checkpoints, and what may change."""

    def __init__(self, choices: Choices, host_bytes: float) -> None:
        self.choices, self.host_left = choices, host_bytes
        self.segments = np.array([segment for segment, _ in choices.checkpoints])
        self.used = np.array([float(nbytes) for _, nbytes in choices.checkpoints])
        self.ways = [bundle.ways[0] for bundle in choices.weights]
        self.away = [False] * len(choices.activations)
        for bundle in choices.weights:
            self.used += self._weights_profile(bundle, bundle.ways[0])
            self.host_left -= bundle.host_bytes(bundle.ways[0])
        self.options = list(self._options())
        self.change = np.array([option.profile for option in self.options])
        self.cost = np.array([option.seconds for option in self.options])
        self.on_host = np.array([option.host_bytes for option in self.options])

    @property
    def peak_bytes(self) -> float:
        return float(self.used.max())

    def decisions(self) -> Decisions:
        return Decisions(tuple(self.ways), tuple(self.away))

    def improve(self) -> bool:
        """Make the change that costs least per byte freed at the peak; False if none frees any."""
        if not self.options:
            return False
        freed = -self.change[:, int(self.used.argmax())]
        prices = np.where(freed > 0, np.maximum(self.cost, 0.0) / np.maximum(freed, 1.0), np.inf)
        prices[self.on_host > self.host_left] = np.inf
        best = int(prices.argmin())
        if not np.isfinite(prices[best]):
            return False
        made = self.options[best]
        self.used += made.profile
        self.host_left -= made.host_bytes
        if made.way is None:
            self.away[made.index] = True
            self._drop({best})
        else:
            self.ways[made.index] = made.way
            self._rebase(made.index, made.way)
        return True

    def _drop(self, gone: set[int]) -> None:
        keep = [i for i in range(len(self.options)) if i not in gone]
        self.options = [self.options[i] for i in keep]
        self.change, self.cost = self.change[keep], self.cost[keep]
        self.on_host = self.on_host[keep]

    def _rebase(self, index: int, way: Way) -> None:
        """Other ways of this bundle are now changes from `way`."""
        self._drop(
            {i for i, o in enumerate(self.options) if o.way is not None and o.index == index}
        )
        bundle = self.choices.weights[index]
        fresh = list(self._changes(index, bundle, way))
        if fresh:
            self.options += fresh
            self.change = np.vstack([self.change, [option.profile for option in fresh]])
            self.cost = np.append(self.cost, [option.seconds for option in fresh])
            self.on_host = np.append(self.on_host, [option.host_bytes for option in fresh])

    def _options(self) -> Iterable[_Change]:
        for index, activations in enumerate(self.choices.activations):
            profile = self._away_profile(activations)
            yield _Change(index, None, self._away_s(activations), profile, activations.nbytes)
        for index, bundle in enumerate(self.choices.weights):
            yield from self._changes(index, bundle, bundle.ways[0])

    def _changes(self, index: int, bundle: Weights, now: Way) -> Iterable[_Change]:
        """From the way `now` to every other that is not cheaper (no way back)."""
        base_s, base = self._way_s(bundle, now), self._weights_profile(bundle, now)
        for way in bundle.ways:
            seconds = self._way_s(bundle, way)
            if way != now and seconds >= base_s:
                profile = self._weights_profile(bundle, way) - base
                host_bytes = bundle.host_bytes(way) - bundle.host_bytes(now)
                yield _Change(index, way, seconds - base_s, profile, host_bytes)

    def _within(self, first: int, last: int) -> Profile:
        return ((self.segments >= first) & (self.segments <= last)).astype(np.float64)

    def _away_profile(self, bundle: Activations) -> Profile:
        return -bundle.nbytes * self._within(bundle.leaves + 1, bundle.returns - 1)

    def _away_s(self, bundle: Activations) -> float:
        machine = self.choices.problem.machine
        return machine.d2h.seconds(bundle.nbytes) + machine.h2d.seconds(bundle.nbytes)

    def _weights_profile(self, bundle: Weights, way: Way) -> Profile:
        everywhere = float(bundle.param_bytes if way.trips == 0 else 0)
        if way.mode not in (None, UpdateMode.HOST, UpdateMode.HOST_STREAMED):
            resident = way.mode is UpdateMode.RESIDENT
            everywhere += bundle.kept_state_bytes + bundle.state_bytes * resident
        profile = np.full(len(self.segments), everywhere)
        if way.trips == 0:
            profile += bundle.kept.nbytes * self._within(bundle.kept.made, self.choices.tail)
        if way.trips and not bundle.thin:
            profile += bundle.fetched_bytes * self._within(bundle.first, bundle.last)
        if way.trips == 2:
            profile -= bundle.fetched_bytes * self._within(bundle.leaves + 1, bundle.returns - 1)
        if way.mode is not None:
            leaves_early = way.on_host or way.gradient_away
            last = bundle.gradient_used if leaves_early else bundle.release
            profile += bundle.gradient_bytes * self._within(bundle.gradient_made, last)
        return profile

    def _way_s(self, bundle: Weights, way: Way) -> float:
        """Seconds that a way takes on whatever it keeps busy longest."""
        machine = self.choices.problem.machine
        up = bundle.fetched_bytes * way.trips + bundle.gradient_bytes * way.gradient_away
        down = bundle.gradient_bytes * (way.gradient_away or way.on_host)
        if way.mode is UpdateMode.STREAMED:
            up += bundle.state_bytes
            down += bundle.state_bytes + bundle.param_bytes * (way.trips > 0)
        if way.mode is UpdateMode.HOST:
            up, down = up + bundle.param_bytes, down + bundle.param_bytes
        up += sum(nbytes for _, nbytes in bundle.kept.up(way, self.choices.tail))
        down += sum(nbytes for _, nbytes in bundle.kept.down(way))
        link_s = max(up / machine.h2d.bytes_per_s, down / machine.d2h.bytes_per_s)
        if way.on_host:
            return max(bundle.host_s, link_s)
        return link_s + (bundle.device_s if way.mode is not None else 0.0)
