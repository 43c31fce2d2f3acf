"""Levels: how much of the forward is made again, from what is cheapest for its bytes to all of it.

In: a Dataflow, the seconds of its ops and the buffers that may be made again. Out: for every region
a few nested sets of buffers, and for the whole step as well. They are the optima for the prices of
a byte of memory (`closure`): at one price, those of the regions together are that of the step.

Regions with equal ops are solved once, with the means of their seconds, so equal layers get equal
levels also where times were measured.

Sharded parameters that are gathered once stay for the backward (as ZeRO-2 keeps parameters);
gathered again they are freed after the forward (ZeRO-3, Rajbhandari et al., SC 2020). From one more
level on (`with_gathers`) every gather runs again: where its price is, seconds of the network for
the bytes that are not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import log
from statistics import fmean
from typing import TypeVar

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.placement.recompute.closure import ForwardStretch, Need, closures
from cotrain_compile.placement.recompute.recomputable import gathers, without_order
from cotrain_compile.placement.recompute.regions import inside, regions_of, saved_bytes
from cotrain_compile.placement.remembered import once

MOST_LEVELS = 5

# In place of a price of nothing, whose logarithm there is not: far below what any link takes.
_CHEAPEST = 1e-18


@dataclass(frozen=True)
class Level:
    """One answer to what is made again: the buffers to be `recomputed`.

    `saved_bytes` are no longer kept for the backward, less what is kept only to make them again, in
    all micro-batches together; `seconds` is what the ops take that run again.
    """

    recomputed: frozenset[str]
    saved_bytes: int
    seconds: float


@dataclass(frozen=True)
class StepLevel(Level):
    """A level of the whole step, which has `by_region` in each of its regions, in program order."""

    by_region: tuple[frozenset[str], ...]

    def towards(self, more: StepLevel, quarters: int) -> frozenset[str]:
        """What is made again where so many of every four layers have `more`, and the others this.

        Layers are the regions that differ. Those with `more` are spread evenly, and are among those
        of a larger part.
        """
        found, layers = set(self.recomputed), 0
        for own, other in zip(self.by_region, more.by_region, strict=True):
            if own != other:
                if layers % 4 in _TURNS[:quarters]:
                    found |= other
                layers += 1
        return frozenset(found)


# The order in which four layers take the next level.
_TURNS = (0, 2, 1, 3)


@dataclass(frozen=True)
class RegionLevels:
    """The levels of one region, each containing the one before it."""

    name: str
    levels: tuple[Level, ...]


def saved_at(region: RegionLevels, number: float) -> float:
    """Bytes that a region saves at level `number`, between two levels a mean; at 0 none."""
    saved = [0, *(level.saved_bytes for level in region.levels)]
    below = min(int(number), len(saved) - 1)
    above = min(below + 1, len(saved) - 1)
    return saved[below] + (number - below) * (saved[above] - saved[below])


def spread(regions: Sequence[RegionLevels], numbers: Sequence[float]) -> frozenset[str]:
    """What is made again with each region at one of the two levels that its number lies between.

    What one saves more or less than at its number the next ones make up for, so that all regions
    up to any of them together save about what they should.
    """
    found: set[str] = set()
    owed = 0.0
    for region, number in zip(regions, numbers, strict=True):
        hoped = owed + saved_at(region, number)
        nearest = {int(number), min(int(number) + 1, len(region.levels))}
        chosen = min(sorted(nearest), key=lambda n: abs(hoped - saved_at(region, n)))
        found |= region.levels[chosen - 1].recomputed if chosen else frozenset()
        owed = hoped - saved_at(region, chosen)
    return frozenset(found)


@dataclass(frozen=True)
class FoundLevels:
    """`uniform`: levels of the whole step, nested, cheapest for their bytes first. `regions`: those
    of each region alone, in program order; a region with nothing worth making again has none."""

    uniform: tuple[StepLevel, ...] = ()
    regions: tuple[RegionLevels, ...] = ()


def find_levels(
    dataflow: Dataflow, seconds: Mapping[str, float], recomputable: Collection[str]
) -> FoundLevels:
    """At most `MOST_LEVELS` levels for the step and for each region; `seconds` is by op name."""
    recomputable = frozenset(recomputable) - _read_at_once(dataflow)
    regions = regions_of(dataflow, recomputable)
    insides = inside(dataflow, regions, recomputable)
    later = frozenset(n for op in dataflow.ops if op.phase is not Phase.FORWARD for n in op.reads)
    replays = [
        _replay(dataflow, [dataflow.ops[position] for position in region.ops], free, later, seconds)
        for region, free in zip(regions, insides, strict=True)
    ]
    steps = _steps(replays)
    return FoundLevels(
        uniform=_most_telling(_of_the_step(replays, steps)),
        regions=tuple(
            RegionLevels(region.name, _most_telling([replay.level(again) for _, again in found]))
            for region, replay, found in zip(regions, replays, steps, strict=True)
        ),
    )


def _read_at_once(dataflow: Dataflow) -> frozenset[str]:
    """Values of the forward between whose last read there and the first behind it less is made than
    they are large, as the logarithms of a head. To make one again spares at most those bytes.
    """
    made = [0, *accumulate(_made_bytes(dataflow, op) for op in dataflow.ops)]
    left: dict[str, int] = {}
    found: set[str] = set()
    for position, op in enumerate(dataflow.ops):
        if op.phase is Phase.FORWARD:
            left.update(dict.fromkeys((*op.reads, *op.writes), position))
            continue
        for name in op.reads:
            if name in left:
                between = made[position] - made[left.pop(name) + 1]
                if between < dataflow.buffer[name].nbytes:
                    found.add(name)
    return frozenset(found)


def _made_bytes(dataflow: Dataflow, op: Op) -> int:
    made = (dataflow.buffer[name] for name in op.writes if name not in op.reads)
    return sum(buffer.nbytes for buffer in made if not buffer.is_input)


@dataclass(frozen=True)
class _Replay:
    """Running the ops of one region again: the numbers of it, and the names behind them.

    `made` are the names of the buffers that each op may make again, `later` of them what the
    backward reads.
    """

    ops: tuple[Op, ...]
    made: tuple[tuple[str, ...], ...]
    later: frozenset[str]
    stretch: ForwardStretch

    @property
    def kind(self) -> object:
        """Equal for regions that run the same ops on the same sizes."""
        ops = tuple((op.target, op.flops, op.bytes_moved, op.dtype) for op in self.ops)
        return ops, self.stretch.gains, self.stretch.needs

    def level(self, again: frozenset[int]) -> Level:
        """What is made again when the ops `again` run again: what anything reads of it."""
        read = {name for number in again for name in self.ops[number].reads} | self.later
        names = (name for number in again for name in self.made[number] if name in read)
        return Level(frozenset(names), self.stretch.saved_bytes(again), self.stretch.spent_s(again))


def _replay(
    dataflow: Dataflow,
    ops: Sequence[Op],
    free: Collection[str],
    later: Collection[str],
    seconds: Mapping[str, float],
) -> _Replay:
    """The replay of `ops`, which make the buffers `free` and others; the backward reads `later`."""
    made = [tuple(name for name in op.writes if name in free) for op in ops]
    maker = {name: number for number, names in enumerate(made) for name in names}
    readers: dict[str, list[int]] = {}
    for number, op in enumerate(ops):
        for name in dict.fromkeys(op.reads) if made[number] else ():
            buffer = dataflow.buffer[name]
            if buffer.role is Role.TEMPORARY and buffer.is_passing and name not in later:
                readers.setdefault(name, []).append(number)
    sizes = {name: dataflow.buffer[name].nbytes for name in (*maker, *readers)}
    stretch = ForwardStretch(
        gains=tuple(sum(sizes[name] for name in names if name in later) for names in made),
        seconds=tuple(seconds[op.name] for op in ops),
        needs=tuple(
            Need(sizes[name], tuple(numbers), maker.get(name)) for name, numbers in readers.items()
        ),
    )
    return _Replay(tuple(ops), tuple(made), frozenset(maker).intersection(later), stretch)


# By region: what runs again there, and the price from which on it is worth that.
_Steps = list[tuple[float, frozenset[int]]]


def _steps(replays: Sequence[_Replay]) -> list[_Steps]:
    """The closures of every replay; one search serves all of the same kind."""
    of_kind: dict[object, list[_Replay]] = {}
    for replay in replays:
        of_kind.setdefault(replay.kind, []).append(replay)
    found = {kind: _steps_of(_mean(alike)) for kind, alike in of_kind.items()}
    return [found[replay.kind] for replay in replays]


def _mean(alike: Sequence[_Replay]) -> ForwardStretch:
    one = alike[0].stretch
    seconds = zip(*(replay.stretch.seconds for replay in alike), strict=True)
    return ForwardStretch(one.gains, tuple(fmean(each) for each in seconds), one.needs)


def _steps_of(stretch: ForwardStretch) -> _Steps:
    found: _Steps = []
    saved_bytes, spent_s = 0, 0.0
    for again in closures(stretch):
        more_bytes, more_s = stretch.saved_bytes(again), stretch.spent_s(again)
        found.append(((more_s - spent_s) / (more_bytes - saved_bytes), again))
        saved_bytes, spent_s = more_bytes, more_s
    return found


def _of_the_step(replays: Sequence[_Replay], steps: Sequence[_Steps]) -> list[StepLevel]:
    """What is made again in all regions together, for each price at which that changes."""
    changes: dict[float, list[tuple[int, frozenset[int]]]] = {}
    for region, found in enumerate(steps):
        for price, again in found:
            changes.setdefault(price, []).append((region, again))
    nothing, current = Level(frozenset(), 0, 0.0), dict[int, Level]()
    levels = []
    for price in sorted(changes):
        current.update({region: replays[region].level(again) for region, again in changes[price]})
        levels.append(
            StepLevel(
                frozenset().union(*(level.recomputed for level in current.values())),
                sum(level.saved_bytes for level in current.values()),
                sum(level.seconds for level in current.values()),
                tuple(current.get(region, nothing).recomputed for region in range(len(replays))),
            )
        )
    return levels


_AnyLevel = TypeVar("_AnyLevel", bound=Level)


def _most_telling(levels: Sequence[_AnyLevel]) -> tuple[_AnyLevel, ...]:
    """At most `MOST_LEVELS` of nested levels, the last of them, which saves the most, included.

    Left out, one at a time, is the one without which the price of the bytes around it is told
    least wrong, as a factor of it.
    """
    nothing, kept = Level(frozenset(), 0, 0.0), list(levels)
    while len(kept) > MOST_LEVELS:
        below: list[Level] = [nothing, *kept]
        wrong = [_wrong(*below[i : i + 3]) for i in range(len(kept) - 1)]
        del kept[wrong.index(min(wrong))]
    nested: list[Level] = [nothing, *kept]
    for less, more in pairwise(nested):
        assert less.recomputed < more.recomputed, "a level does not contain the one before it"
    return tuple(kept)


def _wrong(less: Level, level: Level, more: Level) -> float:
    """How wrong the price of a byte between `less` and `more` is without `level`, over its bytes.

    Prices rise from level to level, so each term is positive.
    """
    price = _price(less, more)
    cheap = (level.saved_bytes - less.saved_bytes) * log(price / _price(less, level))
    dear = (more.saved_bytes - level.saved_bytes) * log(_price(level, more) / price)
    return cheap + dear


def _price(less: Level, more: Level) -> float:
    """Seconds for each further byte."""
    spent_s = more.seconds - less.seconds
    return max(spent_s / max(more.saved_bytes - less.saved_bytes, 1), _CHEAPEST)


@once
def gathered(dataflow: Dataflow) -> Mapping[str, Op]:
    """What the backward reads and may be gathered again, each buffer with the op that does so."""
    ops = (dataflow.ops[dataflow.position[name]] for name in gathers(dataflow))
    found = {name: op for op in ops for name in without_order(dataflow, op.writes)}
    read = saved_bytes(dataflow, found)
    return {name: op for name, op in found.items() if name in read}


def with_gathers(
    levels: Sequence[StepLevel], dataflow: Dataflow, costs: CostTable
) -> tuple[StepLevel, ...]:
    """`levels`, of which the first is nothing, with a level that gathers again.

    Each gather counts as a region of its own, so that parts of them may run again. Without a
    network nobody knows what they take, and they do not.
    """
    found = {name: op for name, op in gathered(dataflow).items() if op.name in costs.network_s}
    if not found:
        return tuple(levels)
    nbytes = sum(dataflow.buffer[name].nbytes for name in found)
    seconds = sum(costs.network_s[op.name] + costs.device_s[op.name] for op in found.values())
    place = 1
    while place < len(levels) and _price(levels[place - 1], levels[place]) < seconds / nbytes:
        place += 1
    kept, again = (frozenset[str](),) * len(found), tuple(frozenset({name}) for name in found)
    below = [replace(level, by_region=(*level.by_region, *kept)) for level in levels[:place]]
    above = [
        StepLevel(
            level.recomputed.union(found),
            level.saved_bytes + nbytes,
            level.seconds + seconds,
            (*level.by_region, *again),
        )
        for level in levels[place - 1 :]
    ]
    return (*below, *above)
