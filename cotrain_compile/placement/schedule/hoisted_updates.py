"""Moved updates: which updates run elsewhere than where the step has them, and what they need.

In: a Dataflow, a Placement, an update group. Out: whether it may move, the ops that come with it,
and the room in which it runs.

The updates of a layer may be joined to one that runs at one place, where their windows have a gap
in common. Compiled code ends at every task: an update that waits for its own states is compiled
apart from the others, one of a whole layer is as that of the layer beside it. What it needs is
room: all states of the layer at once (`bundles.settled` chooses).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotrain_compile.analysis.layers import layer
from cotrain_compile.dataflow import Dataflow, Op, Phase, UpdateGroup
from cotrain_compile.placement.host_memory import inside_update, updates_alone
from cotrain_compile.placement.remembered import once, once_alike
from cotrain_compile.placement.residency import HOST_MODES
from cotrain_compile.placement.schedule.moves import DeviceUpdate
from cotrain_compile.plan import Placement, UpdateMode

Window = tuple[int, int]  # the slot after which an update may run, and that which needs its result


def movable(placement: Placement, group: UpdateGroup) -> bool:
    """Whether the update of `group` on the device may run elsewhere than where the step has it."""
    if placement.updates[group.param] in HOST_MODES:
        return False
    return placement.early_updates or UpdateMode.STREAMED in placement.updates.values()


@dataclass(frozen=True)
class UpdateNeeds:
    """What an update needs to run elsewhere than where the step has it.

    `support` are the ops that have to come along, in program order, `made_before` what it reads
    that these and it do not make, `workspace_bytes` the room in which it runs.
    """

    support: tuple[str, ...]
    made_before: frozenset[str]
    workspace_bytes: int


@once
def last_ops(dataflow: Dataflow) -> Mapping[str, int]:
    """The position in the step of the last op of every update, by parameter."""
    position = dataflow.position
    return {g.param: max(position[name] for name in g.ops) for g in dataflow.updates}


@once
def written_early(dataflow: Dataflow) -> Mapping[str, Mapping[str, int]]:
    """By parameter, where in the step its update first writes what others read before its end.

    As a norm of the new parameter that stands before the last op of its update.
    """
    ends = last_ops(dataflow)
    owner, written = dict[str, str](), dict[str, dict[str, int]]()
    for group in dataflow.updates:
        owner |= dict.fromkeys((group.param, *group.states), group.param)
        positions = sorted(dataflow.position[name] for name in group.ops)
        writes = {n: at for at in reversed(positions) for n in dataflow.ops[at].writes}
        written[group.param] = writes
    own = {name for group in dataflow.updates for name in group.ops}
    found: dict[str, dict[str, int]] = {}
    for at, op in enumerate(dataflow.ops):
        for name in () if op.name in own else op.reads:
            param = owner.get(name)
            if param is not None and written[param].get(name, at) < at < ends[param]:
                found.setdefault(param, {})[name] = written[param][name]
    return found


@once  # a key takes longer to compare than a step is asked for
@once_alike(updates_alone)
def update_needs(dataflow: Dataflow) -> Mapping[str, UpdateNeeds]:
    """The needs of every update of a step, by parameter."""
    support = _Support(dataflow)
    return {group.param: support.needs(group) for group in dataflow.updates}


class _Support:
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

    def needs(self, group: UpdateGroup) -> UpdateNeeds:
        """What the update of `group` needs."""
        ops = self._of(group)
        made_before = self._made_before(group, ops)
        return UpdateNeeds(ops, made_before, _workspace_bytes(self._dataflow, group))

    def _of(self, group: UpdateGroup) -> tuple[str, ...]:
        """Names of the ops that `group` needs, in program order."""
        if not self._maker:
            return ()
        dataflow, found = self._dataflow, set[str]()
        queue = [r for name in group.ops for r in dataflow.ops[dataflow.position[name]].reads]
        for read in queue:  # grows while it is read
            op = self._maker.get(read)
            if op is not None and op.name not in found:
                found.add(op.name)
                found.update(view.name for name in op.writes for view in self._views.get(name, ()))
                queue += op.reads
        return tuple(sorted(found, key=dataflow.position.__getitem__))

    def _made_before(self, group: UpdateGroup, support: tuple[str, ...]) -> frozenset[str]:
        """What `group` and its support read that they do not make: the update comes after it."""
        dataflow = self._dataflow
        ops = [dataflow.ops[dataflow.position[name]] for name in (*support, *group.ops)]
        own = {group.param, group.gradient, *group.states}
        own.update(name for op in ops for name in op.writes)
        read, pieces = {name for op in ops for name in op.reads}, dataflow.pieces.wholes
        return frozenset(name for name in read - own if name not in pieces)


def _leave_what_stays(dataflow: Dataflow, candidates: dict[str, Op], own: set[str]) -> None:
    """Take out of `candidates` what an op that stays touches too, and what that is made of."""
    made = {name for op in candidates.values() for name in op.writes}
    touching: dict[str, list[str]] = {name: [] for name in made}
    writers = Counter[str]()
    for op in dataflow.ops if made else ():
        for name in made.intersection(op.touched):
            touching[name].append(op.name)
            writers[name] += op.writes.count(name)
    # Whatever touches an op's result comes later than it, so that one pass from the end is enough.
    for op in reversed(tuple(candidates.values())):
        users = {user for name in op.writes for user in touching[name]} - own
        again = any(writers[name] > 1 for name in op.writes)
        if again or not users <= candidates.keys():
            del candidates[op.name]


def _workspace_bytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    """The most bytes that the values made inside an update take at once beyond its gradient."""
    inside, gradient = inside_update(dataflow, group), dataflow.buffer[group.gradient]
    curve = inside.curve(inside.made.keys() - {gradient.name})
    if not gradient.is_passing or gradient.name not in inside.spans:
        return max(curve.values(), default=0)
    curve.add(gradient.nbytes, 0, inside.spans[gradient.name][1])
    return max(0, max(curve.values(), default=0) - gradient.nbytes)


def layer_windows(windows: Mapping[str, Window]) -> dict[str, Window]:
    """The window of each parameter: that of its layer, where there is a gap in which all may run.

    What is in no layer, an embedding or a head, keeps its own.
    """
    members: dict[str, list[str]] = {}
    for param in windows:
        members.setdefault(layer(param) or param, []).append(param)
    found = dict(windows)
    for params in members.values():
        earliest = max(windows[param][0] for param in params)
        limit = min(windows[param][1] for param in params)
        if earliest < limit:
            found |= dict.fromkeys(params, (earliest, limit))
    return found


def joined_by_layer(updates: Sequence[DeviceUpdate]) -> list[DeviceUpdate]:
    """Those of one layer with one window as one update, in the order of the step.

    But for those in pieces, which are there for not being at one place.
    """
    members: dict[tuple[str, int, int], list[DeviceUpdate]] = {}
    in_pieces = [update for update in updates if update.number is not None]
    for update in updates:
        if update.number is not None:
            continue
        (param,) = update.params
        members.setdefault((layer(param) or param, update.earliest, update.limit), []).append(
            update
        )
    return [*map(_as_one, members.values()), *in_pieces]


def _as_one(updates: Sequence[DeviceUpdate]) -> DeviceUpdate:
    """They run one after the other, so that what each takes inside is there once.

    States come before gradients that were offloaded, as in the fetches of a single update: those
    are fetched when they have left.
    """
    fetches = [fetch for update in updates for fetch in update.fetches]
    return DeviceUpdate(
        params=tuple(param for update in updates for param in update.params),
        ops=tuple(dict.fromkeys(name for update in updates for name in update.ops)),
        earliest=updates[0].earliest,
        limit=updates[0].limit,
        fetches=tuple(sorted(fetches, key=lambda fetch: bool(fetch.after))),
        stores=tuple(name for update in updates for name in update.stores),
        gradient_bytes=sum(update.gradient_bytes for update in updates),
        weight_bytes=sum(update.weight_bytes for update in updates),
        workspace_bytes=max(update.workspace_bytes for update in updates),
        seconds=sum(update.seconds for update in updates),
    )
