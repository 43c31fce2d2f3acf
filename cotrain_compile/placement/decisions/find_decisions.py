"""Find decisions: Problem -> DecisionSpace. What can be decided about a step, in buckets.

In: a Problem. Out: the clusters with their strategies, and what the device holds in any case.

Op needs: what single ops need on the device at the least, by what is decided.

In: a Problem, and decisions about it in buckets. Out: `OpNeeds`, rows over these decisions. With
every copy at the last moment so much is there in any plan: what a bound that looks at memory
between buckets alone does not see. A bound may split a cluster in any proportion: so it holds what
all of its members hold, and misses what any of them misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from cotrain_compile.placement.decisions.activation_strategies import Stays
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep, bucketed
from cotrain_compile.placement.decisions.clusters import ActivationCluster, ParamCluster
from cotrain_compile.placement.decisions.decisions import (
    Decision,
    DecisionSpace,
    OpNeeds,
    Row,
    activation_decisions,
    network_work,
    param_decisions,
)
from cotrain_compile.placement.decisions.effects import Effect, Hold
from cotrain_compile.placement.decisions.find_clusters import activation_clusters, param_clusters
from cotrain_compile.placement.decisions.level_decisions import (
    first_levels,
    least_again,
    level_decisions,
)
from cotrain_compile.placement.decisions.strategies import Strategy
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import RegionLevels
from cotrain_compile.placement.residency import IntervalSum

# Buckets of the whole step, and into how many pieces the parameters (or activations) are cut at
# least: finer clusters are better plans and larger programs.
BUCKETS = 64
PIECES = 96


def decision_space(
    problem: Problem,
    buckets: int | None = BUCKETS,
    pieces: int = PIECES,
    *,
    at_peaks: bool = False,
    everything: bool = False,
    recompute: bool = False,
    regions: Sequence[RegionLevels] = (),
    by_op: bool = False,
    behind: bool = False,
) -> DecisionSpace:
    """What can be decided about `problem`, in about `buckets` buckets; None: each op is one.

    Cuts are where few bytes cross, or, with `at_peaks`, right before the ops at which most is
    alive; memory is then checked at the cuts alone, where the amounts sent and brought are known.
    With `everything`, the smallest temporaries may leave too, and no cluster of temporaries is cut
    into pieces: what a bound needs, and a plan does not. With `recompute`, each value may be made
    again for no more than its own op, as if what that reads were always there: for a bound. Of
    `regions` each may have what is in one of its levels made again, at what that takes. `by_op` it
    is known what single ops need, and large temporaries in a cluster are offloaded during the same
    ops. With `behind` temporaries may leave once more in any gap behind the longest: for a bound.
    """
    step = bucketed(problem, buckets, at_peaks=at_peaks)
    elapsed_s = step.moves.elapsed_s
    seconds = [
        elapsed_s[end] - elapsed_s[start] for start, end in zip(step.starts, step.ends, strict=True)
    ]
    again = least_again(step) if recompute else {}
    activations = activation_clusters(
        step,
        pieces,
        everything=everything,
        again=again,
        from_level=first_levels(regions),
        by_op=by_op,
        behind=behind,
    )
    params, leaving = (
        param_decisions(param_clusters(step, pieces)),
        activation_decisions(activations),
    )
    return DecisionSpace(
        problem,
        (0.0, *seconds, 0.0),
        tuple(_checkpoints(step, activations)),
        params,
        leaving,
        level_decisions(step, regions) if regions else (),
        network_work(step),
        op_needs(problem, leaving, params) if by_op else None,
    )


def _checkpoints(
    step: BucketedStep, activations: Sequence[ActivationCluster]
) -> Iterable[tuple[int, int]]:
    """(bucket, bytes) where most is alive, with all activations there and with none."""
    leaving = {name for cluster in activations for name in cluster.buffers}
    all_there, bare = step.undecided_bytes(), step.undecided_bytes(without=leaving)
    for number, (start, end) in enumerate(zip(step.starts, step.ends, strict=True), start=1):
        # A step that does nothing but update has no slot but the end.
        slots = range(start, start + 1 if step.at_peaks else max(end, start + 1))
        peaks = {max(slots, key=all_there.__getitem__), max(slots, key=bare.__getitem__)}
        for slot in sorted(peaks):
            yield number, all_there[slot]
    yield step.epilogue, all_there[step.program.end]


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
    offloaded = activation_clusters(step, 1, everything=True, behind=True)
    gap_of = {(name, _behind(c)): c for c in offloaded for name in c.buffers}
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
    undecided = [c for c in offloaded if decided.isdisjoint((n, _behind(c)) for n in c.buffers)]
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
    are offloaded: neither counts.
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
