"""Data-parallel step: what computes, is exchanged, is copied and is updated in a step.

In: units of layers, micro-batches, what becomes of parameters, what rests on hosts, the ring, and a
rank for each kind of device. Out: a `StageStep`. All devices of a kind do the same; each kind
computes, copies both ways and has its part of the host at once. One lane more is the network, where
exchanges take turns and wait for all kinds.

A turn is a forward or backward of a unit. Where parameters come to it, from the host, from the
ring or from one through the other, they come once the turn before the last has ended (`ahead` 2),
so that those of two turns are whole, or the last one (1); the last unit's stay from forward to
backward. Where all stay, those of the first micro-batch come as soon as the ring is free. Where
gradients leave after a backward, the next but one, or the next, waits until they have. What a unit
keeps and is offloaded goes to the host behind its forward, which the next forward but one waits
for, and comes back as parameters do. The update of a unit waits for all gradients, as one that
clips them does. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

from cotrain_compile.cluster.model.profiles import Unit
from cotrain_compile.cluster.steps.rank_memory import ON_DEVICE, Residence
from cotrain_compile.cluster.steps.stage_step import (
    EXCHANGES,
    Does,
    Rank,
    Ring,
    StageStep,
    StageTask,
)


class Sharding(StrEnum):
    """What becomes of parameters: REPLICATE keeps them whole; ONCE and AGAIN are of `shard`, and
    say whether what the forward of a micro-batch gathers stays for its backward."""

    REPLICATE = "replicate"
    ONCE = "gathered once"
    AGAIN = "gathered again"


@dataclass(frozen=True)
class Replicas:
    """Ranks that have all units, or a part of each; `ring` is None where there is one device.

    Of so many turns parameters are whole, and gradients leave, at once: `ahead` is 2 or 1. Where
    samples go by speed, `samples` has the largest micro-batch of each kind, in order of `ranks`.
    `rings` are beside the first: ranks that have the same part of a shard sum its gradients over
    `data`, and those that have the same experts theirs over `replicate`, where `experts` are
    divided.
    """

    units: tuple[Unit, ...]
    micro_batch: int
    micro_batches: int
    ranks: tuple[Rank, ...]
    ring: Ring | None
    sharding: Sharding = Sharding.REPLICATE
    residence: Residence = ON_DEVICE
    ahead: int = 2
    samples: tuple[int, ...] = ()
    rings: Mapping[str, Ring] = field(default_factory=dict)
    experts: bool = False

    @property
    def sharded(self) -> bool:
        return self.ring is not None and self.sharding is not Sharding.REPLICATE

    @property
    def parts(self) -> int:
        """In how many parts a layer rests."""
        return self.ring.ranks if self.ring and self.sharded else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each rank that of a micro-batch, at most."""
        return self.samples or (self.micro_batch,) * len(self.ranks)

    def by_rank(self, figure: Callable[[int], float]) -> float | tuple[float, ...]:
        """A figure of a micro-batch, of each rank where these differ."""
        if not self.samples:
            return figure(self.micro_batch)
        return tuple(map(figure, self.samples))

    def exchanges(self, unit: Unit) -> Iterator[tuple[Does, float, str]]:
        """What becomes of a unit's gradients, one behind the other, and over which ring."""
        own = unit.expert_grad_bytes if self.experts else 0.0
        shared = unit.grad_bytes - own
        if self.sharded:
            yield Does.SCATTER, unit.grad_bytes, ""
        elif self.ring:
            yield Does.SUM, shared, ""
        for name, nbytes in (("data", shared), ("replicate", own)):
            if name in self.rings and nbytes:
                yield Does.SUM, nbytes / self.parts, name


def data_parallel_step(replicas: Replicas) -> StageStep:
    """All that they do."""
    tasks = tuple(_Tasks(replicas).all())
    return StageStep(replicas.ranks, tasks, replicas.ring, replicas.rings)


def lanes_s(replicas: Replicas) -> Mapping[str, float]:
    """The seconds that each lane of the step is busy, by what each unit brings to it: no task is
    made for that."""
    return _busy_s(replicas, (_passes, _updates))


def passes_s(replicas: Replicas) -> float:
    """What forwards and backwards take at least: the busiest lane, updates apart."""
    return max(_busy_s(replicas, (_passes,)).values())


def least_s(replicas: Replicas) -> float:
    """What the step takes at least: updates come behind all that forwards and backwards do.

    Where one unit is whole at once (`ahead` 1), what comes for a turn comes behind the turn before,
    and a backward waits until the gradients of the one before have left.
    """
    passes, updates = _busy_s(replicas, (_passes,)), _busy_s(replicas, (_updates,))
    if not replicas.units[0].grad_bytes:  # updates do not wait for its last backward
        return max(passes[lane] + updates[lane] for lane in {*passes, *updates})
    before_s = max(passes.values())
    if replicas.ahead == 1:
        comes = _busy_s(replicas, (_comes,))
        # Behind the first unit's backward, forwards of the next micro-batch go on.
        leaves = _busy_s(replicas, (_leaves,), range(1, replicas.residence.gradients))
        for rank in replicas.ranks:
            turns_s = passes[rank.lane]
            before_s = max(before_s, turns_s + comes[rank.lane_of(Does.FETCH)])
            left_s = leaves[rank.lane_of(Does.STORE)] + leaves[rank.lane_of(Does.ADD)]
            before_s = max(before_s, turns_s + left_s)
    return before_s + max(updates.values(), default=0.0)


# What is done in a step, of how much, over which ring, and how often.
_Done = Iterator[tuple[Does, Any, str, int]]


def _busy_s(
    replicas: Replicas,
    kinds: Sequence[Callable[[Replicas, int], _Done]],
    numbers: Sequence[int] | None = None,
) -> defaultdict[str, float]:
    """The seconds that each lane is busy with that, for all units or those of `numbers`."""
    found: defaultdict[str, float] = defaultdict(float)
    for number in range(len(replicas.units)) if numbers is None else numbers:
        for does, amount, over, times in chain.from_iterable(of(replicas, number) for of in kinds):
            if does in EXCHANGES:
                ring = replicas.rings[over] if over else replicas.ring
                assert ring is not None  # who exchanges has a ring
                found[ring.lane] += times * ring.seconds(does, amount)
                continue
            for i, rank in enumerate(replicas.ranks):
                own = amount[i] if isinstance(amount, tuple) else amount
                found[rank.lane_of(does)] += times * rank.seconds(does, own)
    return found


def _passes(of: Replicas, number: int) -> _Done:
    """For the forwards and backwards of a unit, up to where its gradients wait for the update."""
    unit, count = of.units[number], of.micro_batches
    yield Does.COMPUTE, of.by_rank(unit.forward_s), "", count
    yield Does.COMPUTE, of.by_rank(unit.backward_s), "", count
    yield from _comes(of, number)
    if number < of.residence.kept:
        yield Does.STORE, of.by_rank(unit.kept_bytes), "", count
    yield from _leaves(of, number)


def _comes(of: Replicas, number: int) -> _Done:
    """What comes for the turns of a unit."""
    unit, count = of.units[number], of.micro_batches
    last = number == len(of.units) - 1
    brought = count * (1 if of.sharding is Sharding.ONCE or last else 2)
    if number < of.residence.params:
        yield Does.FETCH, unit.param_bytes / of.parts, "", brought
    if of.sharded:
        yield Does.GATHER, unit.param_bytes, "", brought
    if number < of.residence.kept:
        yield Does.FETCH, of.by_rank(unit.kept_bytes), "", count


def _leaves(of: Replicas, number: int) -> _Done:
    """What becomes of the gradients of a unit."""
    unit, count = of.units[number], of.micro_batches
    offloaded = number < of.residence.gradients
    if not unit.grad_bytes:
        return
    for does, nbytes, over in of.exchanges(unit):
        yield does, nbytes, over, count if of.sharded or offloaded else 1
    if offloaded or number < of.residence.states:
        yield Does.STORE, unit.grad_bytes / of.parts, "", count if offloaded else 1
    if offloaded:
        yield Does.ADD, unit.grad_bytes / of.parts, "", count - 1


def _updates(of: Replicas, number: int) -> _Done:
    """The update of a unit, and what comes back."""
    unit, rests, parts = of.units[number], of.residence, of.parts
    if number >= rests.states:
        yield Does.UPDATE, unit.touched_bytes / parts, "", 1
    elif unit.grad_bytes:
        yield Does.HOST_UPDATE, unit.touched_bytes / parts, "", 1
        if number >= rests.params:
            yield Does.FETCH, unit.param_bytes / parts, "", 1


_Turn = tuple[str, int, int]  # forward or backward, the micro-batch, the unit's number


class _Tasks:
    """The tasks of a step so far: what turns wait for."""

    def __init__(self, replicas: Replicas) -> None:
        self.of = replicas
        self.turns = list(_turns(replicas))
        self.arrived: dict[int, list[str]] = {}  # by turn, what it begins with
        self.left: list[str] = []  # of each backward whose gradients leave
        self.summed: list[str] = []  # what an update waits for
        self.stored: dict[int, str] = {}  # where what a unit keeps has gone
        self.home: dict[int, str] = {}  # where the last gradients of a unit have

    def all(self) -> Iterator[StageTask]:
        ahead = self.of.ahead
        for place in range(min(ahead, len(self.turns))):
            yield from self._bring(place)
        for place, (kind, i, number) in enumerate(self.turns):
            yield self._compute(place)
            if kind == "forward" and number < self.of.residence.kept:
                yield self._keep(place)
            if place + ahead < len(self.turns):
                yield from self._bring(place + ahead)
            if kind == "backward" and self.of.units[number].grad_bytes:
                yield from self._leave(self._name(place), i, number)
        yield from self._update()

    def _name(self, place: int) -> str:
        kind, i, number = self.turns[place]
        return f"{kind} {i} of {self.of.units[number].name}"

    def _compute(self, place: int) -> StageTask:
        kind, _, number = self.turns[place]
        unit = self.of.units[number]
        after = [*self.arrived[place]]
        if kind == "forward":
            seconds = self.of.by_rank(unit.forward_s)
            after += [self.stored[number - 2]] if number - 2 in self.stored else []
        else:
            seconds = self.of.by_rank(unit.backward_s)
            after += self.left[-self.of.ahead :][:1] if len(self.left) >= self.of.ahead else []
        return StageTask(self._name(place), Does.COMPUTE, seconds, after)

    def _bring(self, place: int) -> Iterator[StageTask]:
        """What comes for a turn before it begins: parameters, and what its forward has kept."""
        of, turn = self.of, self._name(place)
        kind, i, number = self.turns[place]
        unit = of.units[number]
        ended = [self._name(place - of.ahead)] if place >= of.ahead else []
        before, arrived = ended, list[str]()
        wanted = self._wanted(place)
        if wanted and number < of.residence.params:
            before = arrived = [f"weights for {turn}"]
            yield StageTask(before[0], Does.FETCH, unit.param_bytes / of.parts, ended)
        if wanted and of.sharded:
            waits = before if i or of.sharding is Sharding.AGAIN else []
            arrived = [f"gather for {turn}"]
            yield StageTask(arrived[0], Does.GATHER, unit.param_bytes, waits)
        if kind == "backward" and number < of.residence.kept:
            kept = f"kept for {turn}"
            after = [self.stored[number], *ended]
            yield StageTask(kept, Does.FETCH, of.by_rank(unit.kept_bytes), after)
            arrived = [*arrived, kept]
        self.arrived[place] = arrived

    def _wanted(self, place: int) -> bool:
        """Whether parameters come for that turn, where they come at all."""
        units = len(self.of.units)
        if self.of.sharding is Sharding.ONCE:
            return self.turns[place][0] == "forward"
        return place % (2 * units) != units  # what the last unit's forward has is used at once

    def _keep(self, place: int) -> StageTask:
        number, name = self.turns[place][2], self._name(place)
        kept = self.of.by_rank(self.of.units[number].kept_bytes)
        self.stored[number] = f"kept by {name}"
        return StageTask(self.stored[number], Does.STORE, kept, [name])

    def _leave(self, name: str, i: int, number: int) -> Iterator[StageTask]:
        """What becomes of gradients after a backward: they are exchanged, and go to the host."""
        of, nbytes = self.of, self.of.units[number].grad_bytes
        last, offloaded = i == of.micro_batches - 1, number < of.residence.gradients
        ready = name
        for does, exchanged, over in of.exchanges(of.units[number]):
            if of.sharded or offloaded or last:
                word = "scatter" if does is Does.SCATTER else "sum"
                before, ready = ready, f"{word}{f' over {over}' if over else ''} after {name}"
                yield StageTask(ready, does, exchanged, [before], over=over)
        if offloaded or (last and number < of.residence.states):
            home = self.home[number] = f"gradients after {name}"
            yield StageTask(home, Does.STORE, nbytes / of.parts, [ready])
            ready = home
        if offloaded and i:
            added = self.home[number] = f"adding after {name}"
            yield StageTask(added, Does.ADD, nbytes / of.parts, [ready])
        if of.sharded or offloaded:
            self.left.append(ready)
        if last or of.sharded:
            self.summed.append(self.home.get(number, ready))

    def _update(self) -> Iterator[StageTask]:
        """On the device what rests there; the rest on the host, in the order of its coming."""
        units, residence, parts = self.of.units, self.of.residence, self.of.parts
        touched = sum(unit.touched_bytes for unit in units[residence.states :]) / parts
        yield StageTask("update", Does.UPDATE, touched, self.summed)
        for number in reversed(range(residence.states)):
            unit = units[number]
            if not unit.grad_bytes:
                continue
            name = f"update of {unit.name}"
            yield StageTask(name, Does.HOST_UPDATE, unit.touched_bytes / parts, self.summed)
            if number >= residence.params:
                back = f"weights after {name}"
                yield StageTask(back, Does.FETCH, unit.param_bytes / parts, [name])


def _turns(replicas: Replicas) -> Iterator[_Turn]:
    for i in range(replicas.micro_batches):
        yield from (("forward", i, number) for number in range(len(replicas.units)))
        yield from (("backward", i, number) for number in reversed(range(len(replicas.units))))
