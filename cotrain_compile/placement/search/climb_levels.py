"""Climb levels: the step with more and more of its values made again, as long as that helps.

In: the attempts at a step, and its levels. Out: what fits is found there, and what no levels take
less than. First come those that need no program: each takes a greedy and a schedule or two. Then
those that a program proposes.
"""

from __future__ import annotations

import math

from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.search.attempts import TACTICS, Attempts, is_by_program
from cotrain_compile.placement.search.cuts import Cut
from cotrain_compile.placement.search.variants import FAR, NEAR, Levels, Variant, fastest_of

# Where replays of layers need more than this part of the device they are tried in parts. Of so many
# stretches of a layer one cut each is tried, and those up to so far from the best.
ROOMY, STRETCHES, NEARBY = 0.8, 6, 1
# One more cut takes off no larger a part than this leaves.
WITHIN_REACH = 1.2
# Parts of the device's memory that plans are looked for in besides.
LESS = (0.9, 0.8)


def climb_quickly(attempts: Attempts, levels: Levels) -> None:
    """Try what is decided without a program: levels that fit as they are, one by the greedy.

    And where replays hardly fit cuts in them.
    """
    for level in levels.that_fit(attempts.problem.budgets[Tier.DEVICE]):
        if attempts.is_late:
            return
        attempts.try_level(level)
    if attempts.is_late:
        return
    for users in levels.dissolved():
        attempts.try_level(users)
    first = levels.guess()
    if first is not None and not attempts.is_late:
        _with_head(attempts, levels, first)
    if attempts.is_cheap:
        _climb_uniform(attempts, levels, first)
    if attempts.covers and not attempts.is_late and _hardly_fit(attempts, levels):
        _cut_replays(attempts, levels, most=1)


def climb_further(attempts: Attempts, levels: Levels) -> None:
    """Levels and cuts beside the best ones, and the step as it is."""
    _climb_uniform(attempts, levels, levels.guess())
    if not attempts.is_late and (attempts.covers or _hardly_fit(attempts, levels)):
        _cut_replays(attempts, levels, most=2)
    if not (attempts.is_late or attempts.is_hopeless(attempts.step)):
        attempts.try_greedy(attempts.step, TACTICS[:1])


def follow_users(attempts: Attempts, levels: Levels) -> None:
    """The checkpoints that users write, under each simple rule, where they may be the fastest.

    Whatever work is left: no plan is to be slower than these.
    """
    fastest = attempts.found.fastest
    for level in levels.usual(fastest.step_s if fastest is not None else math.inf):
        variant = attempts.known(level)
        for rule in RULES:
            attempts.attempt(variant, rule)


def climb_by_program(attempts: Attempts, levels: Levels, certified_s: float) -> float:
    """Try levels that a program proposes, each with what its relaxation decides.

    Where rounding costs as much as at the fastest level they have to claim so much less. Where
    neither the relaxation of the fastest nor the first of them is faster than that, no other is.
    Returns the seconds that no levels take less than, 0 where nobody knows.
    """
    claim_s, fastest = 0.0, attempts.found.fastest
    leads = fastest is not None and is_by_program(fastest.placement.policy)
    rounding = max(NEAR, _rounding(attempts))
    if attempts.is_late or not attempts.is_slower_than(rounding * certified_s):
        return claim_s
    proposed = attempts.propose_levels(levels.regions)
    if proposed is not None:
        # Parameters that are gathered again are in no region: without them more is claimed.
        claim_s = 0.0 if levels.gather else proposed.claim_s
    if proposed is not None and proposed.decisions is not None:
        for level in levels.near(proposed.decisions.levels):
            if attempts.is_late or not attempts.is_slower_than(rounding * claim_s):
                break
            attempts.try_level(level, by_program=True)
            if not leads and attempts.found.fastest is fastest:
                break
    # The step as it is counts as a level: where a plan is as fast as any, it has no faster one.
    may_lead = attempts.is_slower_than(NEAR * claim_s) and not attempts.is_hopeless(attempts.step)
    if attempts.solver.has_solutions and may_lead:
        attempts.relax(attempts.step)
    return claim_s


def follow_rules(attempts: Attempts, variant: Variant) -> None:
    """What the simple rules make of a variant, but for that in which nothing moves."""
    for name in tuple(RULES)[1:]:
        if attempts.is_late:
            return
        attempts.attempt(variant, name)


def aim_lower(attempts: Attempts, certified_s: float) -> None:
    """Plans for less memory, where what is found is far from the best: they fit in more, too.

    A budget that is a little larger would else often have a slower plan.
    """
    for share in LESS:
        best = fastest_of(attempts.variants, attempts.found.fastest_s)
        near_s = max(FAR, _rounding(attempts)) * max(best.claim_s, certified_s)
        is_loose = best.relaxed is not None and best.relaxed.is_loose  # as if for any less
        if attempts.is_late or is_loose or not attempts.is_slower_than(near_s):
            return
        _relax_for_less(attempts, best, share)


def _relax_for_less(attempts: Attempts, variant: Variant, share: float) -> None:
    """The relaxation for a `share` of the device's memory, rounded, as a plan for all of it.

    Rounded it may be better, though it claims more: what leaves is another set of tensors.
    """
    name, budgets = "lp-round" + variant.suffix, attempts.problem.budgets
    targets = {**budgets, Tier.DEVICE: share * budgets[Tier.DEVICE]}
    solution = attempts.solver.solve(variant.space, targets, known_s=attempts.known_s)
    if solution.decisions is not None:
        attempts.decide(name, variant, variant.space.placement(name, solution.decisions))


def _rounding(attempts: Attempts) -> float:
    """How many times its claim a relaxation takes when it is rounded, at best; 1 if unknown."""
    drafts = attempts.found.drafts
    return min(
        (
            drafts[name].step_s / each.claim_s
            for each in attempts.variants
            if each.claim_s and (name := "lp-round" + each.suffix) in drafts
        ),
        default=1.0,
    )


def _climb_uniform(attempts: Attempts, levels: Levels, at: float | None) -> None:
    """One level everywhere, from `at` on, as long as one beside the best is faster."""
    found, step = attempts.found, attempts.step
    found_s, claim_s = {0.0: found.fastest_s(())}, {0.0: step.claim_s}
    while at is not None and not attempts.is_late:
        level = attempts.known(levels.variant(at))
        if attempts.try_level(level):
            levels.drop_above(at)  # making more again only takes longer
        found_s[at] = found.fastest_s(level.recomputed)
        claim_s[at] = level.claim_s or found_s[at]
        at = levels.next_to_best(found_s, claim_s)


def _with_head(attempts: Attempts, levels: Levels, number: float) -> None:
    """A level, then with more and more of the head made again, as long as that is faster.

    What is found is made again in all other levels, too.
    """
    best, found_s = levels.variant(number), attempts.found.fastest_s
    if attempts.try_level(best):
        return
    for head in levels.heads():
        if attempts.is_late:
            break
        before, levels.head = levels.head, head
        level = levels.variant(number)
        if attempts.try_level(level):
            break
        if found_s(level.recomputed) >= found_s(best.recomputed):
            levels.head = before
            break
        best = level


def _hardly_fit(attempts: Attempts, levels: Levels) -> bool:
    """Whether replays of layers as a whole need most of the device."""
    most = attempts.problem.budgets[Tier.DEVICE]
    if not levels.count:
        return False
    replays_bytes = attempts.once_offloaded_bytes(levels.variant(levels.count))
    return replays_bytes > max(ROOMY * most, attempts.once_offloaded_bytes(attempts.step))


def _cut_replays(attempts: Attempts, levels: Levels, most: int) -> None:
    """The last level with the replays of layers in parts, in at most so many cuts.

    One value of each layer stays, of those made one behind the other the smallest; then those near
    the best of these, as long as that is faster, or lacks less where none fits. Then another
    besides.
    """
    if not levels.count:
        return
    chosen: tuple[Cut, ...] = ()
    best = attempts.cover_rank(attempts.known(levels.variant(levels.count)))
    while len(chosen) < most and (found := _next_cut(attempts, levels, chosen, best)) is not None:
        chosen, best = found
        if not attempts.is_within(WITHIN_REACH, best[0]):
            break


def _next_cut(
    attempts: Attempts, levels: Levels, chosen: tuple[Cut, ...], before: tuple[float, int]
) -> tuple[tuple[Cut, ...], tuple[float, int]] | None:
    """`chosen` with one more cut and its rank, None where none is better than `before`."""

    def try_one(cut: Cut) -> tuple[float, int]:
        if attempts.is_late or cut in chosen:
            return before
        return attempts.cover_rank(attempts.known(levels.with_cuts(_in_order((*chosen, cut)))))

    cuts, found = levels.cuts, dict[Cut, tuple[float, int]]()
    of_each = -(-len(cuts) // STRETCHES)
    for first in range(0, len(cuts), of_each):
        cut = min(cuts[first : first + of_each], key=lambda cut: (cut.nbytes, cut.at))
        found[cut] = try_one(cut)
    while found:
        best = min(found, key=found.__getitem__)
        near = [c for c in cuts if c not in found and abs(c.at - best.at) <= NEARBY]
        if found[best] >= before or not near:
            break
        found |= {cut: try_one(cut) for cut in near}
        if min(found, key=found.__getitem__) == best:
            break
    better = [cut for cut in found if found[cut] < before]
    if not better:
        return None
    best = min(better, key=found.__getitem__)
    return _in_order((*chosen, best)), found[best]


def _in_order(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    return tuple(sorted(cuts, key=lambda cut: cut.at))
