"""Moved updates: which updates run elsewhere than where the step has them, and what they need.

In: a Dataflow, a Placement, an update group. Out: whether it may move, the ops that come with it,
and the room in which it runs.
"""

from __future__ import annotations

from collections import Counter

from cotrain_compile.dataflow import Dataflow, Op, Phase, UpdateGroup
from cotrain_compile.placement.residency import HOST_MODES, IntervalSum, made_in, spans_in
from cotrain_compile.plan import Placement, UpdateMode


def movable(placement: Placement, group: UpdateGroup) -> bool:
    """Whether the update of `group` on the device may run elsewhere than where the step has it."""
    if placement.updates[group.param] in HOST_MODES:
        return False
    return placement.early_updates or UpdateMode.STREAMED in placement.updates.values()


class Support:
    """Ops that follow from hyper-parameters alone and that an update needs before it may move.

    What also serves an op that stays is none: behind that op it would come too late. Views of what
    moves come with it, as each is at its place in the step otherwise.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        own = {name for group in dataflow.updates for name in group.ops}
        free = set(dataflow.fixed)
        candidates: dict[str, Op] = {}
        for op in dataflow.ops:
            outside = op.phase is Phase.OPTIMIZER and op.name not in own
            if outside and free.issuperset(op.reads):
                free.update(op.writes)
                candidates[op.name] = op
        _leave_what_stays(dataflow, candidates, own)
        self._dataflow = dataflow
        self._maker = {name: op for op in candidates.values() for name in op.writes}
        self._views: dict[str, list[Op]] = {}
        for op in candidates.values():
            for name in () if op.writes else op.reads:
                self._views.setdefault(name, []).append(op)

    def of(self, group: UpdateGroup) -> tuple[str, ...]:
        """Names of the ops that `group` needs, in program order."""
        dataflow, found = self._dataflow, set[str]()
        queue = [r for name in group.ops for r in dataflow.ops[dataflow.position[name]].reads]
        for read in queue:  # grows while it is read
            op = self._maker.get(read)
            if op is not None and op.name not in found:
                found.add(op.name)
                found.update(view.name for name in op.writes for view in self._views.get(name, ()))
                queue += op.reads
        return tuple(sorted(found, key=dataflow.position.__getitem__))

    def made_before(self, group: UpdateGroup) -> frozenset[str]:
        """What `group` and its support read that they do not make: the update comes after it."""
        ops = [
            self._dataflow.ops[self._dataflow.position[n]] for n in (*self.of(group), *group.ops)
        ]
        made = {name for op in ops for name in op.writes}
        own = {group.param, group.gradient, *group.states}
        return frozenset(name for op in ops for name in op.reads) - made - own


def _leave_what_stays(dataflow: Dataflow, candidates: dict[str, Op], own: set[str]) -> None:
    """Take out of `candidates` what an op that stays touches too, and what that is made of."""
    touching: dict[str, list[str]] = {}
    writers = Counter(name for op in dataflow.ops for name in op.writes)
    for op in dataflow.ops:
        for name in {*op.reads, *op.writes}:
            touching.setdefault(name, []).append(op.name)
    # Whatever touches an op's result comes later than it, so that one pass from the end is enough.
    for op in reversed(tuple(candidates.values())):
        users = {user for name in op.writes for user in touching[name]} - own
        again = any(writers[name] > 1 for name in op.writes)
        if again or not users <= candidates.keys():
            del candidates[op.name]


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
