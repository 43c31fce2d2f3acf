"""Ahead: a data-parallel step whose exchange goes on beside the next step's forward (BytePS).

In: replicas whose gradients CPU machines sum, all of them on their devices. Out: a `StageStep` from
the first backward of a step to the first forward of the next one, which is when all updates are
done: so what it takes is what each step takes that comes behind another one.

As `ahead_of_forward` of `cotrain_compile.cpu_helpers` runs it. Gradients go in `ROUNDS`, half of
them beside the last backward in its order, then those of the first layers first. While a round goes
to its owners, the sums of the one before come back. A unit's forward waits for the sums of its own
rounds, and updates its parameters then. Rounds behind the first half begin one when the backward
ends, then two behind the one that a forward waits for: nothing else looks after them. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from cotrain_compile.cluster.data_parallel.step import Replicas
from cotrain_compile.cluster.model.profiles import Unit
from cotrain_compile.cluster.steps.stage_step import Does, StageStep, StageTask

# As `distribute.helped_rounds` has them.
ROUNDS = 8
_HALF = ROUNDS // 2


def ahead_step(replicas: Replicas) -> StageStep:
    """Backwards and forwards of a step, the first forward of which is that of the next one."""
    return StageStep(replicas.ranks, tuple(_Period(replicas).all()), replicas.ring)


def places_of(units: tuple[Unit, ...]) -> list[list[int]]:
    """Of each unit the rounds that have some of its gradients, by their places in the order in
    which they go."""
    nbytes = sum(unit.grad_bytes for unit in units)
    order = [*range(_HALF), *reversed(range(_HALF, ROUNDS))]
    found: list[list[int]] = []
    begin = nbytes
    for unit in units:  # the last unit's gradients go first
        end, begin = begin, begin - unit.grad_bytes
        in_round = [
            begin * ROUNDS < (number + 1) * nbytes and number * nbytes < end * ROUNDS
            for number in range(ROUNDS)
        ]
        found.append([place for place, number in enumerate(order) if in_round[number]])
    return [own if unit.grad_bytes else [] for own, unit in zip(found, units, strict=True)]


class _Period:
    """The tasks so far: which rounds have begun, and which have updated their parameters."""

    def __init__(self, replicas: Replicas) -> None:
        self.of = replicas
        self.places = places_of(replicas.units)
        self.grad_bytes = sum(unit.grad_bytes for unit in replicas.units)
        self.touched_bytes = sum(unit.touched_bytes for unit in replicas.units)
        self.begun = self.updated = 0

    def all(self) -> Iterator[StageTask]:
        units, last = self.of.units, self.of.micro_batches - 1
        before = ""
        for i in range(self.of.micro_batches):
            if i:
                for unit in units:
                    yield self._compute("forward", i, unit)
            missing = [set(range(_HALF)) & set(own) for own in self.places]
            for number in reversed(range(len(units))):
                backward = self._compute("backward", i, units[number])
                yield backward
                before = backward.name
                missing[number] = set()
                if i == last:
                    ready = min((place for own in missing for place in own), default=_HALF)
                    yield from self._begin(ready, before)
        yield from self._begin(_HALF + 1, before)
        yield from self._next_forward(before)

    def _next_forward(self, before: str) -> Iterator[StageTask]:
        for number, unit in enumerate(self.of.units):
            needed = max(self.places[number], default=-1)
            yield from self._begin(min(needed + 3, ROUNDS), before)
            if needed + 2 > ROUNDS - 1:  # what is left comes back
                yield from self._begin(ROUNDS + 1, before)
            while self.updated <= needed:
                yield self._update()
            forward = self._compute("forward", 0, unit)
            yield forward
            before = forward.name

    def _begin(self, count: int, before: str) -> Iterator[StageTask]:
        """So many rounds have begun after it; the last is what comes back when none goes."""
        while self.begun < count:
            nbytes = self.grad_bytes / ROUNDS
            yield StageTask(f"round {self.begun}", Does.SUM, nbytes, [before])
            self.begun += 1

    def _update(self) -> StageTask:
        """Of the parameters of a round whose sums have come back beside the round behind it."""
        place = self.updated
        self.updated += 1
        touched = self.touched_bytes / ROUNDS
        return StageTask(f"update {place}", Does.UPDATE, touched, [f"round {place + 1}"])

    def _compute(self, kind: str, i: int, unit: Unit) -> StageTask:
        seconds = self.of.by_rank(unit.forward_s if kind == "forward" else unit.backward_s)
        return StageTask(f"{kind} {i} of {unit.name}", Does.COMPUTE, seconds)
