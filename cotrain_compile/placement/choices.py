"""Choices: what a placement can decide about a step, as numbers in segments.

Types alone: `find_choices` makes `Choices` from a Problem. They have for each bundle of parameters
the ways to keep and update them, for each bundle of activations whether it leaves, and what the
device holds whatever is decided; and they turn decisions into a Placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotrain_compile.dataflow import Buffer, Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import SMALL_STATE_BYTES, resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import thin_copies
from cotrain_compile.plan import Placement, UpdateMode


@dataclass(frozen=True)
class Way:
    """A way to keep and update a bundle of parameters.

    `mode` is None for frozen parameters. `trips` is how often the weight is fetched in a step, 0
    where it is at home on the device. With `gradient_away` the gradient leaves the device until
    its update.
    """

    mode: UpdateMode | None
    trips: int
    gradient_away: bool = False

    @property
    def on_host(self) -> bool:
        """Whether the update runs on the host."""
        return self.mode in (UpdateMode.HOST, UpdateMode.HOST_STREAMED)


@dataclass(frozen=True)
class KeptGradients:
    """What lies in the `.grad` of the parameters of a bundle, before the step or after it.

    It rests where the parameter does. Segments: `made` of its making, 0 where the step finds it;
    `fetched` of each use that it is fetched for where it rests on the host, `written` of its last
    write, None where there is none. With `for_update` only the update reads it.
    """

    nbytes: int = 0
    made: int = 0
    fetched: tuple[int, ...] = ()
    written: int | None = None
    for_update: bool = False

    def up(self, way: Way, tail: int) -> list[tuple[int, int]]:
        """(segment, bytes) that cross up in `way`: where it is used, or by the end of the step."""
        if not way.trips:
            return []
        by_update = self.for_update and way.mode is UpdateMode.STREAMED
        return [(segment, self.nbytes) for segment in (*self.fetched, *([tail] * by_update))]

    def down(self, way: Way) -> list[tuple[int, int]]:
        """(segment, bytes) that go home in `way`, once they have been written."""
        return [(self.written, self.nbytes)] if way.trips and self.written is not None else []

    def crossings(self, way: Way, tail: int) -> set[int]:
        """The segments in which some of it crosses in `way`."""
        return {segment for segment, _ in (*self.up(way, tail), *self.down(way))}


NO_GRADIENTS = KeptGradients()


@dataclass(frozen=True)
class Weights:
    """Parameters that are decided on together; bytes and seconds are sums over them.

    `fetched_bytes` cross the link when the weight is fetched: the low-precision copies where the
    step `thin`ly uses nothing else, none where it uses nothing at all, else the parameters.
    `largest` is the share that the largest parameter has in the bundle, `least_largest` the least
    share that the largest of any part of the bundle has in that part. The values made inside the
    largest update take `made_bytes`, `workspace_bytes` beyond its gradient. `cast_s` is what the
    host takes to make the low-precision copies, `device_cast_s` what the device takes where it
    makes them. The rest are segments: of the first use of the weight, the last in the forward, the
    first in the backward and the last, of the gradient's making, its last use, and the release of
    the update. `kept` lies in `.grad`.
    """

    params: tuple[str, ...]
    ways: tuple[Way, ...]
    param_bytes: int
    state_bytes: int
    kept_state_bytes: int
    gradient_bytes: int
    fetched_bytes: int
    thin: bool
    largest: float
    least_largest: float
    workspace_bytes: int
    made_bytes: int
    device_s: float
    host_s: float
    cast_s: float
    device_cast_s: float
    first: int
    leaves: int
    returns: int
    last: int
    gradient_made: int
    gradient_used: int
    release: int
    kept: KeptGradients = NO_GRADIENTS

    def streamed_bytes(self, way: Way) -> tuple[int, int]:
        """Bytes up before and down after the updates, where `way` streams them."""
        param = self.param_bytes if way.trips else 0
        return self.state_bytes + (param if self.thin else 0), self.state_bytes + param

    def host_bytes(self, way: Way) -> int:
        """What is on the host in `way`, at home or as a copy, as if all at once."""
        nbytes = self.gradient_bytes * (way.on_host or way.gradient_away)
        if way.trips:
            nbytes += self.param_bytes + self.fetched_bytes * self.thin + self.kept.nbytes
        if way.mode is UpdateMode.HOST:
            nbytes += self.param_bytes
        if way.mode not in (UpdateMode.RESIDENT, None):
            nbytes += self.state_bytes
        return nbytes

    def keeps_weight(self, way: Way) -> bool:
        """Whether the weight fetched for the backward stays for the update, which rewrites it."""
        return way.mode is UpdateMode.STREAMED and way.trips > 0 and not self.thin


@dataclass(frozen=True)
class Activations:
    """Temporaries that may be away from segment `leaves` (last use) to `returns` (next use)."""

    buffers: tuple[str, ...]
    nbytes: int
    leaves: int
    returns: int


@dataclass(frozen=True)
class Decisions:
    """One way for each bundle of weights, and which bundles of activations leave."""

    ways: tuple[Way, ...]
    away: tuple[bool, ...]


@dataclass(frozen=True)
class Choices:
    """All that can be decided. Segment 0 is a head without ops, the last one the tail.

    `seconds` has the device time of each segment without updates; `checkpoints` the pairs of
    (segment, bytes alive whatever is decided) at which memory is checked: all activations stay,
    and no parameter, state or gradient of `weights` is counted.
    """

    problem: Problem
    seconds: tuple[float, ...]
    checkpoints: tuple[tuple[int, int], ...]
    weights: tuple[Weights, ...]
    activations: tuple[Activations, ...]

    @property
    def tail(self) -> int:
        """Index of the last segment."""
        return len(self.seconds) - 1

    def placement(self, policy: str, ways: Sequence[Way], away: Sequence[bool]) -> Placement:
        """The placement that these decisions make."""
        dataflow = self.problem.dataflow
        base = resident(dataflow)
        homes, updates, gone = dict(base.homes), dict(base.updates), list[str]()
        thin = thin_copies(dataflow)
        for bundle, way in zip(self.weights, ways, strict=True):
            for param in bundle.params:
                kept = keep(dataflow, param, thin.get(param, param), way)
                homes |= kept.homes
                updates |= kept.updates
                gone += kept.away
        for activations, leaves in zip(self.activations, away, strict=True):
            gone += activations.buffers if leaves else ()
        return Placement(policy, homes, updates, tuple(gone), early_updates=True)


@dataclass(frozen=True)
class Kept:
    """What a placement says about one parameter: homes and update mode by name, what leaves."""

    homes: Mapping[str, Tier]
    updates: Mapping[str, UpdateMode]
    away: tuple[str, ...]


def keep(dataflow: Dataflow, param: str, fetched: str, way: Way) -> Kept:
    """`param` and its states kept and updated in `way`; `fetched` is what crosses for its uses.

    A gradient in its `.grad` rests where it does, as everywhere in torch.
    """
    home = Tier.HOST if way.trips else Tier.DEVICE
    homes = dict.fromkeys((param, *dataflow.kept_gradients.get(param, ())), home)
    away = [fetched] if way.trips == 2 else []
    group = dataflow.update.get(param)
    if group is None or way.mode is None:
        return Kept(homes, {}, tuple(away))
    away += [group.gradient] if way.gradient_away else []
    for state in group.states:
        moves = way.on_host or is_large(dataflow.buffer[state])
        leaves = way.mode is not UpdateMode.RESIDENT and moves
        homes[state] = Tier.HOST if leaves else Tier.DEVICE
    # In a bundle that is streamed, what is too small for copies of its own stays.
    stays = way.mode is UpdateMode.STREAMED and Tier.HOST not in homes.values()
    return Kept(homes, {param: UpdateMode.RESIDENT if stays else way.mode}, tuple(away))


def is_large(state: Buffer) -> bool:
    """Whether an optimizer state is worth a copy of its own (a step counter is not)."""
    return state.nbytes > SMALL_STATE_BYTES
