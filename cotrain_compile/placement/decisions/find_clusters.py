"""Find clusters: parameters and activations that are alike in every bucket, decided on together.

In: a BucketedStep. Out: `ParamCluster` and `ActivationCluster`. So the program grows with the
buckets and not with the ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log2
from types import MappingProxyType
from typing import Protocol, TypeVar

from cotrain_compile.dataflow import Buffer, Role, UpdateGroup
from cotrain_compile.dataflow.guesses import guesses_of, second_bytes
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.clusters import (
    NO_GRADIENTS,
    ActivationCluster,
    Again,
    KeptGradients,
    ParamCluster,
    RegionLevel,
)
from cotrain_compile.placement.decisions.strategies import is_large
from cotrain_compile.placement.host_memory import made_by
from cotrain_compile.placement.pieces import PIECE_BYTES, largest_piece
from cotrain_compile.placement.residency import (
    written_before,
)
from cotrain_compile.placement.schedule.hoisted_updates import update_needs
from cotrain_compile.plan.on_disk import (
    gradients_may_rest,
    may_rest_on_disk,
    value_may_rest,
    weight_may_rest,
)

# Temporaries smaller than this part of the peak are left alone.
SMALLEST = 20_000
# What is offloaded during the same ops and has more than this part of all that may leave is decided
# on alone where single ops count, so that a program does not grow with the layers.
BY_OP = 1_000
NOTHING: Mapping[str, Again] = MappingProxyType({})
NO_LEVELS: Mapping[str, RegionLevel] = MappingProxyType({})

# Buckets in which something leaves and returns, whether there are any between them, and whether it
# has been offloaded before.
_Gap = tuple[int, int, bool, bool]
# The touches before and after a gap.
_Slots = tuple[int, int]


# Activations.


def activation_clusters(
    step: BucketedStep,
    pieces: int,
    *,
    everything: bool,
    again: Mapping[str, Again] = NOTHING,
    from_level: Mapping[str, RegionLevel] = NO_LEVELS,
    by_op: bool = False,
    behind: bool = False,
) -> tuple[ActivationCluster, ...]:
    """Temporaries that may leave, in clusters of at most 1/`pieces` of their bytes.

    With `everything` the smallest may too, and no cluster is cut; with `behind` in any gap behind
    the longest once more. `again` says which may be made again, and what that takes; those that
    take about as long for a byte are in one cluster, as if all took as little as the one that takes
    least. A cluster has one place in `from_level`. With `by_op` those that are large together are
    in one cluster if they are offloaded during the same ops.
    """
    floor_bytes = 0 if everything else max(step.moves.slot_bytes) // SMALLEST
    candidates = list(_leaving(step, floor_bytes, again, behind=behind))
    total = sum(buffer.nbytes for buffer, _, _ in candidates)
    most = total if everything else total // pieces + 1
    has_disk, dataflow = bool(step.problem.disk_bytes), step.dataflow
    together = Counter[_Slots]()
    for buffer, _, slots in candidates if by_op else ():
        together[slots] += buffer.nbytes
    clusters: dict[tuple[_Gap, object, RegionLevel | None, _Slots | None], list[Buffer]] = {}
    used = {buffer.name: slots[0] for buffer, _, slots in reversed(candidates)}
    for buffer, gap, slots in candidates:
        alike = _about(again[buffer.name], buffer) if buffer.name in again and not gap[3] else None
        is_one = by_op and (gap[3] or BY_OP * together[slots] > total)
        alone = slots if is_one else None
        clusters.setdefault((gap, alike, from_level.get(buffer.name), alone), []).append(buffer)
    return tuple(
        ActivationCluster(
            tuple(b.name for b in part),
            sum(b.nbytes for b in part),
            *gap[:2],
            min(step.bucket(written_before(step.program, b.name, used[b.name])) for b in part),
            *gap[2:],
            again=_least(part, again) if alike else None,
            from_level=level,
            slots=alone,
            may_rest_on_disk=has_disk and all(value_may_rest(dataflow, b.name) for b in part),
        )
        for (gap, alike, level, alone), buffers in clusters.items()
        for part in _parts(buffers, most)
    )


def _about(again: Again, buffer: Buffer) -> tuple[int, ...]:
    """Equal for what is missing in the same buckets and takes about as long for each byte."""
    rates = (seconds / max(1, buffer.nbytes) for seconds in (again.seconds, again.network_s))
    about = (round(4 * log2(rate + 1e-18)) for rate in rates)
    return again.first, again.last, again.by, again.source, *about


def _least(part: Sequence[Buffer], again: Mapping[str, Again]) -> Again:
    """What it takes where each byte takes as little as that of the buffer that takes least."""
    nbytes = sum(b.nbytes for b in part)
    device = min(again[b.name].seconds / max(1, b.nbytes) for b in part)
    network = min(again[b.name].network_s / max(1, b.nbytes) for b in part)
    return replace(again[part[0].name], seconds=device * nbytes, network_s=network * nbytes)


def _leaving(
    step: BucketedStep, floor_bytes: int, again: Mapping[str, Again], *, behind: bool
) -> Iterable[tuple[Buffer, _Gap, _Slots]]:
    """Temporaries whose longest gap spans whole buckets, and those that may be made again.

    And those `behind` it, in which they may be gone once more. What the step makes again already
    stays until its last use in the forward. With the buckets that the gap lies between, whether it
    spans any, and its slots.
    """
    copies = set(step.low_precision_copies.values())
    updates = step.dataflow.updates
    taken = copies | {name for group in updates for name in (group.gradient, *group.scalars)}
    taken.update(step.problem.recomputed)
    casts = {i for i, op in enumerate(step.program.ops) if not copies.isdisjoint(op.writes)}
    for buffer in step.dataflow.buffers:
        temporary = buffer.role is Role.TEMPORARY and buffer.is_passing
        if not temporary or buffer.name in taken or buffer.nbytes <= floor_bytes:
            continue
        gap = step.program.order.longest_gap(step.program.touches.get(buffer.name, ()))
        if gap is None or casts.issuperset(range(gap[0] + 1, gap[1])):
            continue  # where the host makes the copies there is no gap
        leaves, returns = step.bucket(gap[0]), step.bucket_before(gap[1])
        movable = step.apart(leaves, returns)
        if movable or buffer.name in again:
            yield buffer, (leaves, returns, movable, False), gap
        for later in step.program.order.gaps_behind(buffer.name, gap) if behind else ():
            leaves, returns = step.bucket(later[0]), step.bucket_before(later[1])
            if step.apart(leaves, returns):
                yield buffer, (leaves, returns, True, True), later


# Parameters.


@dataclass(frozen=True)
class _Param:
    """A parameter; `fetched` is what crosses the link for its uses.

    Buckets: `uses` are first, last before the longest gap, first after it and last; the gradient
    is `made` and last `used`, the update is possible from `release`. `temporary` says whether the
    gradient is, `read_late` whether the step reads the parameter again after its update.
    """

    name: str
    nbytes: int
    group: UpdateGroup | None
    fetched: str
    uses: Sequence[int]
    temporary: bool = False
    made: int = 0
    used: int = 0
    release: int = 0
    read_late: bool = False
    kept: KeptGradients = NO_GRADIENTS
    guessed: int | None = None
    rests: bool = False

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for parameters that may be in one cluster."""
        states = len(self.group.states) if self.group else -1
        is_copy = self.fetched != self.name
        read = (is_copy, self.read_late, *self.uses)
        kept = replace(self.kept, nbytes=0)
        update = (self.made, self.used, self.release, self.guessed)
        return (*read, self.temporary, states, *update, kept, self.rests)


def param_clusters(step: BucketedStep, pieces: int) -> tuple[ParamCluster, ...]:
    """All parameters, in clusters of at most 1/`pieces` of their bytes."""
    params = [*_updated(step), *_frozen(step)]
    most = sum(p.nbytes for p in params) // pieces + 1
    alike: dict[tuple[object, ...], list[_Param]] = {}
    for param in params:
        alike.setdefault(param.alike, []).append(param)
    maker = {name: op.name for op in step.program.ops for name in op.writes}
    return tuple(
        _cluster(step, part, maker) for same in alike.values() for part in _parts(same, most)
    )


def _frozen(step: BucketedStep) -> Iterable[_Param]:
    for buffer in step.frozen:
        uses, kept = _uses(step, buffer.name), _kept(step, buffer.name)
        yield _Param(buffer.name, buffer.nbytes, None, buffer.name, uses, kept=kept)


def _updated(step: BucketedStep) -> Iterable[_Param]:
    touches = step.program.touches
    update = {u.params[0]: u for u in step.moves.device_updates}
    guessed = guesses_of(step.dataflow) if step.problem.speculates else {}
    for group in step.dataflow.updates:
        earliest, limit = update[group.param].earliest, update[group.param].limit
        fetched = step.low_precision_copies.get(group.param, group.param)
        gradient = touches.get(group.gradient) or [0]
        # What the device has nothing left to do after is in the epilogue.
        at_the_end = earliest + 1 >= step.over_from
        uses, used = _uses(step, fetched), step.bucket(gradient[-1])
        release = step.epilogue if at_the_end else step.bucket(earliest)
        alone = max(used, uses[-1])  # it waits for its own gradient and weight
        yield _Param(
            group.param,
            step.dataflow.buffer[group.param].nbytes,
            group,
            fetched,
            uses,
            temporary=step.dataflow.buffer[group.gradient].is_passing,
            made=step.bucket(gradient[0]),
            used=used,
            release=release,
            guessed=alone if group.param in guessed and alone < release else None,
            read_late=limit < step.program.end,
            kept=_kept(step, group.param),
            rests=group.param in step.problem.resting,
        )


def _kept(step: BucketedStep, param: str) -> KeptGradients:
    """What lies in the `.grad` of `param`; where it is two tensors, as if they were one."""
    gradients = [step.dataflow.buffer[n] for n in step.dataflow.kept_gradients.get(param, ())]
    if not gradients:
        return NO_GRADIENTS
    first, nbytes = gradients[0], sum(gradient.nbytes for gradient in gradients)
    touched = step.program.touches.get(first.name, [])
    written = step.program.last_write(first.name)
    if not first.is_input:
        made = step.bucket(touched[0])
        return KeptGradients(nbytes, made, written=step.bucket(written))
    old = [slot for slot in touched if slot <= written] if written >= 0 else touched
    gap = step.program.order.longest_gap(old)
    uses = [*touched[:1], *([gap[1]] if gap is not None else [])]
    return KeptGradients(
        nbytes,
        fetched=tuple(step.bucket(slot) for slot in uses),
        written=step.bucket(written) if written >= 0 else None,
        for_update=None if touched else step.epilogue,
    )


def _uses(step: BucketedStep, fetched: str) -> Sequence[int]:
    """The buckets of the first use, the last before and the first after the gap, and the last.

    A low-precision copy is made in its first use. It is in no gap before the next: where the copy
    is fetched, the host has made it.
    """
    uses = step.program.touches.get(fetched) or [step.program.end]
    made = -1 if step.dataflow.buffer[fetched].is_input else step.program.last_write(fetched)
    reads = [slot for slot in uses if slot != made]
    gap = step.program.order.longest_gap(reads) or (uses[-1], uses[-1])
    return [step.bucket(slot) for slot in (uses[0], *gap, uses[-1])]


def _cluster(
    step: BucketedStep, params: Sequence[_Param], maker: Mapping[str, str]
) -> ParamCluster:
    """`maker` names the op that makes each buffer."""
    first, buffers, costs = params[0], step.dataflow.buffer, step.problem.costs
    groups = [p.group for p in params if p.group is not None]
    states = [buffers[name] for group in groups for name in group.states]
    needs = update_needs(step.dataflow)
    large_bytes = sum(s.nbytes for s in states if is_large(s))
    is_copy, is_used = first.fetched != first.name, bool(step.program.touches.get(first.fetched))
    casts = [maker[p.fetched] for p in params] if is_copy else []
    sizes = sorted(p.nbytes for p in params)
    shares = [1.0 if g is None else _piece(step, g) for g in (p.group for p in params)]
    pieces = sorted((p.nbytes * share, p.nbytes) for p, share in zip(params, shares, strict=True))
    inside = [needs[g.param].workspace_bytes for g in groups]
    return ParamCluster(
        params=tuple(p.name for p in params),
        updated=first.group is not None,
        most_fetches=_most_fetches(step, first),
        gradient_waits=first.temporary and step.apart(first.used, first.release),
        param_bytes=sum(sizes),
        state_bytes=large_bytes,
        small_state_bytes=sum(s.nbytes for s in states) - large_bytes,
        gradient_bytes=sum(buffers[g.gradient].nbytes for g in groups) * first.temporary,
        fetched_bytes=sum(buffers[p.fetched].nbytes for p in params) * is_used,
        param_unused=is_copy or not is_used,
        largest=sizes[-1] / max(1, sum(sizes)),
        least_largest=min(
            size / max(1, part) for size, part in zip(sizes, accumulate(sizes), strict=True)
        ),
        largest_piece=pieces[-1][0] / max(1, sum(sizes)),
        least_piece=min(
            piece / max(1, part)
            for (piece, _), part in zip(pieces, accumulate(n for _, n in pieces), strict=True)
        ),
        workspace_bytes=max(inside, default=0),
        piece_workspace_bytes=max(
            (round(n * share) for n, share in zip(inside, shares, strict=bool(groups))), default=0
        ),
        made_bytes=max((made_by(step.dataflow, g) for g in groups), default=0),
        device_s=sum(costs.device_s[name] for g in groups for name in g.ops),
        host_s=sum(costs.host_update_s[g.param] for g in groups),
        cast_s=sum(step.problem.host_cast_s((op,)) for op in casts),
        device_cast_s=sum(costs.device_s[op] for op in casts),
        first=first.uses[0],
        leaves=first.uses[1],
        returns=first.uses[2],
        last=first.uses[3],
        gradient_made=first.made,
        gradient_used=first.used,
        release=first.release,
        kept=replace(first.kept, nbytes=sum(p.kept.nbytes for p in params)),
        guessed=first.guessed,
        second_bytes=sum(second_bytes(step.dataflow, g) for g in groups),
        saving_s=sum(step.problem.saving_s(g.param) for g in groups),
        disk_bytes=sum(_disk_bytes(step, group) for group in groups),
        disk_param_bytes=sum(_disk_param_bytes(step, p.name) for p in params),
        disk_kept_bytes=sum(_disk_kept_bytes(step, p.name) for p in params),
        rests=first.rests,
    )


def _piece(step: BucketedStep, group: UpdateGroup) -> float:
    return largest_piece(step.dataflow, group, PIECE_BYTES)


def _disk_bytes(step: BucketedStep, group: UpdateGroup) -> int:
    """Bytes of the states of `group` that may rest on disk."""
    if not step.problem.disk_bytes:
        return 0
    return sum(step.dataflow.buffer[n].nbytes for n in may_rest_on_disk(step.dataflow, group))


def _disk_param_bytes(step: BucketedStep, param: str) -> int:
    """Bytes of a parameter, where it may."""
    if not step.problem.disk_bytes or not weight_may_rest(step.dataflow, param):
        return 0
    return step.dataflow.buffer[param].nbytes


def _disk_kept_bytes(step: BucketedStep, param: str) -> int:
    """Bytes of what lies in its `.grad` before the step, or after it, where that may."""
    if not step.problem.disk_bytes:
        return 0
    return sum(step.dataflow.buffer[n].nbytes for n in gradients_may_rest(step.dataflow, param))


def _most_fetches(step: BucketedStep, param: _Param) -> int:
    """How often a weight at home on the host can be fetched, 0 where it cannot be there.

    Twice only where there is a gap to be offloaded in. One that the step reads again after its
    update stays on the device.
    """
    if param.read_late:
        return 0
    return 2 if step.apart(*param.uses[1:3]) else 1


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=_Sized)


def _parts(items: Iterable[_T], most: int) -> Iterable[list[_T]]:
    """`items` in runs of at most `most` bytes, one item at the least."""
    part: list[_T] = []
    for item in items:
        if part and sum(i.nbytes for i in part) + item.nbytes > most:
            yield part
            part = []
        part.append(item)
    if part:
        yield part
