"""Level decisions: at which of its levels each region of the forward is made again.

In: a BucketedStep and the levels of its regions. Out: for each region a decision between nothing
and its levels, with their effects on memory and on the device's time. They are those of the step as
it is, in which a replay is at the first use of a value outside the forward: what the program
decides of levels is a proposal, and the step with these values made again is planned for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.dataflow import Op, Phase, Role
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.clusters import RegionLevel
from cotrain_compile.placement.decisions.decisions import Decision, Option
from cotrain_compile.placement.decisions.effects import DeviceWork, Effect, Hold
from cotrain_compile.placement.recompute.levels import RegionLevels

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
                Option(0, Effect()),
                *(
                    Option(number, finder.effect(level.recomputed))
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
