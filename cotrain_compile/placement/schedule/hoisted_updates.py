"""Moved updates: which updates run elsewhere than where the step has them, and what they need.

In: a Dataflow, a Placement, an update group. Out: whether it may move, the ops that come with it,
and the room in which it runs.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow, Op, Phase, UpdateGroup
from cotrain_compile.placement.residency import HOST_MODES, IntervalSum, made_in, spans_in
from cotrain_compile.plan import Placement, UpdateMode


def movable(placement: Placement, group: UpdateGroup) -> bool:
    """Whether the update of `group` on the device may run elsewhere than where the step has it."""
    if placement.updates[group.param] in HOST_MODES:
        return False
    return placement.early_updates or UpdateMode.STREAMED in placement.updates.values()


class Support:
    """Ops that follow from hyper-parameters alone and that an update needs before it may move."""

    def __init__(self, dataflow: Dataflow) -> None:
        own = {name for group in dataflow.updates for name in group.ops}
        free = set(dataflow.fixed)
        self._dataflow = dataflow
        self._maker: dict[str, Op] = {}
        for op in dataflow.ops:
            outside = op.phase is Phase.OPTIMIZER and op.name not in own
            if outside and op.writes and free.issuperset(op.reads):
                free.update(op.writes)
                self._maker.update(dict.fromkeys(op.writes, op))

    def of(self, group: UpdateGroup) -> tuple[str, ...]:
        """Names of the ops that `group` needs, in program order."""
        dataflow, found = self._dataflow, set[str]()
        queue = [r for name in group.ops for r in dataflow.ops[dataflow.position[name]].reads]
        for read in queue:  # grows while it is read
            op = self._maker.get(read)
            if op is not None and op.name not in found:
                found.add(op.name)
                queue += op.reads
        return tuple(sorted(found, key=dataflow.position.__getitem__))


def workspace_bytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    """The most bytes that the values made inside an update take at once beyond its gradient."""
    spans, gradient = spans_in(dataflow, group), dataflow.buffer[group.gradient]
    curve = IntervalSum(len(group.ops))
    for name in made_in(dataflow, group) - {gradient.name}:
        curve.add(dataflow.buffer[name].nbytes, *spans[name])
    if gradient.is_input or gradient.is_output:
        return max(curve.values(), default=0)
    curve.add(gradient.nbytes, 0, spans[gradient.name][1])
    return max(0, max(curve.values(), default=0) - gradient.nbytes)
