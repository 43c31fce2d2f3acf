"""Solve: the plan for a problem, by a named policy or by the ladder of all of them.

`auto` is the ladder: what fits stays as it is; otherwise simple rules and the greedy give plans,
for the step as it is and with more and more of it made again, the integer program a better one,
each is scheduled and simulated, and the fastest is returned. So a bad model can cost speed and
never correctness, and the plan is never slower than any simple rule's. Its report has the certified
bound of the relaxed program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NoReturn

from cotrain_compile.collector import collector_off
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.autotm.autotm import autotm
from cotrain_compile.placement.decisions.decisions import Decisions, DecisionSpace
from cotrain_compile.placement.milp.beside import Beside
from cotrain_compile.placement.milp.bound import certified_bound_s
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import Solution, failed, solve_program
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.list_scheduler import EAGER, Tactics
from cotrain_compile.placement.schedule.schedule import Draft, draft, finished
from cotrain_compile.placement.search.found import Found
from cotrain_compile.placement.search.greedy import greedy, least_memory
from cotrain_compile.placement.search.infeasible import floor_bytes, refuse, refuse_rule
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.solve_report import notes_of, report_of
from cotrain_compile.placement.search.variants import Levels, Variant, fastest_of, promising
from cotrain_compile.plan import Placement, Plan

# Shares of the updates of `coarse` that `auto` tries as well.
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# A program is solved again with less memory where whole tensors need more than its fluids.
ROUNDS = 5
# Policies that look at everything that can be decided: how far they are from the best is certified.
CERTIFIED = ("auto", "ilp", "greedy")
# Ways to schedule what the greedy and the program decide.
TACTICS = (EAGER, Tactics(patient=True))
# A plan so much slower than the program claims is worth another round.
TRUST = 1.03

Progress = Callable[[str], None]


@collector_off()
def solve(
    problem: Problem,
    settings: SolveSettings | None = None,
    *,
    progress: Progress | None = None,
    incumbents: Sequence[Plan] = (),
    space: DecisionSpace | None = None,
) -> Plan:
    """The plan of `settings.policy` for `problem`.

    `incumbents` are plans of the same step for smaller budgets: `auto` returns nothing slower.
    A `space` of the same step on the same machine is used again. `progress` is told what is being
    done. Raises `PlacementError` when nothing fits, with the least device budget that would do.
    """
    told = progress or (lambda stage: None)
    return _Search(problem, settings or SolveSettings(), told, space).run(incumbents)


class _Search:
    def __init__(
        self,
        problem: Problem,
        settings: SolveSettings,
        progress: Progress,
        space: DecisionSpace | None,
    ) -> None:
        self.problem, self.settings, self.progress = problem, settings, progress
        self.began = time.monotonic()
        self.step = Variant(problem, given=space, progress=progress)
        self.variants = [self.step]
        self.found = Found(problem, settings.overlap_steps)
        self.solution: Solution | None = None
        self.rounds = 0
        self.left_s = 0.0
        self.bound: Beside[float] | None = None

    def run(self, incumbents: Sequence[Plan]) -> Plan:
        policy = self.settings.policy
        if policy in CERTIFIED and floor_bytes(self.problem) > self.problem.budgets[Tier.DEVICE]:
            self._refuse()
        # HiGHS has processes of its own: the bound is certified beside the search, and with it.
        self.bound = Beside(self._certify) if policy in CERTIFIED else None
        with self.bound or nullcontext():
            if policy == "auto":
                self._climb(incumbents)
            else:
                self._single(policy)
            return self._best()

    def _certify(self) -> float:
        settings = self.settings
        return certified_bound_s(
            self.problem,
            settings.solver,
            time_limit_s=settings.time_limit_s,
            seed=settings.seed,
            cyclic=settings.overlap_steps,
            recompute=settings.recompute,
        )

    @property
    def _is_late(self) -> bool:
        """Whether hardly any time is left for the integer programs."""
        return self.left_s <= 0.1 * self.settings.time_limit_s

    @property
    def _failure(self) -> str:
        """How the solver failed, in words."""
        return self.solution.failure if self.solution else ""

    def _climb(self, incumbents: Sequence[Plan]) -> None:
        if self._attempt("resident", partial(self.step.by_rule, "resident")):
            return
        for name in tuple(RULES)[1:]:
            self._attempt(name, partial(self.step.by_rule, name))
        if "coarse" in self.found.drafts:  # the fraction that needs least
            self._sweep_fractions()
        self._greedy(self.step)
        if self.settings.recompute:
            self._climb_levels()
        # Of steps that overlap the relaxation says nothing.
        gap = -1.0 if self.settings.overlap_steps else self.settings.gap
        hopeful = promising(self.variants, self.found.fastest_s, gap)
        self.solution = None if hopeful else fastest_of(self.variants, self.found.fastest_s).relaxed
        for variant in hopeful:
            self._programs(variant, share=1.0 / len(hopeful))
        for plan in incumbents:
            self._reuse(plan)

    def _climb_levels(self) -> None:
        """With values made again: a rounding, as long as a next level is faster, and the rules."""
        self.progress("looking for what can be made again")
        levels = Levels(self.problem)
        self._relax(self.step)
        found_s, claim_s = {0.0: self.found.fastest_s(())}, {0.0: self.step.claim_s}
        at = levels.guess()
        while at is not None:
            level = levels.variant(at)
            if self._try_level(level):
                levels.drop_above(at)  # making more again only takes longer
            found_s[at] = self.found.fastest_s(level.recomputed)
            claim_s[at] = level.claim_s or found_s[at]
            at = levels.next_to_best(found_s, claim_s)
        for users in levels.dissolved():
            self._try_level(users)
        best = fastest_of(self.variants, self.found.fastest_s)
        for name in tuple(RULES)[1:] if best is not self.step else ():
            self._attempt(name + best.suffix, partial(best.by_rule, name))

    def _try_level(self, level: Variant) -> bool:
        """Try what decides quickly; returns whether nothing has to move."""
        self.variants.append(level)
        if self._attempt("resident" + level.suffix, partial(level.by_rule, "resident")):
            return True
        if not self._relax(level):
            self._greedy(level, TACTICS[:1])
        return False

    def _relax(self, variant: Variant) -> bool:
        """Schedule the program's linear relaxation, rounded; returns whether that fits.

        What it claims no whole solution of the program can take less than.
        """
        left_s, name = self.left_s, "lp-round" + variant.suffix
        targets: dict[Tier, float] = dict(self.problem.budgets)
        for _ in range(2):
            solution = self._solve(variant.space, targets, True, False)
            self.left_s = left_s  # the time limit is for the integer programs
            if solution.decisions is None:
                return False
            variant.relaxed = variant.relaxed or solution
            refusal = self._decide(name, solution.decisions, variant.space, TACTICS[:1])
            if refusal is None:
                return True
            targets[refusal.tier] -= 1.05 * refusal.shortfall_bytes
        return False

    def _single(self, policy: str) -> None:
        """One policy, whose refusal is the user's answer."""
        kind = policy.partition(":")[0]
        if policy == "fraction:auto":
            self._sweep_fractions()
            if not self.found.drafts:  # the one that needs least: its refusal answers the user
                least = self.step.by_rule(f"fraction:{FRACTIONS[-1]}")
                self.found.keep(policy, self._follow(least))
        elif policy == "greedy":
            self._greedy(self.step)
        elif policy in ("ilp", "lp-round"):
            self._programs(self.step, whole=policy == "ilp")
            if not self.found.drafts and not self._is_late and not self._failure:
                self._greedy(self.step)
        elif kind.startswith("autotm-"):
            variant = kind.removeprefix("autotm-")
            limit_s, seed = self.settings.time_limit_s, self.settings.seed
            found = autotm(self.problem, variant, time_limit_s=limit_s, seed=seed)  # type: ignore[arg-type]
            self.found.keep(policy, draft(self.problem, found.placement))
        else:
            self.found.keep(policy, self._follow(self.step.by_rule(policy)))

    def _refuse(self) -> NoReturn:
        refuse(self.problem, self.step.cuts, self._failure)

    def _follow(self, placement: Placement) -> Draft:
        """Schedule what a simple rule says; its refusal says what `auto` would need."""
        try:
            return draft(self.problem, placement)
        except PlacementError as refusal:
            refuse_rule(self.problem, placement, refusal, self.step.cuts)

    def _attempt(self, name: str, placement: Callable[[], Placement]) -> bool:
        """Schedule a placement; returns whether it fits."""
        self.progress(f"trying {name}")
        try:
            self.found.keep(name, draft(self.problem, replace(placement(), policy=name)))
        except PlacementError:
            return False
        return True

    def _sweep_fractions(self) -> None:
        """Twin-Flow with every fraction; the fastest one that fits."""
        for share in FRACTIONS:
            self._attempt("fraction:auto", partial(self.step.by_rule, f"fraction:{share}"))

    def _reuse(self, plan: Plan) -> None:
        """Keep a plan for no more memory that does nothing that is not allowed here."""
        settings, placement = self.settings, plan.placement
        fits = all(plan.budgets[tier] <= self.problem.budgets[tier] for tier in Tier)
        overlaps = placement.overlap_steps and not settings.overlap_steps
        recomputes = bool(placement.recomputed) and not settings.recompute
        if fits and not (overlaps or recomputes):
            self.found.keep_plan(plan)

    def _greedy(self, variant: Variant, tactics: Sequence[Tactics] = TACTICS) -> None:
        """Aim lower by what was missing until it fits; at last with everything away that can be."""
        name = "greedy" + variant.suffix
        targets: dict[Tier, float] = dict(self.problem.budgets)
        for _ in range(3):
            decisions = greedy(variant.space, targets[Tier.DEVICE], targets[Tier.HOST])
            refusal = self._decide(name, decisions, variant.space, tactics)
            if refusal is None:
                return
            targets[refusal.tier] -= 1.05 * refusal.shortfall_bytes
        for space in variant.cuts:
            if self._decide(name, least_memory(space), space, tactics) is None:
                return

    def _decide(
        self,
        name: str,
        decisions: Decisions,
        space: DecisionSpace,
        tactics: Sequence[Tactics] = TACTICS,
    ) -> PlacementError | None:
        """Schedule decisions; returns what is missing where they do not fit."""
        placement = space.placement(name, decisions)
        self.progress(f"scheduling {name}")
        try:
            drafts = [draft(self.problem, placement, tactics=each) for each in tactics]
        except PlacementError as refusal:
            return refusal
        self.found.keep(name, min(drafts, key=lambda found: found.step_s))
        return None

    def _programs(self, variant: Variant, *, share: float = 1.0, whole: bool = True) -> None:
        """The program of a single step; where steps overlap that of many, too.

        For that there is a `share` of the time limit, and what was left before.
        """
        self.left_s += share * self.settings.time_limit_s
        self._program(variant, whole=whole)
        if self.settings.overlap_steps:
            self._cyclic_program(variant, whole=whole)

    def _cyclic_program(self, variant: Variant, *, whole: bool) -> None:
        """Decisions for overlapping steps; the simulation of many says what they are worth."""
        name = ("ilp" if whole else "lp-round") + variant.suffix
        self.left_s = max(self.left_s, 0.3 * self.settings.time_limit_s)
        targets: dict[Tier, float] = dict(self.problem.budgets)
        before = self.found.drafts.get(name)
        for _ in range(2):
            solution = self._solve(variant.space, targets, True, whole, cyclic=True)
            if solution.decisions is None:
                return
            refusal = self._decide(name, solution.decisions, variant.space)
            if refusal is None:
                break
            targets[refusal.tier] -= 1.05 * refusal.shortfall_bytes
        if self.found.drafts.get(name) is not before:
            self.solution = solution

    def _program(self, variant: Variant, *, whole: bool = True) -> None:
        """The integer program (or its LP relaxation, rounded), with a margin where it needs one.

        Where the careful program finds nothing in a budget or in time, the relaxed one decides, at
        last with split clusters, rounded: the scheduler keeps to the budget whatever is decided,
        and only time is at stake.
        """
        name = ("ilp" if whole else "lp-round") + variant.suffix
        budgets = self.problem.budgets
        versions = [(True, whole), (False, whole), (False, False)]
        margins, before_short = dict.fromkeys(Tier, 0.0), 0
        for number in range(1, ROUNDS + 1):
            self.rounds = number
            careful, in_one = versions[0]
            space = variant.space if careful else variant.peak_space
            targets = {tier: budgets[tier] - margins[tier] for tier in Tier}
            solution = self._solve(space, targets, careful, in_one)
            if solution.decisions is None:
                self.solution = self.solution or solution  # its status is to be told
                del versions[0]
                if not versions:
                    return
                continue
            before = self.found.drafts.get(name)
            refusal = self._decide(name, solution.decisions, space)
            found = self.found.drafts.get(name)
            if self.solution is None or (found is not before and found is self.found.fastest):
                self.solution = solution  # the claim that belongs to the plan
            trusted = found is not None and found.step_s <= TRUST * solution.step_s
            if refusal is None and (trusted or self._is_late or not careful):
                return
            tier, short = (refusal.tier, refusal.shortfall_bytes) if refusal else (Tier.DEVICE, 0)
            if self._is_late:
                versions = versions[-1:]  # the rounding takes a second
            elif short and short == before_short:
                margins[tier] *= 2  # what is missing is not what the program counts
            before_short = short
            margins[tier] += 1.05 * short + 0.01 * budgets[tier]

    def _solve(
        self,
        space: DecisionSpace,
        targets: Mapping[Tier, float],
        careful: bool,
        whole: bool,
        *,
        cyclic: bool = False,
    ) -> Solution:
        self.progress(f"solving the integer program (round {self.rounds})")
        # The rounding comes last: without it there may be no plan but the greedy's.
        least = 0.2 if whole else 0.5
        budgets_mib = targets[Tier.DEVICE] / MIB, targets[Tier.HOST] / MIB
        relaxed = not careful
        try:
            program = Program(space, *budgets_mib, relaxed=relaxed, whole=whole, cyclic=cyclic)
        except OptionError as absent:  # pulp cannot be imported
            return failed(absent)
        solution = solve_program(
            program,
            self.settings.solver,
            time_limit_s=max(least * self.settings.time_limit_s, 0.6 * self.left_s),
            gap=self.settings.gap,
            seed=self.settings.seed,
        )
        self.left_s -= solution.seconds
        return solution

    def _best(self) -> Plan:
        """The fastest plan, with a report of how it was found; the refusal where there is none."""
        drafts = self.found.drafts
        if not drafts:
            self._refuse()
        name = min(drafts, key=lambda name: drafts[name].step_s)
        self.progress("simulating the plan")
        plan = finished(self.problem, drafts[name], compiled=self.settings.compiled)
        self.progress("certifying the bound")
        bound_s = self.bound.result() if self.bound else 0.0
        settings = self.settings
        report = report_of(
            self.problem,
            plan,
            self.solution,
            solver=settings.solver,
            seed=settings.seed,
            seconds=time.monotonic() - self.began,
            bound_s=bound_s,
            rounds=self.rounds,
            simulated_s={name: found.step_s for name, found in drafts.items()},
        )
        asked, solver = settings.policy, settings.solver
        notes = notes_of(self.problem, plan, name, self.solution, asked=asked, solver=solver)
        return replace(plan, report=report, notes=notes)


__all__ = ["SolveSettings", "solve"]
