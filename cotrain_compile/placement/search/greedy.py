"""Greedy: decisions one by one, the cheapest per byte at the peak first, until the step fits.

In: a `DecisionSpace` and budgets. Out: `Decisions`. No solver: it is the incumbent that the program
has to beat, and the fallback where no solver is installed. Memory is counted as if every copy were
made at the last moment; `schedule` says by how much that is too little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.decisions.decisions import Decisions, DecisionSpace
from cotrain_compile.placement.decisions.effects import Effect
from cotrain_compile.plan import Lane

Profile = NDArray[np.float64]


def greedy(space: DecisionSpace, budget_bytes: float, host_bytes: float = math.inf) -> Decisions:
    """Decisions under which about `budget_bytes` do, or, where nothing does, the fewest bytes.

    None of them takes the host beyond `host_bytes`.
    """
    state = _State(space, host_bytes)
    while state.peak_bytes > budget_bytes and state.improve():
        pass
    return state.decisions()


def least_memory(space: DecisionSpace) -> Decisions:
    """Everything leaves: no update on the device, and the least is held for the shortest time.

    Where buckets are too long to tell, what is fetched more often.
    """

    def frugality(effect: Effect) -> tuple[bool, int, float]:
        on_device = effect.update is not None and effect.update.tier is Tier.DEVICE
        return on_device, _held(effect, space.epilogue), -effect.link_bytes(Lane.H2D)

    return _decisions(
        space,
        [
            min(range(len(effects)), key=[frugality(effect) for effect in effects].__getitem__)
            for effects in space.effects
        ],
    )


def _decisions(space: DecisionSpace, chosen: Sequence[int]) -> Decisions:
    """`chosen` is the number of the strategy of each cluster, activations first."""
    count = len(space.activations)
    return Decisions(
        tuple(d.strategies[s] for d, s in zip(space.params, chosen[count:], strict=True)),
        tuple(d.strategies[s] for d, s in zip(space.activations, chosen[:count], strict=True)),
    )


def _held(effect: Effect, epilogue: int) -> int:
    """Bytes times buckets that an effect holds on the device."""
    return sum(
        hold.nbytes * ((epilogue if hold.last is None else hold.last) - hold.first + 1)
        for hold in effect.holds
    )


@dataclass(frozen=True)
class _Change:
    """Cluster `index` gets strategy `option`; what that changes.

    `profile` has the bytes of the device at each checkpoint.
    """

    index: int
    option: int
    seconds: float
    profile: Profile
    host_bytes: int


class _State:
    """Current decisions, the profile of memory over the checkpoints, and what may change."""

    def __init__(self, space: DecisionSpace, host_bytes: float) -> None:
        self.space, self.machine, self.host_left = space, space.problem.machine, host_bytes
        self.buckets = np.array([bucket for bucket, _ in space.checkpoints])
        self.used = np.array([float(nbytes) for _, nbytes in space.checkpoints])
        self.effects = space.effects
        self.chosen = [0] * len(self.effects)
        for effects in self.effects:
            self.used += self._profile(effects[0])
            self.host_left -= effects[0].host_bytes
        every = range(len(self.effects))
        self.options = [change for index in every for change in self._changes(index)]
        self.change = np.array([option.profile for option in self.options])
        self.cost = np.array([option.seconds for option in self.options])
        self.on_host = np.array([option.host_bytes for option in self.options])

    @property
    def peak_bytes(self) -> float:
        return float(self.used.max())

    def decisions(self) -> Decisions:
        return _decisions(self.space, self.chosen)

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
        self.chosen[made.index] = made.option
        self._rebase(made.index)
        return True

    def _rebase(self, index: int) -> None:
        """Other strategies of this cluster are now changes from the one that is chosen."""
        keep = [i for i, option in enumerate(self.options) if option.index != index]
        fresh = list(self._changes(index))
        self.options = [*(self.options[i] for i in keep), *fresh]
        self.change, self.cost = self.change[keep], self.cost[keep]
        self.on_host = self.on_host[keep]
        if fresh:
            self.change = np.vstack([self.change, [option.profile for option in fresh]])
            self.cost = np.append(self.cost, [option.seconds for option in fresh])
            self.on_host = np.append(self.on_host, [option.host_bytes for option in fresh])

    def _changes(self, index: int) -> Iterable[_Change]:
        """From the strategy of a cluster to every other that is not cheaper (no way back)."""
        effects, chosen = self.effects[index], self.chosen[index]
        now = effects[chosen]
        seconds_of = _round_trip_s if index < len(self.space.activations) else _busy_s
        now_s, profile = seconds_of(now, self.machine), self._profile(now)
        for option, effect in enumerate(effects):
            seconds = seconds_of(effect, self.machine)
            if option != chosen and seconds >= now_s:
                change = self._profile(effect) - profile
                host_bytes = effect.host_bytes - now.host_bytes
                yield _Change(index, option, seconds - now_s, change, host_bytes)

    def _profile(self, effect: Effect) -> Profile:
        profile = np.zeros(len(self.buckets))
        for hold in effect.holds:
            last = self.space.epilogue if hold.last is None else hold.last
            profile += hold.nbytes * ((self.buckets >= hold.first) & (self.buckets <= last))
        return profile


def _busy_s(effect: Effect, machine: Machine) -> float:
    """Seconds that an effect takes on whatever it keeps busy longest."""
    link_s = max(
        machine.copy_s(effect.link_bytes(lane), *machine.links[lane].ends, copies=0)
        for lane in (Lane.H2D, Lane.D2H)
    )
    update = effect.update
    if update is not None and update.tier is Tier.HOST:
        return max(update.seconds, link_s)
    return link_s + (update.seconds if update is not None else 0.0)


def _round_trip_s(effect: Effect, machine: Machine) -> float:
    """Seconds that an effect takes whose copies wait for each other."""
    moved = ((lane, int(effect.link_bytes(lane))) for lane in (Lane.D2H, Lane.H2D))
    copies_s = sum(
        machine.copy_s(nbytes, *machine.links[lane].ends) for lane, nbytes in moved if nbytes
    )
    return copies_s + max(0.0, effect.only_device_s)
