"""Find again: what it takes at the least to make each forward value again, for the bound.

In: a BucketedStep. Out: `Again` by buffer. A value is charged the op that made it, and of that its
share where the op made several. What that op reads is taken to be there, at no cost, but for what
the backward does not read itself, nothing else is made of, and is no smaller than all that the op
makes: that is charged, too, since who keeps it can as well keep what is made of it. A plan can only
pay more: it runs every op that it runs again once, as a whole, and has to keep what it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from cotrain_compile.dataflow import Op, Phase
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.clusters import Again
from cotrain_compile.placement.recompute.levels import gathered
from cotrain_compile.placement.recompute.rewrite import recomputable


def least_again(step: BucketedStep) -> Mapping[str, Again]:
    """By buffer, when it is missing at the longest if it is made again, and its op's seconds.

    It is gone after its last use in the forward, and is made again by its first use outside. What
    is gathered again takes the network, too, whenever that suits best before.
    """
    may = recomputable(step.dataflow)
    charges = _Charges(step, may | gathered(step.dataflow).keys(), may)
    found: dict[str, Again] = {}
    for name, left, needed in charges.absences:
        # Memory is looked at where a bucket starts: it may come back right behind that.
        first, by = step.bucket(left) + 1, step.bucket(needed)
        # What the op reads at which a bucket begins is there when memory is looked at.
        last = step.bucket_before(needed)
        if first <= by:
            whole = step.apart(first - 1, by)
            source = charges.source(name) if whole else None
            seconds = charges.with_sources_s(name) if whole else charges.own_s(name)
            source = first - 1 if source is None else source
            found[name] = Again(seconds, first, last, by, source, charges.network_s(name))
    return found


class _Charges:
    """What is charged for each value: its share of its op, with or without what that reads."""

    def __init__(self, step: BucketedStep, may: frozenset[str], own: frozenset[str]) -> None:
        """`may` are all values, `own` those that are charged with what is made of them."""
        self._step, self._may, self._sums = step, may, dict[str, float]()
        self._maker = {
            n: op for op in step.dataflow.ops for n in op.writes if n in may and not op.awaits
        }
        self.absences = tuple(_absences(step, self._maker))
        needed = {name for name, _, _ in self.absences}
        self._only_for = _only_for(step, own.intersection(self._maker) - needed)

    def own_s(self, name: str) -> float:
        """As if all that its op reads were there."""
        return self._share(name, self._step.problem.costs.device_s[self._maker[name].name])

    def network_s(self, name: str) -> float:
        """What the network takes, where it is gathered; nothing for what is made on the device."""
        return self._share(
            name, self._step.problem.costs.network_s.get(self._maker[name].name, 0.0)
        )

    def with_sources_s(self, name: str) -> float:
        """With what else is made again for it at the least."""
        if name not in self._sums:
            seconds = self._step.problem.costs.device_s[self._maker[name].name]
            sources = sum(self.with_sources_s(each) for each in self._sources(name))
            self._sums[name] = self._share(name, seconds + sources)
        return self._sums[name]

    def source(self, name: str) -> int | None:
        """The first bucket in which sources of a value could be sent away, None without any."""
        sources = self._sources(name)
        if not sources:
            return None
        own = self._step.bucket(self._step.program.slot[self._maker[name].name])
        further = map(self.source, sources)
        return min([own, *(bucket for bucket in further if bucket is not None)])

    def _sources(self, name: str) -> list[str]:
        """What there is for this value alone, and is no smaller than all that its op makes."""
        op, buffer = self._maker[name], self._step.dataflow.buffer
        made_bytes = self._made_bytes(op)
        return [n for n in self._only_for.get(op.name, ()) if buffer[n].nbytes >= made_bytes]

    def _share(self, name: str, seconds: float) -> float:
        made_bytes = self._made_bytes(self._maker[name])
        return seconds * self._step.dataflow.buffer[name].nbytes / max(1, made_bytes)

    def _made_bytes(self, op: Op) -> int:
        return sum(self._step.dataflow.buffer[n].nbytes for n in op.writes if n in self._may)


def _only_for(step: BucketedStep, names: Collection[str]) -> Mapping[str, Sequence[str]]:
    """By op, those of `names` that it reads, and no other op of the step."""
    readers: dict[str, set[str]] = {}
    for op in step.dataflow.ops:
        for name in op.reads:
            if name in names:
                readers.setdefault(name, set()).add(op.name)
    found: dict[str, list[str]] = {}
    for name, ops in readers.items():
        if len(ops) == 1:
            found.setdefault(next(iter(ops)), []).append(name)
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
