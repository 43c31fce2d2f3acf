"""Op needs: what single ops need on the device at the least, by what is decided.

In: a Problem, and decisions about it in buckets. Out: `OpNeeds`, rows over these decisions. With
every copy at the last moment so much is there in any plan: what a bound that looks at memory
between buckets alone does not see. A bound may split a cluster in any proportion: so it holds what
all of its members hold, and misses what any of them misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from cotrain_compile.placement.decisions.bucketed_step import BucketedStep, bucketed
from cotrain_compile.placement.decisions.clusters import ActivationCluster, ParamCluster
from cotrain_compile.placement.decisions.decisions import Decision, OpNeeds, Row
from cotrain_compile.placement.decisions.effects import Effect, Hold
from cotrain_compile.placement.decisions.find_clusters import activation_clusters, param_clusters
from cotrain_compile.placement.decisions.strategies import Stays, Strategy
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import IntervalSum

# So many clusters that each parameter is one.
EACH = 1 << 62

# The end of what is there after the last slot, too.
FOREVER = 1 << 62

# Slots [first, last) in which so many bytes are there, or missing.
_Span = tuple[int, int, int]


def op_needs(
    problem: Problem,
    activations: Sequence[Decision[ActivationCluster, Stays]],
    params: Sequence[Decision[ParamCluster, Strategy]],
) -> OpNeeds:
    """One row for each stretch of ops over which every decision holds the same: its fullest op."""
    step = bucketed(problem, None, at_peaks=False)
    away = activation_clusters(step, 1, everything=True, behind=True)
    gap_of = {(name, _behind(c)): c for c in away for name in c.buffers}
    alone = {cluster.params[0]: cluster for cluster in param_clusters(step, EACH)}
    spans = [
        [_spans(option.effect, _alone(option.strategy, d.cluster, gap_of)) for option in d.options]
        for d in activations
    ]
    spans += [
        [
            _spans(option.effect, [option.strategy.effect(alone[p]) for p in d.cluster.params])
            for option in d.options
        ]
        for d in params
    ]
    decided = {
        (name, d.cluster.slots if d.cluster.sent else None)
        for d in activations
        for name in d.cluster.buffers
    }
    undecided = [c for c in away if decided.isdisjoint((n, _behind(c)) for n in c.buffers)]
    fixed = _fixed_bytes(step, undecided)
    slots = list(_fullest(step, fixed, spans))
    return OpNeeds(
        np.array([fixed[slot] for slot in slots], dtype=np.float64),
        tuple(tuple(_row(option, slots) for option in options) for options in spans),
    )


def _behind(cluster: ActivationCluster) -> tuple[int, int] | None:
    """The slots of a gap behind the first, of a step whose bucket k has slot k - 1."""
    return (cluster.leaves - 1, cluster.returns - 1) if cluster.sent else None


def _alone(
    strategy: Stays,
    cluster: ActivationCluster,
    gap_of: Mapping[tuple[str, tuple[int, int] | None], ActivationCluster],
) -> list[Effect]:
    """What a strategy does with each member of a cluster."""
    slots = cluster.slots if cluster.sent else None
    return [strategy.effect(gap_of[name, slots]) for name in cluster.buffers]


def _spans(together: Effect, alone: Sequence[Effect]) -> list[_Span]:
    """What an effect holds while it holds that for all of its members, or misses for any."""
    spans = []
    own = zip(*(effect.holds for effect in alone), strict=True)
    for hold, holds in zip(together.holds, own, strict=True):
        ends = [_end(effect, each) for effect, each in zip(alone, holds, strict=True)]
        firsts = [max(0, each.first - 1) for each in holds]
        there = hold.nbytes > 0
        first, last = (max(firsts), min(ends)) if there else (min(firsts), max(ends))
        if hold.certain and hold.nbytes and first < last:
            spans.append((first, last, hold.nbytes))
    return spans


def _end(effect: Effect, hold: Hold) -> int:
    """The slot after a hold, whose buckets are those of single ops: bucket k has slot k - 1."""
    if hold.last is None:
        return FOREVER
    update = effect.update if hold.until_update else None
    return max(hold.last, update.released) if update is not None else hold.last


def _fixed_bytes(step: BucketedStep, undecided: Iterable[ActivationCluster]) -> list[int]:
    """Bytes in each slot whatever is decided.

    What only updates read may come later, and of `undecided` temporaries nobody says that they
    are away: neither counts.
    """
    updates, dataflow = step.dataflow.updates, step.dataflow
    ops = (dataflow.ops[dataflow.position[name]] for group in updates for name in group.ops)
    fixed = IntervalSum(step.program.end + 1)
    for slot, nbytes in enumerate(step.undecided_bytes({name for op in ops for name in op.reads})):
        fixed.add(nbytes, slot, slot + 1)
    for cluster in undecided:
        fixed.add(-cluster.nbytes, cluster.leaves, cluster.returns - 1)
    return fixed.values()


def _fullest(
    step: BucketedStep, fixed: Sequence[int], spans: Sequence[list[list[_Span]]]
) -> Iterator[int]:
    """The slot with most in each stretch between two ends of spans, of those that count.

    After the last op that takes time updates may be over, and casts are not run where the host
    makes them.
    """
    elapsed_s, end = step.moves.elapsed_s, step.program.end
    copies = set(step.low_precision_copies.values())
    counts = [
        elapsed_s[slot] < elapsed_s[-1] and copies.isdisjoint(op.writes)
        for slot, op in enumerate(step.program.ops)
    ]
    ends = {
        min(slot, end)
        for options in spans
        for option in options
        for *two, _ in option
        for slot in two
    }
    for first, last in pairwise(sorted({0, *ends, end})):
        slots = [slot for slot in range(first, last) if counts[slot]]
        if slots:
            yield max(slots, key=fixed.__getitem__)


def _row(spans: Sequence[_Span], slots: Sequence[int]) -> Row:
    """The bytes of `spans` in each of `slots`."""
    row, at = np.zeros(len(slots)), np.array(slots)
    for first, last, nbytes in spans:
        row += nbytes * ((at >= first) & (at < last))
    return row
