"""Random moves: some of the updates that run on the device, moved to where they may run as well.

A Dataflow with a Placement and a random generator in, the moved ops of a plan out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from cotrain_compile.dataflow import Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.placement.residency import HOST_MODES, device_program
from cotrain_compile.plan import MovedOps, Placement


class Mover:
    """Moves some of the updates that run on the device to where they may run as well."""

    def __init__(self, dataflow: Dataflow, placement: Placement, rng: random.Random) -> None:
        self.dataflow, self.rng = dataflow, rng
        self.groups = [
            group
            for group in dataflow.updates
            if placement.updates[group.param] not in HOST_MODES and rng.random() < 0.6
        ]
        self.maker = _made_from_hyperparameters(dataflow)
        elsewhere = {name for group in self.groups for name in group.ops}
        elsewhere |= {op.name for op in self.maker.values()}
        whole = device_program(dataflow, placement)
        self.staying = [op for op in whole.ops if op.name not in elsewhere]

    def moved(self) -> tuple[MovedOps, ...]:
        anchors = {}
        for group in self.groups:
            earliest, limit = self._window(group)
            if earliest < limit:
                anchors[group.param] = self.rng.choice(
                    (earliest, self.rng.randrange(earliest, limit))
                )
        groups = [group for group in self.groups if group.param in anchors]
        first: dict[str, int] = {}
        for group in groups:
            for name in self._support(group):
                first[name] = min(anchors[group.param], first.get(name, len(self.staying)))
        position = self.dataflow.position
        support = [
            MovedOps((name,), self._anchor(slot))
            for name, slot in sorted(first.items(), key=lambda item: position[item[0]])
            if slot < 0 or position[self.staying[slot].name] < position[name]
        ]
        updates = [MovedOps(g.ops, self._anchor(anchors[g.param])) for g in groups]
        return (*support, *updates)

    def _anchor(self, slot: int) -> str | None:
        return self.staying[slot].name if slot >= 0 else None

    def _window(self, group: UpdateGroup) -> tuple[int, int]:
        """The slot behind which the update may run first, and the one it must come before."""
        position = self.dataflow.position
        write = max(position[name] for name in group.ops)
        reads = _reads(self.dataflow, group.ops)
        own = {group.param, *group.states}
        earliest, limit = -1, len(self.staying)
        for slot, op in enumerate(self.staying):
            touches_own = not own.isdisjoint((*op.reads, *op.writes))
            if touches_own and position[op.name] > write:
                limit = min(limit, slot)
            elif touches_own or not reads.isdisjoint(op.writes):
                earliest = slot
        return earliest, limit

    def _support(self, group: UpdateGroup) -> set[str]:
        """Names of the ops that make what the group needs of hyper-parameters."""
        found: set[str] = set()
        queue = list(_reads(self.dataflow, group.ops))
        for name in queue:  # grows while it is read
            op = self.maker.get(name)
            if op is not None and op.name not in found:
                found.add(op.name)
                queue += op.reads
        return found


def _reads(dataflow: Dataflow, ops: Iterable[str]) -> set[str]:
    return {read for name in ops for read in dataflow.ops[dataflow.position[name]].reads}


def _made_from_hyperparameters(dataflow: Dataflow) -> Mapping[str, Op]:
    """The op that makes each buffer that follows from hyper-parameters alone."""
    own = {name for group in dataflow.updates for name in group.ops}
    free = {b.name for b in dataflow.buffers if b.role in (Role.HYPERPARAMETER, Role.CONSTANT)}
    maker: dict[str, Op] = {}
    for op in dataflow.ops:
        outside = op.phase is Phase.OPTIMIZER and op.name not in own
        if outside and op.writes and free.issuperset(op.reads):
            free.update(op.writes)
            maker.update(dict.fromkeys(op.writes, op))
    return maker
