"""Data-parallel works: forwards, backwards, exchanges and updates of a step, for the simulator.

In: units of layers, micro-batches, the memory's rate of each kind of device, the ring. Out: `Work`s
in the order of their lanes, each with the bytes that a device sends to the next. A lane stands for
all devices of a kind, for they do the same; one more is the network, where exchanges take turns.
An exchange of gradients waits for all kinds, so the slowest decides. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cotrain_compile.cluster.data_parallel_peaks import Unit
from cotrain_compile.machine import Network
from cotrain_compile.placement.simulate.engine import Work

NETWORK = "network"


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
    """A work, and what each device sends to the next in it."""

    work: Work
    nbytes: float = 0.0


@dataclass(frozen=True)
class Step:
    """What a step is made of; `ring` is None on one device.

    `rates` are of the memory, by kind; `slowness` says how many times as long a kind computes.
    """

    units: tuple[Unit, ...]
    micro_batch: int
    micro_batches: int
    rates: Mapping[str, float]
    ring: Ring | None
    slowness: Mapping[str, float] = field(default_factory=dict)

    def compute(self, name: str, seconds: float, after: Sequence[str] = ()) -> Iterator[Sent]:
        """The same on each kind of device."""
        for kind in self.rates:
            own_s = seconds * self.slowness.get(kind, 1.0)
            yield Sent(Work(f"{name} on {kind}", f"compute {kind}", own_s, tuple(after)))

    def on_all(self, name: str) -> tuple[str, ...]:
        """The works of that name on each kind."""
        return tuple(f"{name} on {kind}" for kind in self.rates)

    def update(self, parts: int, after: Sequence[str]) -> Iterator[Sent]:
        touched = sum(unit.touched_bytes for unit in self.units) / parts
        for kind, rate in self.rates.items():
            seconds = touched / rate
            yield Sent(Work(f"update on {kind}", f"compute {kind}", seconds, tuple(after)))


def replicated_works(
    step: Step, all_reduce_s: Callable[[float], float] | None = None
) -> Iterator[Sent]:
    """Gradients of a unit are summed after its last backward; the update waits for all sums.

    `all_reduce_s` is of so many bytes, in place of the ring's.
    """
    ring = step.ring
    sums = []
    for i in range(step.micro_batches):
        for unit in step.units:
            yield from step.compute(f"forward {i} of {unit.name}", unit.forward_s(step.micro_batch))
        for unit in reversed(step.units):
            name = f"backward {i} of {unit.name}"
            yield from step.compute(name, unit.backward_s(step.micro_batch))
            if ring and unit.grad_bytes and i == step.micro_batches - 1:
                sums.append(f"sum of {unit.name}")
                seconds = (all_reduce_s or ring.all_reduce_s)(unit.grad_bytes)
                work = Work(sums[-1], NETWORK, seconds, step.on_all(name))
                yield Sent(work, 2 * ring.sent_bytes(unit.grad_bytes))
    yield from step.update(1, sums)


def sharded_works(step: Step, *, again: bool) -> Iterator[Sent]:
    """Each turn, a forward or backward of a unit, waits for the gather of its parameters.

    Gathered `again`, a gather waits until the turn before the last has ended, so that parameters of
    two turns are whole; the last unit's stay from forward to backward. Gradients are scattered
    after each backward, and a backward waits for the scatter of the one before the last.
    """
    ring = step.ring
    assert ring is not None  # nothing is sharded on one device
    turns = list(_turns(step))
    gathers = [_gathers(step, turn, again=again) for turn in range(len(turns))]
    scatters: list[str] = []
    for ahead in range(min(2, len(turns))):
        yield from _gather(step, turns, ahead, gathers, again=again)
    for turn, (kind, i, unit) in enumerate(turns):
        name = f"{kind} {i} of {unit.name}"
        after = [f"gather for {name}"] if gathers[turn] else []
        seconds = unit.forward_s(step.micro_batch)
        if kind == "backward":
            seconds = unit.backward_s(step.micro_batch)
            after += scatters[-2:-1]
        yield from step.compute(name, seconds, after)
        if turn + 2 < len(turns):
            yield from _gather(step, turns, turn + 2, gathers, again=again)
        if kind == "backward" and unit.grad_bytes:
            scatters.append(f"scatter after {name}")
            work = Work(scatters[-1], NETWORK, ring.scatter_s(unit.grad_bytes), step.on_all(name))
            yield Sent(work, ring.sent_bytes(unit.grad_bytes))
    yield from step.update(ring.devices, scatters)


_Turn = tuple[str, int, Unit]


def _turns(step: Step) -> Iterator[_Turn]:
    for i in range(step.micro_batches):
        yield from (("forward", i, unit) for unit in step.units)
        yield from (("backward", i, unit) for unit in reversed(step.units))


def _gathers(step: Step, turn: int, *, again: bool) -> bool:
    """Whether parameters are gathered for that turn."""
    in_pass = turn % (2 * len(step.units))
    if not again:
        return turn < len(step.units)
    return in_pass != len(step.units)  # what the last unit's forward has is used at once


def _gather(
    step: Step, turns: Sequence[_Turn], turn: int, gathers: Sequence[bool], *, again: bool
) -> Iterator[Sent]:
    kind, i, unit = turns[turn]
    if not gathers[turn] or step.ring is None:
        return
    after: tuple[str, ...] = ()
    if again and turn >= 2:
        before, j, other = turns[turn - 2]
        after = step.on_all(f"{before} {j} of {other.name}")
    seconds = step.ring.gather_s(unit.param_bytes) if unit.param_bytes else 0.0
    work = Work(f"gather for {kind} {i} of {unit.name}", NETWORK, seconds, after)
    yield Sent(work, step.ring.sent_bytes(unit.param_bytes))
