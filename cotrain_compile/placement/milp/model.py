"""The model under the program: decisions, buckets and prefix flows as columns.

In: a `DecisionSpace`, and which version of the program it is to be. Out: a `Model` without laws, to
which `program_flows`, `program_time` and `program_memory` add theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from cotrain_compile.placement.decisions.clusters import ParamCluster
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.effects import Demand, Effect
from cotrain_compile.placement.milp.linear import Column, LinearProgram, Row, summed
from cotrain_compile.plan import Lane

MIB = float(1 << 20)
# A parameter with this share of all is decided as a whole even for the bound.
LARGE = 0.02


@dataclass(frozen=True)
class Chosen:
    """A strategy's `effect`, and the variable by which it is chosen."""

    effect: Effect
    z: Any


class Model:
    """A linear program of `space`, conservative or `relaxed`, with `whole` clusters or split ones.

    Those of more than `large_bytes` are whole in any conservative one.
    In a `cyclic` one updates on the host, with their way back, may go on in the next step.

    `params[c][s]` says that strategy s is chosen for cluster c of parameters, `activations[c][s]`
    the same of those that are not kept: there the first strategy is what is left, and so it is with
    `levels[r][n]` of regions. `options` are all of these. A bucket has a `length` and in it a
    `stall`, in milliseconds. `lag` is by how many buckets a copy is counted late. Rates of the
    links are in MiB per millisecond.
    """

    def __init__(
        self,
        space: DecisionSpace,
        *,
        relaxed: bool,
        whole: bool,
        cyclic: bool = False,
        large_bytes: float = inf,
    ) -> None:
        self.space, self.relaxed, self.whole, self.cyclic = space, relaxed, whole, cyclic
        self.large_bytes = inf if relaxed else large_bytes
        self.lag = 0 if relaxed else 1
        self.epilogue = space.epilogue
        self.buckets = range(self.epilogue + 1)
        self.machine = space.problem.machine
        self.down_rate = self.machine.links[Lane.D2H].bytes_per_s / MIB / 1e3
        self.up_rate = self.machine.links[Lane.H2D].bytes_per_s / MIB / 1e3
        self.linear = LinearProgram()
        self._sums = 0
        self._params_bytes = sum(decision.cluster.param_bytes for decision in space.params)
        self.params = [
            [self._choice(f"z_{c}_{s}", self._is_whole(d.cluster)) for s in range(len(d.options))]
            for c, d in enumerate(space.params)
        ]
        self.activations = [
            [
                self._choice(
                    f"x_{c}" + f"_{s}" * (s > 1), whole or d.cluster.nbytes > self.large_bytes
                )
                for s in range(1, len(d.options))
            ]
            for c, d in enumerate(space.activations)
        ]
        for variables in self.params:
            self.add(summed(variables) == 1)
        for variables in self.activations:
            if len(variables) > 1:
                self.add(summed(variables) <= 1)
        self.levels = [
            [self._choice(f"l_{r}_{n}", whole) for n in range(1, len(d.options))]
            for r, d in enumerate(space.levels)
        ]
        for variables in self.levels:
            if variables:
                self.add(summed(variables) <= 1)
        self._add_offloaded_or_recomputed()
        self.options = tuple(self._options())
        self.stall = [self.variable(f"w_{k}") for k in self.buckets]
        self.length = [self.variable(f"t_{k}") for k in self.buckets]

    def _add_offloaded_or_recomputed(self) -> None:
        """What a region makes again at its level is not offloaded."""
        for decision, variables in zip(self.space.activations, self.activations, strict=True):
            of = decision.cluster.from_level
            if of is not None and variables and self.space.levels:
                self.add(summed([*variables, *self.levels[of.region][of.level - 1 :]]) <= 1)

    def _is_whole(self, cluster: ParamCluster) -> bool:
        """In the relaxed version only a large parameter that is a cluster by itself is."""
        large = cluster.param_bytes > LARGE * self._params_bytes
        if cluster.param_bytes > self.large_bytes:
            return True
        return self.whole or (self.relaxed and large and len(cluster.params) == 1)

    def _choice(self, name: str, whole: bool) -> Column:
        """Yes or no; where it need not be `whole`, a cluster is split in any proportion."""
        return self.linear.choice(name, is_whole=whole)

    def variable(self, name: str) -> Column:
        return self.linear.column(name)

    def add(self, row: Row) -> None:
        self.linear.add(row)

    def running(self, expression: Any) -> Any:
        """A variable equal to `expression`, so that long sums are written out once."""
        self._sums += 1
        known = self.linear.column(f"sum_{self._sums}", low=-inf)  # may be below nothing
        self.add(known == expression)
        return known

    def _options(self) -> Iterable[Chosen]:
        for decision, variables in zip(self.space.activations, self.activations, strict=True):
            for option, x in zip(decision.options[1:], variables, strict=True):
                yield Chosen(option.effect, x)
        for level, variables in zip(self.space.levels, self.levels, strict=True):
            for at, share in zip(level.options[1:], variables, strict=True):
                yield Chosen(at.effect, share)
        for params, variables in zip(self.space.params, self.params, strict=True):
            for chosen, z in zip(params.options, variables, strict=True):
                yield Chosen(chosen.effect, z)


class Total:
    """An amount of one class, as running totals at the end of each bucket."""

    def __init__(self, name: str, model: Model) -> None:
        self._model = model
        self._by = [model.variable(f"{name}_{k}") for k in model.buckets]
        for k in model.buckets[1:]:
            model.add(self._by[k] - self._by[k - 1] >= 0)

    def by(self, bucket: int) -> Any:
        """What has passed by the end of `bucket`; nothing before the first."""
        return self._by[bucket] if bucket >= 0 else 0.0

    def not_before(self, bucket: int) -> None:
        """Nothing passes before `bucket`."""
        for k in range(bucket):
            self._model.add(self.by(k) == 0)

    def within(self, bucket: int) -> Any:
        """What passes during `bucket`."""
        return self.by(bucket) - self.by(bucket - 1)

    @property
    def total(self) -> Any:
        """What has passed by the end of the step."""
        return self._by[-1]

    def at_least(self, terms: Iterable[tuple[int, Any]], before: Any = 0.0) -> None:
        """What is needed in a bucket has arrived: before it starts, or (relaxed) by its end.

        `before` is what arrived in the step before.
        """
        model, so_far = self._model, 0.0
        needed = by_bucket(terms)
        for k in model.buckets:
            if k in needed:
                so_far = model.running(so_far + needed[k])
                in_time = k if k == model.epilogue else max(0, k - model.lag)
                model.add(before + self.by(in_time) >= so_far)

    def at_most(self, terms: Iterable[tuple[int, Any]]) -> None:
        """Nothing passes before it exists: made by the bucket before, or (relaxed) in this."""
        model, so_far = self._model, 0.0
        made = by_bucket((min(bucket + model.lag, model.epilogue), term) for bucket, term in terms)
        for k in model.buckets:
            if k in made:
                so_far = model.running(so_far + made[k])
            model.add(self.by(k) <= so_far)


def by_bucket(terms: Iterable[tuple[int, Any]]) -> dict[int, Any]:
    """The sum of the terms of each bucket."""
    grouped: dict[int, list[Any]] = {}
    for bucket, term in terms:
        grouped.setdefault(bucket, []).append(term)
    return {bucket: summed(items) for bucket, items in sorted(grouped.items())}


def in_mib(nbytes: float) -> float:
    """Bytes in MiB."""
    return nbytes / MIB


def amount_of(demand: Demand) -> float:
    """MiB of a copy, milliseconds of work."""
    return demand.amount / MIB if demand.flow.is_copy else 1e3 * demand.amount
