"""Greedy: decisions one by one, the cheapest per byte at the peak first, until the step fits.

In: a `DecisionSpace` and budgets. Out: `Decisions`. No solver: it is the incumbent that the program
has to beat, and the fallback where no solver is installed. Memory is counted as if every copy were
made at the last moment; `schedule` says by how much that is too little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.placement.decisions.decisions import Decisions, DecisionSpace
from cotrain_compile.placement.decisions.effects import Effect, Flow
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
    return _decisions(space, _most_frugal(space))


def least_bytes(space: DecisionSpace) -> float:
    """What `least_memory` needs, as far as buckets can tell."""
    chosen = zip(space.effects, _most_frugal(space), strict=True)
    held = _profiles(space, (effects[index] for effects, index in chosen))
    return float(sum(held, _undecided(space)).max())


def _most_frugal(space: DecisionSpace) -> list[int]:
    """The number of the strategy of each cluster that holds least, activations first."""

    def frugality(effect: Effect) -> tuple[bool, int, float]:
        on_device = effect.update is not None and effect.update.tier is Tier.DEVICE
        return on_device, _held(effect, space.epilogue), -effect.link_bytes(Lane.H2D)

    return [
        min(range(len(effects)), key=[frugality(effect) for effect in effects].__getitem__)
        for effects in space.effects
    ]


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


class _State:
    """Current decisions, and the profile of memory over the checkpoints, `used`.

    The strategies of all clusters are rows: `profiles` has what each takes of the device at every
    checkpoint, `on_host` of the host in some buckets, `seconds` and `on_disk` what it takes else,
    `cluster` whose it is. `chosen` is the row of each cluster.
    """

    def __init__(self, space: DecisionSpace, host_bytes: float) -> None:
        self.space, machine = space, space.problem.machine
        effects = space.effects
        counts = [len(each) for each in effects]
        self.first = np.cumsum([0, *counts[:-1]]) if counts else np.zeros(0, dtype=np.int64)
        self.cluster = np.repeat(np.arange(len(counts)), counts)
        self.chosen = self.first.copy()
        rows = [effect for each in effects for effect in each]
        activations = sum(counts[: len(space.activations)])
        self.profiles = np.array([*_profiles(space, rows)])
        self.seconds = np.array(
            [
                _round_trip_s(effect, machine) if row < activations else _busy_s(effect, machine)
                for row, effect in enumerate(rows)
            ]
        )
        buckets = space.host_buckets
        self.on_host = np.array([[float(e.most_on_host(k)) for k in buckets] for e in rows])
        self.on_disk = np.array([float(effect.disk_bytes) for effect in rows])
        self.used = _undecided(space)
        self.host_left = np.full(len(buckets), float(host_bytes))
        self.disk_left = float(space.problem.disk_bytes)
        if rows:
            self.used += self.profiles[self.chosen].sum(axis=0)
            self.host_left -= self.on_host[self.chosen].sum(axis=0)

    @property
    def peak_bytes(self) -> float:
        return float(self.used.max())

    def decisions(self) -> Decisions:
        return _decisions(self.space, (self.chosen - self.first).tolist())

    def improve(self) -> bool:
        """Make the change that costs least per byte freed at the peak; False if none frees any.

        Never to a strategy that is cheaper: that would be the way back.
        """
        if not len(self.cluster):
            return False
        peak, now = int(self.used.argmax()), self.chosen[self.cluster]
        freed = self.profiles[now, peak] - self.profiles[:, peak]
        cost = self.seconds - self.seconds[now]
        more = self.on_host - self.on_host[now]
        allowed = (freed > 0) & (cost >= 0)
        allowed &= ((more <= 0) | (more <= self.host_left)).all(axis=1)
        allowed &= self.on_disk - self.on_disk[now] <= self.disk_left
        prices = np.where(allowed, cost / np.maximum(freed, 1.0), np.inf)
        best = int(prices.argmin())
        if not allowed[best]:
            return False
        before = now[best]
        self.used += self.profiles[best] - self.profiles[before]
        self.host_left -= self.on_host[best] - self.on_host[before]
        self.disk_left -= float(self.on_disk[best] - self.on_disk[before])
        self.chosen[self.cluster[best]] = best
        return True


def _undecided(space: DecisionSpace) -> Profile:
    """Bytes at each checkpoint whatever is decided."""
    return np.array([float(nbytes) for _, nbytes in space.checkpoints])


def _profiles(space: DecisionSpace, effects: Iterable[Effect]) -> Iterator[Profile]:
    """Bytes that each effect holds at every checkpoint, with every copy at the last moment."""
    buckets = np.array([bucket for bucket, _ in space.checkpoints])
    for effect in effects:
        profile = np.zeros(len(buckets))
        for hold in effect.holds:
            last = space.epilogue if hold.last is None else hold.last
            profile += hold.nbytes * ((buckets >= hold.first) & (buckets <= last))
        yield profile


def _busy_s(effect: Effect, machine: Machine) -> float:
    """Seconds that an effect takes on whatever it keeps busy longest."""
    link_s = max(
        machine.copy_s(effect.link_bytes(lane), *machine.links[lane].ends, copies=0)
        for lane in (Lane.H2D, Lane.D2H)
    )
    if effect.disk_bytes:
        for flows in ((Flow.DISK_READ, Flow.DISK_FETCH), (Flow.DISK_WRITE, Flow.DISK_STORE)):
            ends = machine.links[flows[0].lane].ends
            link_s = max(link_s, machine.copy_s(effect.bytes_of(*flows), *ends, copies=0))
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
