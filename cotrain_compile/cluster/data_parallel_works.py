"""Data-parallel works: what computes, is exchanged, is copied and is updated in a step.

In: units of layers, micro-batches, what becomes of parameters, what is away, the ring, and of each
kind of device its memory's rate and its share of the host. Out: `Work`s in the order of their
lanes, each with the bytes that a device moves in it. A lane stands for all devices of a kind, for
they do the same; each kind computes, copies both ways and has its part of the host at once. One
lane more is the network, where exchanges take turns and wait for all kinds.

A turn is a forward or backward of a unit. Where parameters come to it, from the host, from the
ring or from one through the other, they come once the turn before the last has ended (`ahead` 2),
so that those of two turns are whole, or the last one (1); the last unit's stay from forward to
backward. Where all stay, those of the first micro-batch come as soon as the ring is free. Where
gradients leave after a backward, the next but one, or the next, waits until they have. What a unit
keeps and is away goes to the host behind its forward, which the next forward but one waits for, and
comes back as parameters do. The update of a unit waits for all gradients, as one that clips them
does. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cotrain_compile.cluster.away import NOTHING, Away
from cotrain_compile.cluster.host_share import HostShare
from cotrain_compile.cluster.units import Unit
from cotrain_compile.machine import Network
from cotrain_compile.placement.simulate.engine import Work

NETWORK = "network"


class Gathering(StrEnum):
    """What becomes of parameters: REPLICATE keeps them whole; ONCE and AGAIN are of `shard`, and
    say whether what the forward of a micro-batch gathers stays for its backward."""

    REPLICATE = "replicate"
    ONCE = "gathered once"
    AGAIN = "gathered again"


class Way(StrEnum):
    """What bytes go over: from each device to the next, and between each and its host."""

    RING = "ring"
    UP = "swap in"
    DOWN = "swap out"


@dataclass(frozen=True)
class Ring:
    """So many devices, each of which sends to the next over `network`."""

    network: Network
    devices: int

    def all_reduce_s(self, nbytes: float) -> float:
        n = self.devices
        return 2 * (n - 1) * (nbytes / n / self.network.bytes_per_s + self.network.latency_s)

    def gather_s(self, nbytes: float) -> float:
        n = self.devices
        return (n - 1) * (nbytes / n / self.network.bytes_per_s + self.network.latency_s)

    def scatter_s(self, nbytes: float) -> float:
        n, network = self.devices, self.network
        return (n - 1) * (network.scatter * nbytes / n / network.bytes_per_s + network.latency_s)

    def sent_bytes(self, nbytes: float) -> float:
        """Of a gather or a scatter; an all-reduce sends twice as much."""
        return (self.devices - 1) / self.devices * nbytes


class Sent(NamedTuple):
    """A work, and what each device moves in it; of works of several kinds, told of the first."""

    work: Work
    nbytes: float = 0.0
    way: Way = Way.RING


@dataclass(frozen=True)
class Step:
    """What a step is made of; `ring` is None on one device.

    `rates` are of the memory, by kind; `slowness` says how many times as long a kind computes, and
    `hosts` what it has of its host. Of so many turns parameters are whole, and gradients leave, at
    once: `ahead` is 2 or 1. `all_reduce_s` is of so many bytes, in place of the ring's.
    """

    units: tuple[Unit, ...]
    micro_batch: int
    micro_batches: int
    rates: Mapping[str, float]
    ring: Ring | None
    gathering: Gathering = Gathering.REPLICATE
    slowness: Mapping[str, float] = field(default_factory=dict)
    hosts: Mapping[str, HostShare] = field(default_factory=dict)
    away: Away = NOTHING
    ahead: int = 2
    all_reduce_s: Callable[[float], float] | None = None

    @property
    def sharded(self) -> bool:
        return self.ring is not None and self.gathering is not Gathering.REPLICATE

    @property
    def parts(self) -> int:
        """In how many parts a layer rests."""
        return self.ring.devices if self.ring and self.sharded else 1

    def on_all(self, name: str) -> tuple[str, ...]:
        """The works of that name on each kind."""
        return tuple(f"{name} on {kind}" for kind in self.rates)

    def each(
        self, name: str, stream: str, seconds: Callable[[str], float], after: Sequence[str]
    ) -> Iterator[Work]:
        """A work on the same stream of each kind."""
        for kind in self.rates:
            lane = f"compute {kind}/{stream}" if stream else f"compute {kind}"
            yield Work(f"{name} on {kind}", lane, seconds(kind), tuple(after))


def works_of(step: Step) -> Iterator[Sent]:
    """All works of a step."""
    return _Works(step).all()


_Turn = tuple[str, int, int]  # forward or backward, the micro-batch, the unit's number


class _Works:
    """The works of a step so far: what turns wait for."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.turns = list(_turns(step))
        self.computed: list[str] = []  # by turn
        self.left: list[tuple[str, ...]] = []  # of each backward whose gradients leave
        self.summed: list[tuple[str, ...]] = []  # what an update waits for
        self.down: dict[int, tuple[str, ...]] = {}  # where what a unit keeps has gone down
        self.gone_home: dict[int, tuple[str, ...]] = {}  # where the last gradients of a unit have

    def all(self) -> Iterator[Sent]:
        come: dict[int, tuple[str, ...]] = {}
        ahead = self.step.ahead
        for place in range(min(ahead, len(self.turns))):
            yield from self._come(place, come)
        for place, (kind, i, number) in enumerate(self.turns):
            unit = self.step.units[number]
            name = f"{kind} {i} of {unit.name}"
            yield from self._compute(name, kind, number, come[place])
            if kind == "forward" and number < self.step.away.kept:
                yield from self._keep(name, number)
            if place + ahead < len(self.turns):
                yield from self._come(place + ahead, come)
            if kind == "backward" and unit.grad_bytes:
                yield from self._leave(name, i, number)
        yield from self._update()

    def _compute(self, name: str, kind: str, number: int, come: tuple[str, ...]) -> Iterator[Sent]:
        step, unit = self.step, self.step.units[number]
        after = [*come]
        if kind == "forward":
            alone_s = unit.forward_s(step.micro_batch)
            after += self.down.get(number - 2, ())
        else:
            alone_s = unit.backward_s(step.micro_batch)
            after += self.left[-step.ahead] if len(self.left) >= step.ahead else ()
        self.computed.append(name)
        for work in step.each(name, "", lambda kind: alone_s * step.slowness.get(kind, 1.0), after):
            yield Sent(work)

    def _come(self, place: int, come: dict[int, tuple[str, ...]]) -> Iterator[Sent]:
        """What comes for a turn before it begins: parameters, and what its forward has kept."""
        step = self.step
        kind, i, number = self.turns[place]
        unit, turn = step.units[number], f"{kind} {i} of {step.units[number].name}"
        ended = self.computed[place - step.ahead] if place >= step.ahead else ""
        before = step.on_all(ended) if ended else ()
        come[place] = ()
        wanted = self._wanted(place)
        if wanted and number < step.away.params:
            part = unit.param_bytes / step.parts
            yield from self._copy(Way.UP, f"weights for {turn}", part, before)
            before = come[place] = step.on_all(f"weights for {turn}")
        if wanted and step.sharded and step.ring:
            waits = before if i or step.gathering is Gathering.AGAIN else ()
            seconds = step.ring.gather_s(unit.param_bytes) if unit.param_bytes else 0.0
            name = f"gather for {turn}"
            yield Sent(Work(name, NETWORK, seconds, waits), step.ring.sent_bytes(unit.param_bytes))
            come[place] = (name,)
        if kind == "backward" and number < step.away.kept:
            after = [*self.down[number], *step.on_all(ended)]
            kept = unit.kept_bytes(step.micro_batch)
            yield from self._copy(Way.UP, f"kept for {turn}", kept, after)
            come[place] = (*come[place], *step.on_all(f"kept for {turn}"))

    def _wanted(self, place: int) -> bool:
        """Whether parameters come for that turn, where they come at all."""
        units = len(self.step.units)
        if self.step.gathering is Gathering.ONCE:
            return self.turns[place][0] == "forward"
        return place % (2 * units) != units  # what the last unit's forward has is used at once

    def _keep(self, name: str, number: int) -> Iterator[Sent]:
        kept = self.step.units[number].kept_bytes(self.step.micro_batch)
        yield from self._copy(Way.DOWN, f"kept by {name}", kept, self.step.on_all(name))
        self.down[number] = self.step.on_all(f"kept by {name}")

    def _leave(self, name: str, i: int, number: int) -> Iterator[Sent]:
        """What becomes of gradients after a backward: they are exchanged, and go to the host."""
        step, unit = self.step, self.step.units[number]
        last, sent = i == step.micro_batches - 1, number < step.away.gradients
        ready = step.on_all(name)
        if step.ring and (step.sharded or sent or last):
            exchange = f"scatter after {name}" if step.sharded else f"sum after {name}"
            yield Sent(*self._exchange(exchange, unit.grad_bytes, ready))
            ready = (exchange,)
        if sent or (last and number < step.away.states):
            home = f"gradients after {name}"
            yield from self._copy(Way.DOWN, home, unit.grad_bytes / step.parts, ready)
            ready = self.gone_home[number] = step.on_all(home)
        if sent and i:
            add = f"adding after {name}"
            part = unit.grad_bytes / step.parts
            yield from self._on_host(add, part, HostShare.add_s, ready)
            self.gone_home[number] = step.on_all(add)
        if step.sharded or sent:
            self.left.append(ready)
        if last or step.sharded:
            self.summed.append(self.gone_home.get(number, ready))

    def _exchange(self, name: str, nbytes: float, after: tuple[str, ...]) -> tuple[Work, float]:
        step, ring = self.step, self.step.ring
        assert ring is not None  # nothing is exchanged on one device
        if step.sharded:
            return Work(name, NETWORK, ring.scatter_s(nbytes), after), ring.sent_bytes(nbytes)
        seconds = (step.all_reduce_s or ring.all_reduce_s)(nbytes)
        return Work(name, NETWORK, seconds, after), 2 * ring.sent_bytes(nbytes)

    def _update(self) -> Iterator[Sent]:
        """On the device what rests there; the rest on the host, in the order of its coming."""
        step, parts = self.step, self.step.parts
        after = [name for names in self.summed for name in names]
        touched = sum(unit.touched_bytes for unit in step.units[step.away.states :]) / parts
        for work in step.each("update", "", lambda kind: touched / step.rates[kind], after):
            yield Sent(work)
        for number in reversed(range(step.away.states)):
            unit = step.units[number]
            if not unit.grad_bytes:
                continue
            name = f"update of {unit.name}"
            touches = unit.touched_bytes / parts
            yield from self._on_host(name, touches, HostShare.update_s, after)
            if number >= step.away.params:
                back = f"weights after {name}"
                part = unit.param_bytes / parts
                yield from self._copy(Way.UP, back, part, step.on_all(name))

    def _copy(self, way: Way, name: str, nbytes: float, after: Sequence[str]) -> Iterator[Sent]:
        """Between each device and its host."""
        told = nbytes

        def seconds(kind: str) -> float:
            host = self.step.hosts[kind]
            return host.up_s(nbytes) if way is Way.UP else host.down_s(nbytes)

        for work in self.step.each(name, way, seconds, after):
            yield Sent(work, told, way)
            told = 0.0

    def _on_host(
        self,
        name: str,
        nbytes: float,
        seconds: Callable[[HostShare, float], float],
        after: Sequence[str],
    ) -> Iterator[Sent]:
        def own_s(kind: str) -> float:
            return seconds(self.step.hosts[kind], nbytes)

        for work in self.step.each(name, "host", own_s, after):
            yield Sent(work)


def _turns(step: Step) -> Iterator[_Turn]:
    for i in range(step.micro_batches):
        yield from (("forward", i, number) for number in range(len(step.units)))
        yield from (("backward", i, number) for number in reversed(range(len(step.units))))
