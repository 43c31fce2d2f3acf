"""Variants: the step as it is, and with one of its levels of values made again in every layer.

Where checkpoints of the user's were dissolved, what they would make again is one more.

In: the Problem of the step. Out: `Variant`s, each with what can be decided about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Dataflow, Op, Phase
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.solvers import Solution
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.published import any_rule
from cotrain_compile.placement.recompute.levels import (
    FoundLevels,
    RegionLevels,
    StepLevel,
    find_levels,
    saved_at,
    spread,
    with_gathers,
)
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.regions import every_layer, every_other_layer
from cotrain_compile.placement.remembered import Same, remembered
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.search.cuts import Cut, cuts_of
from cotrain_compile.placement.search.infeasible import Least, least_of
from cotrain_compile.placement.search.small_params import at_rest
from cotrain_compile.placement.work import PER_OP_OF_LEAST, PER_OP_OF_SPACE, Meter
from cotrain_compile.plan import Placement

# A program that claims so much more than a plan takes has no plan that is faster.
HOPELESS = 1.05
# Parts of the layers that take the next level.
PARTS = (1.0, 0.5, 0.25)
# A value outside layers is large from so small a part of the device's budget on.
LARGE = 20
# A share of a step's seconds that is not worth another level.
LITTLE = 0.005
# A plan so close to what any levels may take is near enough; one that is farther than the second
# has levels tried one by one.
NEAR, FAR = 1.005, 1.05


@dataclass(eq=False)
class Variant:
    """A step in which some values are made again.

    `problem` is of that step, `suffix` follows the name of a policy that is tried on it; both say
    nothing of recomputation for the step as it is. `progress` is told what is looked for, which is
    charged to the `meter`. `relaxed` is the solution of the program's linear relaxation, None where
    nobody has looked.
    """

    problem: Problem
    suffix: str = ""
    progress: Callable[[str], None] = lambda stage: None
    relaxed: Solution | None = None
    meter: Meter = field(default_factory=Meter)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """What is made again."""
        return self.problem.recomputed

    @property
    def claim_s(self) -> float:
        """The least that a solution of the program claims; 0 where nobody has looked."""
        return self.relaxed.claim_s if self.relaxed else 0.0

    @cached_property
    def space(self) -> DecisionSpace:
        """What can be decided; the budgets of this problem."""
        self.progress("looking for what can be decided")
        return self._counted(decision_space(self.problem))

    def with_levels(self, regions: Sequence[RegionLevels]) -> DecisionSpace:
        """What can be decided where each of `regions` may be at any of its levels, too."""
        return self._counted(decision_space(self.problem, regions=regions))

    @cached_property
    def peak_space(self) -> DecisionSpace:
        """The same with memory known exactly at the peaks, for the relaxed program."""
        return self._counted(decision_space(self.problem, at_peaks=True))

    def _counted(self, space: DecisionSpace) -> DecisionSpace:
        self.meter.charge(PER_OP_OF_SPACE * len(self.problem.dataflow.ops))
        return space

    @cached_property
    def least(self) -> Least:
        """The plan that needs least of the device."""
        self.meter.charge(PER_OP_OF_LEAST * len(self.problem.dataflow.ops))
        return least_of(self.problem)

    @property
    def least_s(self) -> float:
        """What no plan of it takes less than, as far as anybody knows."""
        return max(self.claim_s, self._swap_s)

    @cached_property
    def _swap_s(self) -> float:
        """Of activations, all beyond the budget goes down before there is most, and up after it."""
        dataflow, machine = self.problem.dataflow, self.problem.machine
        others = {b.name for b in dataflow.buffers if not b.is_passing}
        others.update(group.gradient for group in dataflow.updates)
        others.update(low_precision_copies(dataflow).values())
        room_bytes = sum(dataflow.buffer[name].nbytes for name in others)
        room_bytes += self.problem.budgets[Tier.DEVICE]
        over_bytes = max(0, liveness(dataflow).peak_bytes - room_bytes)
        return over_bytes / machine.d2h.bytes_per_s + over_bytes / machine.h2d.bytes_per_s

    def by_rule(self, name: str) -> Placement:
        """What the simple rule `name` decides about this step."""
        dataflow = self.problem.dataflow
        placement = any_rule(name)(dataflow)
        if self.recomputed:  # the step as it is has the rule's own plan
            resting = (dataflow.update[param] for param in self.problem.resting)
            placement = at_rest(placement, list(resting))
        again = dict.fromkeys((*placement.recomputed, *self.recomputed))
        return replace(placement, recomputed=tuple(again))


def fastest_of(
    variants: Sequence[Variant], fastest_s: Callable[[tuple[str, ...]], float]
) -> Variant:
    """The variant with the fastest plan so far."""
    return min(variants, key=lambda variant: fastest_s(variant.recomputed))


def promising(
    variants: Sequence[Variant], fastest_s: Callable[[tuple[str, ...]], float], gap: float
) -> list[Variant]:
    """The variants for the integer program: the fastest so far, and the step as it is, the first.

    Only one of them where the step as it is has no chance, or is the fastest. None where the
    relaxation of the fastest says that no solution of its program is faster by more than `gap`.
    """
    step, best = variants[0], fastest_of(variants, fastest_s)
    best_s = fastest_s(best.recomputed)
    chances = [] if best_s <= (1.0 + gap) * best.claim_s else [best]
    if best is not step and step.least_s <= HOPELESS * best_s:
        chances.append(step)
    return chances


@remembered
def _levels_of(dataflow: Dataflow, device_s: Same[Mapping[str, float]]) -> FoundLevels:
    (seconds,) = device_s
    return find_levels(dataflow, seconds, recomputable(dataflow))


class Levels:
    """The levels of a step by number; 0 is the step as it is. Each contains the one before it.

    At 2.25 one layer of four is at level 3, and the others at 2. `regions` have levels of their
    own, of which any may go together. In all of them `head` is made again, too.
    One level gathers parameters again for the backward, and so do those above it.
    """

    def __init__(self, problem: Problem, meter: Meter | None = None) -> None:
        self._problem, dataflow = problem, problem.dataflow
        self.head = frozenset[str]()
        self._meter = meter or Meter()
        self._meter.charge(PER_OP_OF_LEAST * len(dataflow.ops))
        self._may = recomputable(dataflow)
        found = _levels_of(dataflow, Same([problem.costs.device_s]))
        self.regions = found.regions
        nothing = StepLevel(frozenset(), 0, 0.0, (frozenset(),) * len(found.regions))
        self._levels = with_gathers((nothing, *found.uniform), dataflow, problem.costs)
        self._last: float = len(self._levels) - 1

    @property
    def gather(self) -> bool:
        """Whether some level gathers parameters again."""
        return len(self._levels[-1].by_region) > len(self.regions)

    @property
    def count(self) -> int:
        """How many levels there are above 0."""
        return len(self._levels) - 1

    def variant(self, number: float) -> Variant:
        """The step at a level above 0, a multiple of the smallest of `PARTS`."""
        less, more = self._levels[math.floor(number)], self._levels[math.ceil(number)]
        return self._with_head(less.towards(more, round(4 * (number % 1))), f"{number:g}")

    @property
    def uniform(self) -> list[Variant]:
        """The step at each level above 0."""
        return [self.variant(number) for number in range(1, self.count + 1)]

    def by_region(self, numbers: Sequence[float]) -> Variant:
        """The step in which each region is at one of its own levels, near those of `numbers`."""
        return self._with_head(spread(self.regions, numbers), "by-region")

    def near(self, numbers: Sequence[float]) -> Iterator[Variant]:
        """Levels about those of the regions in `numbers`: by region, then everywhere alike."""
        saved = sum(saved_at(*each) for each in zip(self.regions, numbers, strict=True))
        if not saved:
            return
        by_region = self.by_region(numbers)
        if by_region.recomputed:  # not all rounded down
            yield by_region
        quarters = [n / 4 for n in range(1, 4 * len(self._levels) - 3)]
        nearest = [
            min(tried, key=lambda n: abs(self._saved_bytes(n) - saved), default=0.0)
            for tried in (quarters, quarters[3::4])
        ]
        yield from (self.variant(number) for number in dict.fromkeys(nearest) if number)

    def that_fit(self, budget_bytes: int) -> Iterator[Variant]:
        """The first level with which all fits on the device, then it in fewer of the layers.

        A level above one that fits need not: more runs again where the backward is at its peak.
        """

        def fits(problem: Problem) -> bool:
            return liveness(problem.dataflow).peak_bytes <= budget_bytes

        if min(liveness(self._problem.dataflow).live_bytes) > budget_bytes:
            return  # where the step begins and ends nothing is made again
        for number in range(1, len(self._levels)):
            fewer = (self.variant(number - part) for part in (0.0, 0.25, 0.5, 0.75))
            if found := [*takewhile(lambda variant: fits(variant.problem), fewer)]:
                yield from found
                return

    @property
    def last(self) -> StepLevel:
        """The one that makes most again."""
        return self._levels[-1]

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Where the replays of the last level may be cut."""
        return cuts_of(self._problem.dataflow, self.last)

    def with_cuts(self, cuts: Sequence[Cut]) -> Variant:
        """The step at the last level, but for the values in which it is cut."""
        kept = frozenset[str]().union(*(cut.names for cut in cuts))
        told = "-".join(str(cut.at) for cut in cuts)
        return self._with_head(self.last.recomputed - kept, f"cut-{told}")

    def heads(self) -> Iterator[frozenset[str]]:
        """A large value that is in no layer, such as logits, with the large ones it is made of.

        As far as these are needed no earlier. The value that is needed last comes first: of several
        that are made of one another a part may do.
        """
        buffer, budget_bytes = self._problem.dataflow.buffer, self._problem.budgets[Tier.DEVICE]
        outside = self._may - self.last.recomputed
        large = {name for name in outside if LARGE * buffer[name].nbytes > budget_bytes}
        maker, needed = dict[str, Op](), dict[str, int]()
        for position, op in enumerate(self._problem.dataflow.ops if large else ()):
            if op.phase is Phase.FORWARD:
                maker |= dict.fromkeys(large.intersection(op.writes), op)
            else:
                needed = dict.fromkeys(large.intersection(op.reads), position) | needed
        for name in sorted(needed, key=lambda each: (-needed[each], each)):
            chosen = [name]
            for made in chosen:  # grows while it is read
                late = (r for r in maker[made].reads if needed.get(r, math.inf) >= needed[name])
                chosen += (r for r in late if r in large and r not in chosen)
            yield frozenset(chosen)

    def _saved_bytes(self, number: float) -> float:
        less, more = self._levels[math.floor(number)], self._levels[math.ceil(number)]
        return less.saved_bytes + (number % 1) * (more.saved_bytes - less.saved_bytes)

    def dissolved(self) -> Iterator[Variant]:
        """The step that makes again what the user's checkpoints would, where they are dissolved."""
        checkpoints = self._problem.dataflow.checkpoints
        values = self._may.intersection(checkpoints.values)
        if checkpoints.dissolved and values:
            yield self._variant(values, "checkpoints")

    def usual(self, below_s: float) -> Iterator[Variant]:
        """What users checkpoint by themselves: every layer, or every other one.

        Those whose ops alone take less than `below_s`, with what runs again.
        """
        dataflow, device_s = self._problem.dataflow, self._problem.costs.device_s
        passes = (op.name for op in dataflow.ops if op.phase is not Phase.OPTIMIZER)
        alone_s = math.fsum(device_s[name] for name in passes)
        for name, choose in (("every-layer", every_layer), ("every-other", every_other_layer)):
            again = choose(dataflow, self._may)
            makers = (op.name for op in dataflow.ops if not again.isdisjoint(op.writes))
            if again and alone_s + math.fsum(device_s[each] for each in makers) < below_s:
                yield self._variant(again, name)

    def _with_head(self, recomputed: Collection[str], name: str) -> Variant:
        return self._variant(self.head.union(recomputed), name + "+head" * bool(self.head))

    def _variant(self, recomputed: Collection[str], name: str) -> Variant:
        names = tuple(b.name for b in self._problem.dataflow.buffers if b.name in recomputed)
        problem = self._problem.recomputing(names)
        return Variant(problem, f"+recompute:{name}", meter=self._meter)

    def guess(self) -> float | None:
        """The level that makes again what takes less time than its way over the link and back.

        At least the first one; None where there is none.
        """
        machine = self._problem.machine
        link_s = 1.0 / machine.d2h.bytes_per_s + 1.0 / machine.h2d.bytes_per_s
        number, saved_bytes, spent_s = 0, 0, 0.0
        for level in self._levels[1:]:
            more_bytes, more_s = level.saved_bytes - saved_bytes, level.seconds - spent_s
            if number and more_s > link_s * more_bytes:
                break
            number, saved_bytes, spent_s = number + 1, level.saved_bytes, level.seconds
        return number or None

    def drop_above(self, number: float) -> None:
        """Forget the levels above this one."""
        self._last = number

    def next_to_best(
        self,
        found_s: Mapping[float, float],
        claim_s: Mapping[float, float],
    ) -> float | None:
        """The next level to try, beside the fastest in `found_s`; None when these are there.

        Where no level has fit so far, the one above all that were tried, then the one below: making
        more again needs less memory, until what runs again at once is much. Parts of the layers are
        tried first on the side that promises more, in the light of what programs claim, `claim_s`.
        """
        levels = [at for at in found_s if at]
        if all(math.isinf(found_s[at]) for at in levels):
            around = max(levels, default=0.0) + 1.0, min(levels, default=1.0) - 1.0
            return next((at for at in around if 0 < at <= self._last), None)
        best = min(found_s, key=found_s.__getitem__)
        for part in PARTS:
            beside = [at for at in (best - part, best + part) if 0 < at <= self._last]
            fresh = [at for at in beside if at not in found_s]
            if best % part or not fresh:
                continue
            if part == PARTS[0]:
                return fresh[0]
            hoped_s = {at: self._hope_s(2 * at - best, best, found_s, claim_s) for at in fresh}
            side = min(fresh, key=hoped_s.__getitem__)
            if hoped_s[side] < found_s[best] * (1.0 - LITTLE):
                return side
        return None

    def _hope_s(
        self,
        towards: float,
        best: float,
        found_s: Mapping[float, float],
        claim_s: Mapping[float, float],
    ) -> float:
        """The least that levels between two may take: less of the one and less of the other.

        Below `best` that is the same without what more of it is made again; above it what the
        level there claims, with no more made again than at `best`.
        """
        if towards not in found_s:
            return math.inf
        more_s = self._seconds(towards) - self._seconds(best)
        return found_s[best] + more_s if towards < best else claim_s[towards] - more_s

    def _seconds(self, number: float) -> float:
        less, more = self._levels[math.floor(number)], self._levels[math.ceil(number)]
        return less.seconds + (number % 1) * (more.seconds - less.seconds)
