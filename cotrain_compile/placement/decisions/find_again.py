"""Find again: what it takes at the least to make each forward value again, for the bound.

In: a BucketedStep. Out: `Again` by buffer. A value is charged the op that made it, and of that its
share where the op made several; what that op reads is taken to be there, at no cost. A plan can
only pay more: it runs every op that it runs again once, as a whole, and has to keep what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cotrain_compile.dataflow import Buffer, Op, Phase
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.clusters import Again
from cotrain_compile.placement.recompute.gather_again import gathered
from cotrain_compile.placement.recompute.rewrite import recomputable


def least_again(step: BucketedStep) -> Mapping[str, Again]:
    """By buffer, when it is missing at the longest if it is made again, and its op's seconds.

    It is gone after its last use in the forward, and is made again by its first use outside. What
    is gathered again takes the network, too, which is not counted: for a bound that is no less.
    """
    may = recomputable(step.dataflow) | gathered(step.dataflow).keys()
    device_s = step.problem.costs.device_s
    maker = {n: op for op in step.dataflow.ops for n in op.writes if n in may and not op.awaits}
    found: dict[str, Again] = {}
    for name, left, needed in _absences(step, maker):
        op, buffer = maker[name], step.dataflow.buffer[name]
        made_bytes = sum(b.nbytes for b in _made_again(step, op, may))
        seconds = device_s[op.name] * buffer.nbytes / max(1, made_bytes)
        # Memory is looked at where a bucket starts: it may come back right behind that.
        first, by = step.bucket(left) + 1, step.bucket(needed)
        if first <= by:
            found[name] = Again(seconds, first, by, by)
    return found


def _absences(step: BucketedStep, maker: Mapping[str, Op]) -> Iterator[tuple[str, int, int]]:
    """Each buffer with the slots of its last use in the forward and the first one behind that."""
    ops = step.program.ops
    is_forward = [op.phase is Phase.FORWARD for op in ops]
    for name in maker:
        slots = step.program.touches.get(name, [])
        later = [slot for slot in slots if not is_forward[slot]]
        before = [slot for slot in slots if is_forward[slot] and later and slot < later[0]]
        if before:
            yield name, before[-1], later[0]


def _made_again(step: BucketedStep, op: Op, may: frozenset[str]) -> list[Buffer]:
    return [step.dataflow.buffer[name] for name in op.writes if name in may]
