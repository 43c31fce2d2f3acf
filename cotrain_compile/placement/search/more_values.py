"""More values: the fastest plan with one kind of value more made again, as long as that is faster.

In: the attempts so far. Out: what is faster is found there, too.

Levels have what is best at some price of a byte, and cuts one value of each layer. Near the least
memory single ops count, and a byte has no one price. There one kind of value after the other that
leaves the device is made again instead, in all layers alike: that with most offloaded first. What
else leaves is chosen anew (`cover`), and the schedule is the judge. What a value alone would keep
on the device is made again with it, or leaves in its place where that is smaller: of a cast, half
as much. Where much of what a kind is made of is needed again later, it is made apart, too: that is
gone meanwhile, and made twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cotrain_compile.dataflow import Op, Phase
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.alike import kinds_of
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.schedule.schedule import Draft
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.cover import covered
from cotrain_compile.placement.work import PER_OP_OF_KINDS, PER_OP_OF_MOVES
from cotrain_compile.plan import Placement

# Values of a kind with a smaller part of the device's budget in all are not worth a schedule.
TELLING = 0.05
# What is not faster by this part of a step is none.
GAIN = 5e-4
# What the name of such a plan ends with.
ENDING = "+values"

# What sets the ops of a step apart from those of another, in whatever names.
_Shape = tuple[Hashable, ...]


@dataclass
class _Tried:
    """The kinds that had their turn, made apart or not, and the shapes of all steps."""

    kinds: set[tuple[frozenset[str], bool]] = field(default_factory=set)
    shapes: set[_Shape] = field(default_factory=set)


def make_more_again(attempts: Attempts) -> None:
    """Make more again than the fastest plan does, kind by kind, where covers lead.

    Until no kind gains any more, or the work is spent.
    """
    fastest = attempts.found.fastest
    if fastest is None or fastest.placement.overlap_steps or not attempts.covers:
        return
    kinds = _Kinds(attempts.problem)
    attempts.meter.charge(PER_OP_OF_KINDS * len(kinds.dataflow.ops))
    tried = _Tried()
    while _one_round(attempts, kinds, tried):
        pass


def _one_round(attempts: Attempts, kinds: _Kinds, tried: _Tried) -> bool:
    """Try each kind, beside the fastest plan so far; returns whether any was faster.

    But for those that were `tried`: a kind that was no faster is none beside others either.
    """
    before = fastest = attempts.found.fastest
    assert fastest is not None
    least_bytes = TELLING * attempts.problem.budgets[Tier.DEVICE]
    for kind, is_apart in kinds.to_try(fastest.placement, least_bytes):
        again = frozenset(fastest.placement.recomputed) | kinds.with_sources(kind)
        apart = frozenset(fastest.placement.recomputed_apart) | (kind if is_apart else frozenset())
        if (kind, is_apart) in tried.kinds:
            continue
        if attempts.is_late:
            return False
        problem = _making(attempts.problem, again, apart)
        tried.kinds.add((kind, is_apart))
        if (shape := kinds.shape(problem)) in tried.shapes:
            continue
        tried.shapes.add(shape)
        found = _try(attempts, fastest, problem)
        if found is not None and found.step_s < (1.0 - GAIN) * fastest.step_s:
            attempts.found.keep(found.placement.policy, found)
            fastest = found
    return fastest is not before


def _making(problem: Problem, again: Collection[str], apart: Collection[str]) -> Problem:
    """The step with all of `again` made again, some `apart`."""
    names = tuple(b.name for b in problem.dataflow.buffers if b.name in again)
    return problem.recomputing(names, tuple(each for each in names if each in apart))


def _try(attempts: Attempts, fastest: Draft, problem: Problem) -> Draft | None:
    """`fastest` for the step of `problem`, which makes more again; None where that does not fit.

    It is none of the variants: programs go on from the levels and cuts.
    """
    attempts.progress("trying more values made again")
    before = fastest.placement
    name = before.policy.removesuffix(ENDING) + ENDING
    buffer = problem.dataflow.buffer
    attempts.meter.charge(2 * PER_OP_OF_MOVES * len(problem.dataflow.ops))
    placement = replace(
        before,
        policy=name,
        recomputed=problem.recomputed,
        recomputed_apart=problem.apart,
        offloaded=tuple(each for each in before.offloaded if each in buffer),
        refetched=(),
    )
    placement, moves = covered(problem, placement, problem.budgets[Tier.DEVICE])
    if max(moves.slot_bytes) > problem.budgets[Tier.DEVICE]:
        return None
    if _leaving(problem, placement) > _leaving(attempts.problem.under(before), before):
        return None  # more is made again, and more leaves all the same
    with suppress(PlacementError):
        return attempts.drafted(problem, placement, moves, fastest.tactics)
    return None


def _leaving(problem: Problem, placement: Placement) -> int:
    """Bytes of what is offloaded."""
    return sum(problem.dataflow.buffer[name].nbytes for name in placement.offloaded)


class _Kinds:
    """The values of a step that may be made again, by kind."""

    def __init__(self, problem: Problem) -> None:
        self.dataflow, self.device_s = problem.dataflow, problem.costs.device_s
        dataflow, self.may = self.dataflow, recomputable(self.dataflow)
        self.maker: Mapping[str, Op] = {
            name: op for op in dataflow.ops if op.phase is Phase.FORWARD for name in op.writes
        }
        self.needed = {
            name for op in dataflow.ops if op.phase is not Phase.FORWARD for name in op.reads
        }
        kinds, groups = kinds_of(dataflow), dict[int, set[str]]()
        for buffer in dataflow.buffers:
            if buffer.name in self.may:
                groups.setdefault(kinds[buffer.name], set()).add(buffer.name)
        self.groups = [frozenset(group) for group in groups.values()]

    def shape(self, problem: Problem) -> _Shape:
        """What sets the step of `problem` apart: which ops run again where, and on what.

        Of values that nobody else needs again, those made apart differ in their names alone.
        """
        runs = recomputed_ops(self.dataflow, problem.recomputed, problem.apart)
        number = {buffer.name: n for n, buffer in enumerate(problem.dataflow.buffers)}
        written = set(map(id, self.dataflow.ops))
        return tuple(
            (at, runs.get(op.name, op.name), *map(number.__getitem__, (*op.reads, *op.writes)))
            for at, op in enumerate(problem.dataflow.ops)
            if id(op) not in written
        )

    def _nbytes(self, names: Collection[str]) -> int:
        return sum(self.dataflow.buffer[name].nbytes for name in names)

    def to_try(
        self, placement: Placement, least_bytes: float
    ) -> Iterator[tuple[frozenset[str], bool]]:
        """Each kind that is worth it, and whether it is to be made apart: the cheapest first."""
        offloaded = self.offloaded(placement, least_bytes)
        yield from ((kind, False) for kind in offloaded)
        again, done = frozenset(placement.recomputed), set(placement.recomputed_apart)
        made = (kind for kind in self.groups if kind <= again and not kind <= done)
        twice = {kind: self._twice(kind, again) for kind in (*made, *offloaded)}
        large = (kind for kind, (nbytes, _) in twice.items() if nbytes > least_bytes)
        yield from ((kind, True) for kind in sorted(large, key=lambda kind: twice[kind][1]))

    def _twice(self, kind: frozenset[str], again: frozenset[str]) -> tuple[int, float]:
        """Of what a kind is made of and is made `again`: the most bytes for any one of those that
        others need, and the seconds of all."""
        found, spent_s = 0, 0.0
        for last in kind:
            seen, waiting = set[str](), [last]
            while waiting:
                for name in self.maker[waiting.pop()].reads:
                    if name in again and name not in seen:
                        seen.add(name)
                        waiting.append(name)
            found = max(found, self._nbytes(seen & self.needed))
            spent_s += math.fsum(self.device_s[self.maker[name].name] for name in sorted(seen))
        return found, spent_s

    def offloaded(self, placement: Placement, least_bytes: float) -> list[frozenset[str]]:
        """The kinds with more than `least_bytes` offloaded, that with most first.

        Before all others those with smaller sources: they need next to no work.
        """
        offloaded = set(placement.offloaded)
        gone = {group: self._nbytes(offloaded & group) for group in self.groups}
        large = (group for group, nbytes in gone.items() if nbytes > least_bytes)
        return sorted(large, key=lambda kind: (self.with_sources(kind) != kind, -gone[kind]))

    def with_sources(self, kind: frozenset[str]) -> frozenset[str]:
        """A kind, with what it is made of that nobody else needs behind the forward.

        Unless that is smaller: then it is kept in place of the kind.
        """
        found, waiting = set(kind), list(kind)
        while waiting:
            for name in self.maker[waiting.pop()].reads:
                if name in self.may and name not in self.needed and name not in found:
                    found.add(name)
                    waiting.append(name)
        smaller = self._nbytes(found - kind) < self._nbytes(kind)
        return kind if smaller else frozenset(found)
