"""Solve: the plan for a problem, by a named policy or by the ladder of all of them.

`auto` is the ladder: what fits stays as it is; otherwise simple rules and the greedy give plans,
for the step as it is and with more and more of it made again, the integer program a better one,
each is scheduled and simulated, and the fastest is returned. So a bad model can cost speed and
never correctness, and the plan is never slower than any simple rule's. Its report has the certified
bound of the relaxed program. All that is done for the step in each order of its micro-batches that
is worth a try (`orders`), with each parameter cast once (`cast_variants`), and for regions of it in
parts (`split_variants`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Rates, Tier
from cotrain_compile.placement.autotm.autotm import autotm
from cotrain_compile.placement.fold.fold import folded
from cotrain_compile.placement.fold.updates import EXCESS
from cotrain_compile.placement.milp.bound import OnThread, certified_bound_s
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.schedule.schedule import Draft, as_drafted, draft
from cotrain_compile.placement.search.attempts import Attempts, Progress
from cotrain_compile.placement.search.cast_variants import best_cast
from cotrain_compile.placement.search.climb_levels import (
    aim_lower,
    climb_by_program,
    climb_further,
    climb_quickly,
    follow_rules,
    follow_users,
)
from cotrain_compile.placement.search.finish import Finish, NothingFits
from cotrain_compile.placement.search.improve import (
    cover_values,
    fetch_late,
    let_small_leave,
    let_small_rest,
    share_updates,
)
from cotrain_compile.placement.search.infeasible import Least, floor_bytes, refuse, refuse_rule
from cotrain_compile.placement.search.more_values import make_more_again
from cotrain_compile.placement.search.orders import best_order
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.placement.search.share_gathers import share_gathers
from cotrain_compile.placement.search.small_params import with_small_resting
from cotrain_compile.placement.search.solve_report import note_on_limit, notes_of, report_of
from cotrain_compile.placement.search.split_variants import best_split
from cotrain_compile.placement.search.variants import (
    FAR,
    HOPELESS,
    NEAR,
    Levels,
    Variant,
    fastest_of,
)
from cotrain_compile.placement.search.whole_programs import decide_by_program, solve_programs
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.collector import collector_off

# Shares of the updates of `coarse` that `auto` tries as well.
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Policies that look at everything that can be decided: how far they are from the best is certified.
CERTIFIED = ("auto", "ilp", "greedy")


@collector_off()
def solve(
    problem: Problem,
    settings: SolveSettings | None = None,
    *,
    progress: Progress | None = None,
    incumbents: Sequence[Plan] = (),
) -> Plan:
    """The plan of `settings.policy` for `problem`.

    `incumbents` are plans of the same step for smaller budgets, by the same policy: where anything
    has to move, what is returned is no slower than these. `progress` is told what is being done.
    Raises `PlacementError` when nothing fits, with the least device budget that would do.
    """
    settings, told = settings or SolveSettings(), progress or (lambda stage: None)
    problem = replace(problem, speculates=settings.speculate and not settings.hedged)

    def in_order(whole: Problem, within: SolveSettings, plans: Sequence[Plan]) -> Plan:
        def climb(ordered: Problem, work: Allowance, own_plans: Sequence[Plan]) -> Plan:
            return _planned(ordered, within, told, work, own_plans)

        return best_order(whole, within, plans, climb)

    def cast(whole: Problem, within: SolveSettings, plans: Sequence[Plan]) -> Plan:
        return best_cast(whole, within, plans, in_order)

    return best_split(problem, settings, incumbents, cast)


def _planned(
    problem: Problem,
    settings: SolveSettings,
    progress: Progress,
    work: Allowance,
    incumbents: Sequence[Plan],
) -> Plan:
    """The plan of a step in one form: found for it with fewer ops, where it folds."""
    folds = settings.policy == "auto" and not (settings.speculate or settings.overlap_steps)
    smaller = folded(problem) if folds else problem
    if smaller is problem:
        return _Search(problem, settings, progress, work).run(incumbents)
    fewer = with_small_resting(smaller)
    first = _Search(fewer, settings, progress, work, written=problem)
    with suppress(NothingFits):
        return first.run(incumbents)
    last = _Search(problem, settings, progress, work)
    last.refuse_behind(first)
    if fewer is not smaller:
        whole = Allowance(work.meter, work.units, work.meter.spent)
        with suppress(NothingFits):
            return _Search(smaller, settings, progress, whole, written=problem).run(incumbents)
    last.work = Allowance(work.meter, work.units, work.meter.spent)
    return last.run(incumbents)


class _Search(Attempts):
    """A search; its problem may be that of the step that is `written`, folded."""

    def __init__(
        self,
        problem: Problem,
        settings: SolveSettings,
        progress: Progress,
        work: Allowance,
        written: Problem | None = None,
    ) -> None:
        super().__init__(problem, settings, progress, work)
        self.written = written or problem
        self.is_folded = written is not None
        self.finish = Finish(self.written, settings, is_folded=self.is_folded)
        self.bound: OnThread[float] | None = None
        self.bound_meter = Meter(self.meter.guard_s)
        self.claim_s = 0.0  # what no levels take less than; 0 where nobody has looked

    @cached_property
    def levels(self) -> Levels:
        """What can be made again."""
        self.progress("looking for what can be recomputed")
        return Levels(self.problem, self.meter)

    def run(self, incumbents: Sequence[Plan]) -> Plan:
        policy = self.settings.policy
        floor = floor_bytes(self.problem.dataflow) if policy in CERTIFIED else 0
        if floor > self.problem.budgets[Tier.DEVICE]:
            self._refuse()
        # A bound in guessed seconds bounds nothing: the machine may be faster than that.
        is_bounded = policy in CERTIFIED and self.problem.machine.rates is not Rates.GUESSED
        # HiGHS has processes of its own: the bound is certified beside the search, and with it.
        self.bound = OnThread(self._certify) if is_bounded else None
        with self.bound or nullcontext():
            if policy == "auto":
                self._climb(incumbents)
            else:
                self._single(policy)
                self._reuse(incumbents)
            return self._best()

    def refuse_behind(self, first: _Search) -> None:
        """Refuse where what needs least does not fit, as `first` has found no plan of it folded."""
        if self._least.nbytes > self.problem.budgets[Tier.DEVICE]:
            self.was_late, self.solution = first.ran_out, first.solution
            self._refuse()

    def _certify(self) -> float:
        settings, problem = self.settings, self.problem
        if self.is_folded:  # with the bytes by which an update may need less
            problem = problem.with_budget(Tier.DEVICE, problem.budgets[Tier.DEVICE] + EXCESS)
            problem = replace(problem, resting=frozenset())
        return certified_bound_s(
            replace(problem, speculates=settings.speculate),
            settings.solver,
            work=Allowance(self.bound_meter, settings.bound_units),
            seed=settings.seed,
            cyclic=settings.overlap_steps,
            recompute=settings.recompute,
        )

    def _climb(self, incumbents: Sequence[Plan]) -> None:
        if self.attempt(self.step, "resident"):
            return
        follow_rules(self, self.step)
        if "coarse" in self.found.drafts:  # the fraction that needs least
            self._sweep_fractions()
        self._reuse(incumbents)
        if incumbents:  # of plans nobody knows how else they may be scheduled
            fetch_late(self)
        stages = self._settle_quickly, self._relax_fastest, self._climb_on
        for number, stage in enumerate(stages):
            stage()
            # A relaxation may yet be far faster, rounded, than all that needs none.
            if not self._may_gain() or (number and self.is_behind):
                break
        else:
            solve_programs(self, max(self.claim_s, self._certified_s()))
        self._improve_fastest()

    def _may_gain(self) -> bool:
        """Whether anything may yet be found that is faster."""
        return self.is_slower_than((1.0 + self.settings.gap) * self._certified_s())

    def _settle_quickly(self) -> None:
        """What needs no program, and of that what is sure to tell."""
        if not self.settings.recompute:
            self.try_greedy(self.step)
            return
        climb_quickly(self, self.levels)
        best = fastest_of(self.variants, self.found.fastest_s)
        if best is not self.step:
            follow_rules(self, best)
        follow_users(self, self.levels)
        # Where covers lead, more made again gains more than what is beside the balanced share.
        share_updates(self, beside=self.is_cheap or not self.covers)
        share_gathers(self)
        make_more_again(self)

    def _relax_fastest(self) -> None:
        """What a program decides for what is made again in the fastest plan."""
        self.relax(fastest_of(self.variants, self.found.fastest_s))

    def _climb_on(self) -> None:
        """Other values made again: those that a program proposes, then those beside the fastest."""
        if self.settings.recompute:
            self.claim_s = climb_by_program(self, self.levels, self._certified_s())
            if not self.is_led_by_programs:
                climb_further(self, self.levels)
        if self._may_gain_by_greedy():
            self.try_greedy(self.step)
        aim_lower(self, self._certified_s())

    def _may_gain_by_greedy(self) -> bool:
        """Whether the greedy may be faster than what is found for the step as it is, in time."""
        fastest = self.found.fastest
        if fastest is None:
            return True
        hopeless = self.step.least_s > HOPELESS * fastest.step_s
        hopeless |= self.is_led_by_programs
        return not (hopeless or self.is_late) and self.is_slower_than(NEAR * self.claim_s)

    def _certified_s(self) -> float:
        """The certified bound, 0 where there is none. It began with the search.

        It is waited for: what the search does next is not to hang on which of them is quicker.
        """
        return (self.bound.result(self.meter.guard_s) or 0.0) if self.bound else 0.0

    def _improve_fastest(self) -> None:
        """The fastest plan with moves up late, and with what is small at rest."""
        # What is kept for this is there, however far a program has gone beyond what it had.
        spent = self.meter.spent - self.work.since
        self.work = replace(self.work, units=max(self.work.units, spent + self.following))
        cover_values(self)
        let_small_leave(self)
        share_updates(self)
        share_gathers(self)
        fetch_late(self)
        let_small_rest(self)

    def _single(self, policy: str) -> None:
        """One policy, whose refusal is the user's answer."""
        kind = policy.partition(":")[0]
        if policy == "fraction:auto":
            self._sweep_fractions()
            if not self.found.drafts:  # the one that needs least: its refusal answers the user
                least = self.step.by_rule(f"fraction:{FRACTIONS[-1]}")
                self.found.keep(policy, self._follow(least))
        elif policy == "greedy":
            self.try_greedy(self.step)
        elif policy in ("ilp", "lp-round"):
            decide_by_program(self, self.step, whole=policy == "ilp")
            # What does not fit in any round, or cannot, is not there for more time either.
            is_short_of_time = self.is_late and self.is_cut_short
            if not self.found.drafts and not is_short_of_time and not self.failure:
                self.try_greedy(self.step)
        elif kind.startswith("autotm-"):
            variant = kind.removeprefix("autotm-")
            limit_s, seed = self.meter.guard_s, self.settings.seed
            found = autotm(self.problem, variant, time_limit_s=limit_s, seed=seed)  # type: ignore[arg-type]
            self.found.keep(policy, draft(self.problem, found.placement))
        else:
            self.found.keep(policy, self._follow(self.step.by_rule(policy)))

    @cached_property
    def _least(self) -> Least:
        """The plan that needs least of the device, of all that this policy may make again."""
        self.progress("looking for the least that does")
        return min((variant.least for variant in self._kinds()), key=lambda least: least.nbytes)

    def _kinds(self) -> Iterator[Variant]:
        """The step as it is, and at each level that this policy may make again."""
        yield self.step
        if self.settings.recompute and self.settings.policy not in ("greedy", "ilp", "lp-round"):
            yield from self.levels.uniform

    def _keep_least(self) -> None:
        """All offloaded that can be, at the first level with which that fits."""
        for variant in self._kinds():
            if self.keeps("least", variant, variant.least.placement, variant.least.moves):
                return

    @property
    def ran_out(self) -> bool:
        """Whether a longer search would have tried more."""
        return self.was_late or self.solver.was_cut_short

    @property
    def limit_in_words(self) -> str:
        """The option that ended the search: what it has done, or the clock before that."""
        if self.meter.guard_hit:
            return f"time_limit ({self.settings.time_limit_s:g} s)"
        return f"work_limit ({self.settings.work_limit:g})"

    def _refuse(self) -> NoReturn:
        if self.is_folded:
            raise NothingFits
        # Before the least is looked for, which has no time of the search's.
        limit = self.limit_in_words if self.ran_out else ""
        refuse(self.problem, self._least, self.failure, limit=limit)

    def _follow(self, placement: Placement) -> Draft:
        """Schedule what a simple rule says; its refusal says what `auto` would need."""
        try:
            return draft(self.problem, placement)
        except PlacementError as refusal:
            refuse_rule(self.problem, placement, refusal, self._least)

    def _sweep_fractions(self) -> None:
        """Twin-Flow with every fraction; the fastest one that fits."""
        for share in FRACTIONS:
            if self.is_late and self.found.drafts:
                return
            self.attempt(self.step, f"fraction:{share}", "fraction:auto")

    def _reuse(self, plans: Sequence[Plan]) -> None:
        """Keep those of `plans` for no more memory that do nothing that is not allowed here."""
        settings = self.settings
        for plan in plans:
            placement = plan.placement
            allowed = self.problem.budgets
            fits = all(n <= allowed.get(tier, 0) for tier, n in plan.budgets.items())
            overlaps = placement.overlap_steps and not settings.overlap_steps
            recomputes = bool(placement.recomputed) and not settings.recompute
            if not fits or overlaps or recomputes:
                continue
            if self.is_folded:
                self.finish.given.append(plan)
                with suppress(PlacementError):
                    self.found.keep(placement.policy, draft(self.problem, placement))
            elif not plan.speculations or self.problem.speculates:
                self.found.keep_plan(plan)
            elif settings.speculate:  # hedged, so that it is to be fast without them
                with suppress(PlacementError):
                    waiting = draft(self.problem, replace(placement, speculative=()))
                    self.found.keep(placement.policy, waiting)

    def _best(self) -> Plan:
        """The fastest plan, with a report of how it was found; the refusal where there is none."""
        if not self.found.drafts and self.settings.policy == "auto":
            self._keep_least()
        if not self.found.drafts:
            self._refuse()
        ran_out = self.ran_out
        self.progress("simulating the plan")
        if is_beaten := self.is_folded and self._is_beaten:
            # Nobody runs it, and what is told is how fast it would be: no need to finish it.
            fastest = min(self.found.drafts.values(), key=lambda found: found.step_s)
            name, plan = fastest.placement.policy, as_drafted(self.problem, fastest)
        else:
            name, plan = self.finish.fastest_of(self.found)
        self.progress("certifying the bound")
        bound_s = self.bound.result_by(self.meter.guard_s) if self.bound else 0.0
        settings = self.settings
        report = report_of(
            self.written,
            plan,
            self.solution,
            solver=settings.solver,
            seed=settings.seed,
            seconds=self.meter.elapsed_s,
            bound_s=bound_s,
            rounds=self.rounds,
            simulated_s={name: found.step_s for name, found in self.found.drafts.items()},
            work=self.meter.spent - self.work.since,
            bound_work=self.bound_meter.spent,
            course=self.found.course,
            ended=self._ended(plan, bound_s, ran_out),
        )
        if is_beaten:
            return replace(plan, report=report)
        asked, solver = settings.policy, settings.solver
        notes = notes_of(self.written, plan, name, self.solution, asked=asked, solver=solver)
        # What the clock has ended may be another plan the next time: that is said of any.
        if ran_out and (self.meter.guard_hit or report.gap > FAR - 1.0):
            notes = (*notes, note_on_limit(self.limit_in_words, report.gap))
        return replace(plan, report=report, notes=notes)

    @property
    def _is_beaten(self) -> bool:
        """Whether a plan of another form is faster than all that is found, or was given."""
        given_s = min((p.predicted.makespan_s for p in self.finish.given), default=math.inf)
        return self.is_behind and given_s >= self.settings.known_s

    def _ended(self, plan: Plan, bound_s: float, ran_out: bool) -> str:
        """Why the search went no further."""
        if plan.predicted.makespan_s <= (1.0 + self.settings.gap) * bound_s:
            return f"the plan is within {self.settings.gap:.1%} of the bound"
        return f"its {self.limit_in_words} was spent" if ran_out else "all was tried"


__all__ = ["SolveSettings", "solve"]
