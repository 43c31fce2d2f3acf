"""Whole programs: what the integer programs of a step decide, solved to their end.

In: the attempts at a step, with what was found by rules, the greedy and relaxations. Out: what
fits is found there, and the solution that belongs to the fastest plan.
"""

from __future__ import annotations

from cotrain_compile.machine import Tier
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.variants import FAR, Variant, fastest_of, promising

# A program is solved again with less memory where whole tensors need more than its fluids.
ROUNDS = 5


def solve_programs(attempts: Attempts, least_s: float) -> None:
    """The integer programs of the steps that may have a faster plan, each in its time.

    No plan of any step takes less than `least_s`.
    """
    settings, found = attempts.settings, attempts.found
    # Of steps that overlap the relaxation says nothing.
    gap = -1.0 if settings.overlap_steps else settings.gap
    if settings.recompute and not settings.overlap_steps:
        gap = max(gap, FAR - 1.0)  # other values made again would gain more
    hopeful: list[Variant] = []  # where a plan is near the least no level has a better one
    if attempts.is_slower_than((1.0 + gap) * least_s) and not attempts.is_late:
        hopeful = [
            variant
            for variant in promising(attempts.variants, found.fastest_s, gap)
            if _may_lead(attempts, variant)
        ]
    fastest = fastest_of(attempts.variants, found.fastest_s)
    attempts.solution = None if hopeful else fastest.relaxed
    for variant in hopeful:
        decide_by_program(attempts, variant)


def _may_lead(attempts: Attempts, variant: Variant) -> bool:
    """Whether its relaxation, rounded, is not far slower than the fastest plan.

    Where that does not fit and covers lead, what the program decides does not fit either.
    """
    rounded, fastest = (
        attempts.found.drafts.get("lp-round" + variant.suffix),
        attempts.found.fastest,
    )
    if fastest is None or not attempts.settings.recompute:
        return True
    if rounded is None:
        return not attempts.covers
    return rounded.step_s <= FAR * fastest.step_s


def decide_by_program(attempts: Attempts, variant: Variant, *, whole: bool = True) -> None:
    """The program of a single step; where steps overlap that of many, too."""
    _program(attempts, variant, whole=whole)
    if attempts.settings.overlap_steps:
        _cyclic_program(attempts, variant, whole=whole)


def _cyclic_program(attempts: Attempts, variant: Variant, *, whole: bool) -> None:
    """Decisions for overlapping steps; the simulation of many says what they are worth."""
    name = ("ilp" if whole else "lp-round") + variant.suffix
    targets: dict[Tier, float] = dict(attempts.problem.budgets)
    before = attempts.found.drafts.get(name)
    for _ in range(2):
        solution = attempts.solver.solve(variant.space, targets, whole=whole, cyclic=True)
        if solution.decisions is None:
            return
        placement = variant.space.placement(name, solution.decisions)
        missing = attempts.decide(name, variant, placement)
        if missing is None:
            break
        targets[missing.tier] -= 1.05 * missing.nbytes
    if attempts.found.drafts.get(name) is not before:
        attempts.solution = solution


def _program(attempts: Attempts, variant: Variant, *, whole: bool) -> None:
    """The integer program (or its LP relaxation, rounded), with a margin where it needs one.

    Where the conservative program finds nothing in a budget or in time, and what is found so far is
    far from its claim, the relaxed one decides, at last with split clusters, rounded: the
    scheduler keeps to the budget whatever is decided, and only time is at stake.
    """
    name, budgets = ("ilp" if whole else "lp-round") + variant.suffix, attempts.problem.budgets
    versions = [(True, whole), (False, whole), (False, False)]
    if attempts.found.fastest_s(variant.recomputed) <= FAR * variant.claim_s:
        versions = versions[:1]  # there is little to gain from a rougher program
    margins, before_short = dict.fromkeys(budgets, 0.0), 0
    for number in range(1, ROUNDS + 1):
        attempts.rounds = number
        conservative, in_one = versions[0]
        space = variant.space if conservative else variant.peak_space
        targets = {tier: budgets[tier] - margins[tier] for tier in budgets}
        solution = attempts.solver.solve(space, targets, conservative=conservative, whole=in_one)
        if solution.decisions is None:
            attempts.is_cut_short |= solution.is_cut_short
            attempts.solution = attempts.solution or solution  # its status is to be told
            del versions[0]
            if not versions:
                return
            continue
        before = attempts.found.drafts.get(name)
        missing = attempts.decide(name, variant, space.placement(name, solution.decisions))
        found = attempts.found.drafts.get(name)
        if attempts.solution is None or (found is not before and found is attempts.found.fastest):
            attempts.solution = solution  # the claim that belongs to the plan
        trusted = attempts.is_trusted(name, solution)
        settled = trusted or attempts.is_late or not conservative or solution.is_loose
        if found is not None and settled:
            return
        tier, short = missing or (Tier.DEVICE, 0)
        if attempts.is_late:
            versions = versions[-1:]  # the rounding takes a second
        elif short and short == before_short:
            margins[tier] *= 2  # what is missing is not what the program counts
        before_short = short
        margins[tier] += 1.05 * short + 0.01 * budgets[tier]
