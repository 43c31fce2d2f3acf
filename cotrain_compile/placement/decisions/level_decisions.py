"""Level decisions: at which of its levels each region of the forward is made again.

In: a BucketedStep and the levels of its regions. Out: for each region a decision between nothing
and its levels, with their effects on memory and on the device's time. They are those of the step as
it is, in which a replay is at the first use of a value outside the forward: what the program
decides of levels is a proposal, and the step with these values made again is planned for itself.

For the bound (`least_again`) a value is charged the op that made it, and of that its share where
the op made several. What that op reads is taken to be there, at no cost, but for what the backward
does not read itself, nothing else is made of, and is no smaller than all that the op makes: that is
charged, too, since who keeps it can as well keep what is made of it. A plan can only pay more: it
runs every op that it runs again once, as a whole, and has to keep what it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.dataflow import Op, Phase, Role
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.clusters import Again, RegionLevel
from cotrain_compile.placement.decisions.decisions import Decision, DecisionOption
from cotrain_compile.placement.decisions.effects import DeviceWork, Effect, Hold
from cotrain_compile.placement.recompute.levels import RegionLevels, gathered
from cotrain_compile.placement.recompute.recomputable import recomputable

LevelDecision = Decision[RegionLevels, int]


def level_decisions(
    step: BucketedStep, regions: Sequence[RegionLevels]
) -> tuple[LevelDecision, ...]:
    """For each region its levels by number, 0 where nothing is made again, with their effects."""
    finder = _Finder(step)
    return tuple(
        Decision(
            region,
            (
                DecisionOption(0, Effect()),
                *(
                    DecisionOption(number, finder.effect(level.recomputed))
                    for number, level in enumerate(region.levels, 1)
                ),
            ),
        )
        for region in regions
    )


def first_levels(regions: Sequence[RegionLevels]) -> Mapping[str, RegionLevel]:
    """By buffer, the region that may make it again, and from which of its levels on it does."""
    found: dict[str, RegionLevel] = {}
    for index, region in enumerate(regions):
        for number, level in enumerate(region.levels, 1):
            for name in level.recomputed:
                found.setdefault(name, RegionLevel(index, number))
    return found


@dataclass(frozen=True)
class _Finder:
    step: BucketedStep

    @cached_property
    def _is_forward(self) -> Sequence[bool]:
        return [op.phase is Phase.FORWARD for op in self.step.program.ops]

    @cached_property
    def _maker(self) -> Mapping[str, Op]:
        forward = (op for op in self.step.program.ops if op.phase is Phase.FORWARD)
        return {name: op for op in forward for name in op.writes}

    @cached_property
    def _position(self) -> Mapping[str, int]:
        return {op.name: slot for slot, op in enumerate(self.step.program.ops)}

    def effect(self, again: Collection[str]) -> Effect:
        """What it does to have `again` made again."""
        redone = self._redone(again)
        buckets = self.step.bucket
        seconds: dict[int, float] = {}
        for op, slot in redone.items():
            spent_s = self.step.problem.costs.device_s[op]
            seconds[buckets(slot)] = seconds.get(buckets(slot), 0.0) + spent_s
        return Effect(
            holds=(*self._missing(again, redone), *self._kept(again, redone)),
            device_work=tuple(DeviceWork(spent_s, bucket) for bucket, spent_s in seconds.items()),
        )

    def _redone(self, again: Collection[str]) -> dict[str, int]:
        """By the name of each op that runs again, before which slot it does at the latest."""
        found: dict[str, int] = {}
        needed: dict[str, int] = {}
        for name in again:
            slots = self._later(name)
            if slots:
                needed[name] = slots[0]
        for name in sorted(again, key=lambda n: -self._position[self._maker[n].name]):
            op = self._maker[name]
            if name not in needed:
                continue
            found[op.name] = min(needed[name], found.get(op.name, needed[name]))
            for read in op.reads:
                if read in again:
                    needed[read] = min(needed[name], needed.get(read, needed[name]))
        return found

    def _missing(self, again: Collection[str], redone: Mapping[str, int]) -> Iterator[Hold]:
        """Between the last use in the forward and the replay, which another value may need."""
        for name in again:
            if self._later(name):
                left = self.step.bucket(self._last_in_forward(name))
                needed = self.step.bucket(redone[self._maker[name].name])
                if left + 1 < needed:  # missing in the buckets between them
                    yield Hold(-self.step.dataflow.buffer[name].nbytes, left, needed)

    def _kept(self, again: Collection[str], redone: Mapping[str, int]) -> Iterator[Hold]:
        """What ops that run again read, for longer than the step itself holds it."""
        until: dict[str, int] = {}
        for op, slot in redone.items():
            for name in self.step.program.ops[self._position[op]].reads:
                buffer = self.step.dataflow.buffer[name]
                own = buffer.role is Role.TEMPORARY and buffer.is_passing
                if own and name not in again:
                    until[name] = max(slot, until.get(name, slot))
        for name, slot in until.items():
            last = self.step.program.touches[name][-1]
            first, by = self.step.bucket(last) + 1, self.step.bucket(slot)
            if first <= by:
                yield Hold(self.step.dataflow.buffer[name].nbytes, first, by)

    def _later(self, name: str) -> Sequence[int]:
        touches = self.step.program.touches.get(name, ())
        return [slot for slot in touches if not self._is_forward[slot]]

    def _last_in_forward(self, name: str) -> int:
        touches = self.step.program.touches[name]
        return max(slot for slot in touches if self._is_forward[slot])


def least_again(step: BucketedStep) -> Mapping[str, Again]:
    """By buffer, when it is missing at the longest if it is made again, and its op's seconds.

    It is gone after its last use in the forward, and is made again by its first use outside. What
    is gathered again takes the network, too, whenever that suits best before.
    """
    may = recomputable(step.dataflow)
    charges = _Charges(step, may | gathered(step.dataflow).keys(), may)
    found: dict[str, Again] = {}
    for name, left, needed in charges.absences:
        # Memory is looked at where a bucket starts: it may come back right behind that.
        first, by = step.bucket(left) + 1, step.bucket(needed)
        # What the op reads at which a bucket begins is there when memory is looked at.
        last = step.bucket_before(needed)
        if first <= by:
            whole = step.apart(first - 1, by)
            source = charges.source(name) if whole else None
            seconds = charges.with_sources_s(name) if whole else charges.own_s(name)
            source = first - 1 if source is None else source
            found[name] = Again(seconds, first, last, by, source, charges.network_s(name))
    return found


class _Charges:
    """What is charged for each value: its share of its op, with or without what that reads."""

    def __init__(self, step: BucketedStep, may: frozenset[str], own: frozenset[str]) -> None:
        """`may` are all values, `own` those that are charged with what is made of them."""
        self._step, self._may, self._sums = step, may, dict[str, float]()
        self._maker = {
            n: op for op in step.dataflow.ops for n in op.writes if n in may and not op.awaits
        }
        self.absences = tuple(_absences(step, self._maker))
        needed = {name for name, _, _ in self.absences}
        self._only_for = _only_for(step, own.intersection(self._maker) - needed)

    def own_s(self, name: str) -> float:
        """As if all that its op reads were there."""
        return self._share(name, self._step.problem.costs.device_s[self._maker[name].name])

    def network_s(self, name: str) -> float:
        """What the network takes, where it is gathered; nothing for what is made on the device."""
        return self._share(
            name, self._step.problem.costs.network_s.get(self._maker[name].name, 0.0)
        )

    def with_sources_s(self, name: str) -> float:
        """With what else is made again for it at the least."""
        if name not in self._sums:
            seconds = self._step.problem.costs.device_s[self._maker[name].name]
            sources = sum(self.with_sources_s(each) for each in self._sources(name))
            self._sums[name] = self._share(name, seconds + sources)
        return self._sums[name]

    def source(self, name: str) -> int | None:
        """The first bucket in which sources of a value could be offloaded, None without any."""
        sources = self._sources(name)
        if not sources:
            return None
        own = self._step.bucket(self._step.program.slot[self._maker[name].name])
        further = map(self.source, sources)
        return min([own, *(bucket for bucket in further if bucket is not None)])

    def _sources(self, name: str) -> list[str]:
        """What there is for this value alone, and is no smaller than all that its op makes."""
        op, buffer = self._maker[name], self._step.dataflow.buffer
        made_bytes = self._made_bytes(op)
        return [n for n in self._only_for.get(op.name, ()) if buffer[n].nbytes >= made_bytes]

    def _share(self, name: str, seconds: float) -> float:
        made_bytes = self._made_bytes(self._maker[name])
        return seconds * self._step.dataflow.buffer[name].nbytes / max(1, made_bytes)

    def _made_bytes(self, op: Op) -> int:
        return sum(self._step.dataflow.buffer[n].nbytes for n in op.writes if n in self._may)


def _only_for(step: BucketedStep, names: Collection[str]) -> Mapping[str, Sequence[str]]:
    """By op, those of `names` that it reads, and no other op of the step."""
    readers: dict[str, set[str]] = {}
    for op in step.dataflow.ops:
        for name in op.reads:
            if name in names:
                readers.setdefault(name, set()).add(op.name)
    found: dict[str, list[str]] = {}
    for name, ops in readers.items():
        if len(ops) == 1:
            found.setdefault(next(iter(ops)), []).append(name)
    return found


def _absences(step: BucketedStep, maker: Mapping[str, Op]) -> Iterator[tuple[str, int, int]]:
    """Each buffer with the slots of its last use in the forward and the first one behind that."""
    ops = step.program.ops
    is_forward = [op.phase is Phase.FORWARD for op in ops]
    for name in maker:
        slots = step.program.touches.get(name, [])
        later = [slot for slot in slots if not is_forward[slot]]
        before = [slot for slot in slots if is_forward[slot] and later and slot < later[0]]
        if before:
            yield name, before[-1], later[0]
