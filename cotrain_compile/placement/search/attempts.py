"""Attempts: one way after the other to plan a problem, each scheduled and kept if it fits.

In: a Problem and settings. Out: what fits, in `found`, and what the solver came back with. Which
ways are tried, and in which order, is for `solve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.decisions import Decisions
from cotrain_compile.placement.milp.solvers import NOT_BETTER, Solution
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import RegionLevels
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.placement.schedule.schedule import Draft, draft
from cotrain_compile.placement.search.cover import covered, with_all_offloaded
from cotrain_compile.placement.search.found import Found, Missing, note_unsound
from cotrain_compile.placement.search.greedy import greedy
from cotrain_compile.placement.search.programs import Programs
from cotrain_compile.placement.search.repair import repaired
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.variants import FAR, Variant
from cotrain_compile.placement.work import (
    PER_CELL_OF_GREEDY,
    PER_OP_OF_DRAFT,
    PER_OP_OF_MOVES,
    PER_TASK_OF_DRAFT,
    Allowance,
    Meter,
)
from cotrain_compile.plan import Placement
from cotrain_compile.support.plan_words import plan_words

# Moves up that begin not long before their use: what has come early takes the room of what leaves.
LATE = Tactics(lookahead=0.02)
# Ways to schedule what the greedy and the program decide.
TACTICS = (EAGER, Tactics(patient=True))
# The greedy aims so often, at last at what was missing twice.
GREEDY_ROUNDS = 3
# A placement is repaired so often before its program is solved again.
REPAIRS = 3
# A plan so much slower than the program claims is worth another round.
TRUST = 1.03
# A relaxation that claims so much more than a plan takes leads to no faster one.
AS_FAST = 1.005
# A search whose plan is so much slower than another goes no further. In bundles, where that has its
# moves, a plan is a little faster than its schedule.
BEHIND = 1.02
# So many times what the dearest schedule has taken is kept for the end: for the fastest plan in
# other ways, and its timeline. All else may take whatever is left.
FOLLOWING = 4
# A schedule is cheap that takes no larger a part of the work for a plan.
CHEAP = 0.01

Progress = Callable[[str], None]


class Attempts:
    """What was tried so far for `problem`.

    `step` is the problem as it is, `variants` are all that were tried, `solution` is the one that
    belongs to the fastest plan. All ends when `work` is spent, but for what follows the search.
    """

    def __init__(
        self,
        problem: Problem,
        settings: SolveSettings,
        progress: Progress,
        work: Allowance | None = None,
    ) -> None:
        self.problem, self.settings, self.progress = problem, settings, progress
        self.work = work or Allowance(Meter(settings.time_limit_s), settings.work_limit)
        self.meter = self.work.meter
        self.step = Variant(problem, progress=progress, meter=self.meter)
        self.variants = [self.step]
        self.found = Found(problem, settings.overlap_steps, self.meter)
        self.solution: Solution | None = None
        self.rounds = 0
        self.draft_units = 0.0  # what the dearest schedule has taken
        self.covered_s = dict[str, float]()  # by name
        self.uncovered_bytes = dict[str, int]()  # by name, what covers that do not fit lack
        self.covers: bool | None = None  # whether that was faster than the greedy for a level
        self.decided_greedily = set[tuple[str, tuple[Tactics, ...]]]()  # by name and tactics
        self.is_cut_short = False  # some program of a single step, for want of work
        self.was_late = False  # something was left out, or was to be, for want of work
        self.solver = Programs(settings, self._begin_program, self.meter)

    @property
    def left(self) -> float:
        """Units that are left for whatever comes next, beside those for what follows."""
        return max(0.0, self.work.left - self.following)

    @property
    def following(self) -> float:
        """Units that are kept for what follows the search."""
        return FOLLOWING * self.draft_units

    @property
    def is_late(self) -> bool:
        """Whether too little is left for one more schedule. Who asks leaves out more."""
        late = self.left <= self.draft_units
        self.was_late |= late
        return late

    @property
    def is_cheap(self) -> bool:
        """Whether a schedule takes so little of all the work that more may be tried at once."""
        return self.draft_units <= CHEAP * self.work.units

    def _begin_program(self) -> Allowance:
        """Say that a program is being solved; returns the work for it: all that is left."""
        self.progress(f"solving the integer program (round {self.rounds})")
        return Allowance(self.meter, self.left, self.meter.spent)

    @property
    def failure(self) -> str:
        """How the solver failed, in words."""
        return self.solution.failure if self.solution else ""

    def is_within(self, factor: float, seconds: float) -> bool:
        """Whether `seconds` are no more than `factor` times those of the fastest plan."""
        fastest = self.found.fastest
        return fastest is None or seconds <= factor * fastest.step_s

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan, found here or known before; infinity without any."""
        fastest = self.found.fastest
        return min(fastest.step_s if fastest is not None else math.inf, self.settings.known_s)

    @property
    def is_behind(self) -> bool:
        """Whether what was known before is clearly faster than all that is found."""
        known_s = self.settings.known_s
        return known_s < math.inf and self.is_within(1.0 / BEHIND, known_s)

    def is_slower_than(self, seconds: float) -> bool:
        """Whether nothing so fast is found. Of steps that overlap a program knows little."""
        return self.best_s > seconds or self.settings.overlap_steps

    def try_level(self, level: Variant, *, by_program: bool = False) -> bool:
        """Try it as it is, and by the greedy; returns whether nothing has to move.

        Or `by_program`: by the relaxation, which has looked further ahead, and by the greedy where
        that does not fit. Of two levels that make the same values again the first is tried.
        """
        is_new = (variant := self.known(level)) is level
        if is_new and self.attempt(level, "resident"):
            return True
        if not is_new and (not by_program or variant.relaxed is not None):
            return False
        by_program = by_program and not self.covers
        is_rounded = by_program and self.solver.has_solutions and self.relax(variant)
        if is_new and not (is_rounded or self.is_hopeless(level)):
            self.decide_quickly(level)
        return False

    def decide_quickly(self, level: Variant) -> None:
        """Schedule what the greedy decides, or a cover: what was faster for the first level."""
        covered_s = self.try_cover(level) if self.covers is not False else math.inf
        if self.covers is True and covered_s < math.inf:
            return
        self.try_greedy(level, TACTICS[:1])
        if self.covers is None:
            self.covers = covered_s <= self.found.fastest_s(level.recomputed)

    @property
    def is_led_by_programs(self) -> bool:
        """Whether one has decided a plan that is far faster than any that none has."""
        fastest = self.found.fastest
        if fastest is None or not is_by_program(fastest.placement.policy):
            return False
        others = (d.step_s for n, d in self.found.drafts.items() if not is_by_program(n))
        return FAR * fastest.step_s < min(others, default=math.inf)

    def known(self, variant: Variant) -> Variant:
        """The one of `variants` that makes the same again; else this one, which joins them."""
        for before in self.variants:
            if before.recomputed == variant.recomputed:
                return before
        self.variants.append(variant)
        return variant

    def is_hopeless(self, variant: Variant) -> bool:
        """Whether something is found that the relaxation, or the link, says it cannot beat."""
        return variant.least_s > AS_FAST * self.best_s

    def propose_levels(self, regions: Sequence[RegionLevels]) -> Solution | None:
        """The program that decides on the level of each region with everything else.

        Its relaxation: a level may be a mean. None without regions, or where it finds nothing.
        """
        if not regions:
            return None
        space = self.step.with_levels(regions)
        solution = self.solver.solve(
            space, self.problem.budgets, known_s=self.known_s, never_loose=True
        )
        found = solution.decisions is not None
        self.solver.has_solutions = found or solution.status == NOT_BETTER
        return solution if self.solver.has_solutions else None

    def relax(self, variant: Variant) -> bool:
        """Schedule the program's linear relaxation, rounded; returns whether that fits.

        What it claims no whole solution of the program can take less than, so it is not rounded
        where something as fast is found.
        """
        name = "lp-round" + variant.suffix
        targets: dict[Tier, float] = dict(self.problem.budgets)
        for _ in range(2):
            solution = self.solver.solve(
                variant.space,
                targets,
                known_s=self.known_s,
                never_loose=self.settings.recompute and self.solver.has_solutions,
            )
            variant.relaxed = variant.relaxed or solution
            if solution.decisions is None:
                return False
            placement = variant.space.placement(name, solution.decisions)
            missing = self.decide(name, variant, placement, TACTICS[:1])
            if missing is None or solution.is_loose or self.is_trusted(name, solution):
                break
            if name in self.found.drafts and not self.is_within(
                FAR, self.found.drafts[name].step_s
            ):
                break  # with less memory it claims more
            targets[missing.tier] -= 1.05 * missing.nbytes
        return name in self.found.drafts

    def is_trusted(self, name: str, solution: Solution) -> bool:
        """Whether the plan that has come of a solution is about as fast as that claims."""
        found = self.found.drafts.get(name)
        return found is not None and found.step_s <= TRUST * solution.step_s

    @property
    def known_s(self) -> float:
        """What the relaxation of a program has to be below. Of steps that overlap it says nothing.

        It has the price of what moves in it, and plans may be a little faster than it claims.
        """
        return math.inf if self.settings.overlap_steps else AS_FAST * self.best_s

    def attempt(self, variant: Variant, rule: str, name: str = "") -> bool:
        """Schedule what a simple rule decides about a variant; returns whether that fits.

        It is called as the rule, unless it has a `name`.
        """
        name = (name or rule) + variant.suffix
        self.progress(f"trying {plan_words(name)}")
        placement = variant.by_rule(rule)
        return self.keeps(name, variant, placement, moves_of(variant.problem, placement))

    def keeps(self, name: str, variant: Variant, placement: Placement, moves: Moves) -> bool:
        """Keep the schedule of a placement, if it fits. What some op rules out has none."""
        problem = variant.problem
        if max(moves.slot_bytes) > problem.budgets[Tier.DEVICE]:
            return False
        try:
            self.found.keep(name, self.drafted(problem, replace(placement, policy=name), moves))
        except PlacementError:
            return False
        return True

    def drafted(
        self, problem: Problem, placement: Placement, moves: Moves, tactics: Tactics = EAGER
    ) -> Draft:
        """The schedule of a placement; notes what such a thing takes. Raises as `draft` does."""
        units = PER_OP_OF_DRAFT * len(problem.dataflow.ops)
        try:
            found = draft(problem, placement, tactics=tactics, moves=moves)
            units += PER_TASK_OF_DRAFT * len(found.tasks)
            return found
        except PlanError as fault:  # its tasks contradict one another
            note_unsound(placement.policy, fault)
            raise PlacementError(str(fault), shortfall_bytes=0) from fault
        finally:
            self.meter.charge(units)
            self.draft_units = max(self.draft_units, units)

    def try_greedy(self, variant: Variant, tactics: Sequence[Tactics] = TACTICS) -> None:
        """Aim lower by what was missing until it fits; at last with all offloaded that can be."""
        name = "greedy" + variant.suffix
        if (asked := (name, tuple(tactics))) in self.decided_greedily:
            return
        self.decided_greedily.add(asked)
        targets: dict[Tier, float] = dict(self.problem.budgets)
        before: Decisions | None = None
        for _ in range(GREEDY_ROUNDS):
            space = variant.space
            decisions = greedy(space, targets[Tier.DEVICE], targets[Tier.HOST])
            cells = sum(map(len, space.effects)) * len(space.checkpoints)
            self.meter.charge(PER_CELL_OF_GREEDY * cells)
            if decisions == before:
                break
            before = decisions
            placement = variant.space.placement(name, decisions)
            missing = self.decide(name, variant, placement, tactics)
            if missing is None or name in self.found.drafts:
                return
            if self.is_late:
                break
            targets[missing.tier] -= 1.05 * missing.nbytes
        if name not in self.found.drafts:
            self.keeps(name, variant, variant.least.placement, variant.least.moves)

    def once_offloaded_bytes(self, variant: Variant) -> int:
        """The most that any op needs with all offloaded that can be, but nothing twice."""
        problem = variant.problem
        self.meter.charge(2 * PER_OP_OF_MOVES * len(problem.dataflow.ops))
        kept = replace(self.step.least.placement, recomputed=variant.recomputed)
        once = replace(with_all_offloaded(problem, kept), refetched=())
        return max(moves_of(problem, once).slot_bytes)

    def try_cover(self, variant: Variant) -> float:
        """Values offloaded by the exact profile, parameters on the host; seconds, if it fits."""
        name, best_s = "cover" + variant.suffix, math.inf
        if self.covered_s.get(name) is not None:
            return self.covered_s[name]
        self.progress(f"scheduling {plan_words(name)}")
        problem = variant.problem
        self.meter.charge(2 * PER_OP_OF_MOVES * len(problem.dataflow.ops))
        kept = replace(self.step.least.placement, policy=name, recomputed=variant.recomputed)
        placement, moves = covered(problem, kept, problem.budgets[Tier.DEVICE])
        self.uncovered_bytes[name] = max(moves.slot_bytes) - problem.budgets[Tier.DEVICE]
        if self.uncovered_bytes[name] <= 0:
            with suppress(PlacementError):
                found = self.drafted(problem, placement, moves, LATE)
                best_s = found.step_s
                self.found.keep(name, found)
        self.covered_s[name] = best_s
        return best_s

    def cover_rank(self, variant: Variant) -> tuple[float, int]:
        """The seconds of a cover, and what it lacks: the less the better, if none fits."""
        return self.try_cover(variant), max(0, self.uncovered_bytes["cover" + variant.suffix])

    def decide(
        self,
        name: str,
        variant: Variant,
        placement: Placement,
        tactics: Sequence[Tactics] = TACTICS,
    ) -> Missing | None:
        """Schedule a placement, repaired where it does not fit; returns what it lacks unrepaired.

        Updates on the device may need more than what is alive at any op: then a repair aims lower.
        """
        self.progress(f"scheduling {plan_words(name)}")
        problem, missing = variant.problem, None
        self.meter.charge(PER_OP_OF_MOVES * len(problem.dataflow.ops))
        target, moves = problem.budgets[Tier.DEVICE], moves_of(problem, placement)
        for _ in range(REPAIRS):
            short = max(moves.slot_bytes) - target
            if short > 0:
                missing = missing or Missing(Tier.DEVICE, short)
                placement, moves = repaired(
                    problem, placement, moves, lambda: variant.least, target
                )
            try:
                drafts = [
                    self.drafted(problem, placement, moves, each)
                    for each in _different(tactics, moves)
                ]
            except PlacementError as error:
                missing = missing or Missing(error.tier, error.shortfall_bytes)
                if error.tier is Tier.HOST:
                    return missing
                target -= error.shortfall_bytes
            else:
                self.found.keep(name, min(drafts, key=lambda found: found.step_s))
                return missing
        return missing


def is_by_program(policy: str) -> bool:
    """Whether a program has decided the plan of that name."""
    return policy.startswith(("lp-round", "ilp"))


def _different(tactics: Sequence[Tactics], moves: Moves) -> Sequence[Tactics]:
    """Those of `tactics` that may lead to different schedules of `moves`.

    Where no update on the device waits for its states, to be patient changes nothing.
    """
    if any(update.fetches for update in moves.device_updates):
        return tactics
    return [*dict.fromkeys(replace(each, patient=False) for each in tactics)]
