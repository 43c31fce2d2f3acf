"""Find decisions: Problem -> DecisionSpace. What can be decided about a step, in buckets.

In: a Problem. Out: the clusters with their strategies, and what the device holds in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cotrain_compile.placement.decisions.bucketed_step import BucketedStep, bucketed
from cotrain_compile.placement.decisions.clusters import ActivationCluster
from cotrain_compile.placement.decisions.decisions import (
    DecisionSpace,
    activation_decisions,
    network_work,
    param_decisions,
)
from cotrain_compile.placement.decisions.find_clusters import activation_clusters, param_clusters
from cotrain_compile.placement.decisions.level_decisions import (
    first_levels,
    least_again,
    level_decisions,
)
from cotrain_compile.placement.decisions.op_needs import op_needs
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import RegionLevels

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
    is known what single ops need, and large temporaries in a cluster are away during the same ops.
    With `behind` temporaries may leave once more in any gap behind the longest: for a bound.
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
