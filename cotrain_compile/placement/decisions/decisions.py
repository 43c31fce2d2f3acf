"""Decisions: what a placement can decide about a step, as numbers in buckets.

Types alone: `find_decisions` makes a `DecisionSpace` from a Problem. It has for each cluster of
parameters or activations the strategies that fit it, each with its `Effect`, and what the device
holds whatever is decided; and it turns `Decisions` into a Placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.placement.decisions.clusters import ActivationCluster, ParamCluster
from cotrain_compile.placement.decisions.effects import Effect
from cotrain_compile.placement.decisions.network import NO_NETWORK, NetworkWork
from cotrain_compile.placement.decisions.strategies import (
    ACTIVATION_STRATEGIES,
    Placed,
    Stays,
    Strategy,
    fitting,
)
from cotrain_compile.placement.pieces import PIECE_BYTES
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import RegionLevels
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.plan import Placement

Row = NDArray[np.float64]

C = TypeVar("C")
S = TypeVar("S")


@dataclass(frozen=True)
class Option(Generic[S]):
    """A strategy, and what it does with the cluster that it is chosen for."""

    strategy: S
    effect: Effect


@dataclass(frozen=True)
class Decision(Generic[C, S]):
    """One of the `options` is chosen for a cluster."""

    cluster: C
    options: tuple[Option[S], ...]

    @property
    def strategies(self) -> tuple[S, ...]:
        return tuple(option.strategy for option in self.options)

    @property
    def effects(self) -> tuple[Effect, ...]:
        return tuple(option.effect for option in self.options)


@dataclass(frozen=True)
class Decisions:
    """One strategy for each cluster of parameters, and one for each of activations.

    `levels` has the level of each region where these are decided, a mean where it is split.
    """

    params: tuple[Strategy, ...]
    activations: tuple[Stays, ...]
    levels: tuple[float, ...] = ()


@dataclass(frozen=True)
class OpNeeds:
    """What single ops need on the device with every copy at the last moment: rows in bytes.

    `fixed` is there whatever is decided, `held[d][o]` with option o of decision d, those about
    activations first, then those about parameters.
    """

    fixed: Row
    held: tuple[tuple[Row, ...], ...]


@dataclass(frozen=True)
class DecisionSpace:
    """All that can be decided. Bucket 0 is a head without ops, the last one the epilogue.

    `seconds` has the device time of each bucket without updates; `checkpoints` the pairs of
    (bucket, bytes alive whatever is decided) at which memory is checked: all activations stay,
    and no parameter, state or gradient of `params` is counted. `levels` are those of regions, in
    whose decisions nothing is made again in option 0; there are none where the step makes some
    again already.
    What the `network` has to do is the same whatever is decided. `op_needs` are for a bound.
    """

    problem: Problem
    seconds: tuple[float, ...]
    checkpoints: tuple[tuple[int, int], ...]
    params: tuple[Decision[ParamCluster, Strategy], ...]
    activations: tuple[Decision[ActivationCluster, Stays], ...]
    levels: tuple[Decision[RegionLevels, int], ...] = ()
    network: NetworkWork = NO_NETWORK
    op_needs: OpNeeds | None = None

    @property
    def epilogue(self) -> int:
        """Index of the last bucket."""
        return len(self.seconds) - 1

    @property
    def effects(self) -> list[tuple[Effect, ...]]:
        """What each option of each decision does: those about activations come first."""
        of_activations = [decision.effects for decision in self.activations]
        return of_activations + [decision.effects for decision in self.params]

    def placement(self, policy: str, decisions: Decisions) -> Placement:
        """The placement that `decisions` make."""
        base = resident(self.problem.dataflow)
        homes, updates, away = dict(base.homes), dict(base.updates), list[str]()
        recomputed, speculative = list(self.problem.recomputed), list[str]()
        for placed in self._placed(decisions):
            homes |= placed.homes
            updates |= placed.updates
            away += placed.away
            recomputed += placed.recomputed
            speculative += placed.speculative
        return Placement(
            policy,
            homes,
            updates,
            tuple(away),
            early_updates=True,
            recomputed=tuple(recomputed),
            speculative=tuple(speculative),
            piece_bytes=PIECE_BYTES,
            splits=self.problem.splits,
        )

    def _placed(self, decisions: Decisions) -> Iterator[Placed]:
        dataflow = self.problem.dataflow
        copies = low_precision_copies(dataflow)
        for decision, strategy in zip(self.params, decisions.params, strict=True):
            for param in decision.cluster.params:
                yield strategy.placed(dataflow, param, copies.get(param, param))
        for activations, chosen in zip(self.activations, decisions.activations, strict=True):
            yield chosen.placed(activations.cluster)


def param_decisions(
    clusters: Iterable[ParamCluster],
) -> tuple[Decision[ParamCluster, Strategy], ...]:
    """For each cluster the strategies that fit it, with their effects."""
    return tuple(
        Decision(cluster, tuple(Option(s, s.effect(cluster)) for s in fitting(cluster)))
        for cluster in clusters
    )


def activation_decisions(
    clusters: Sequence[ActivationCluster],
) -> tuple[Decision[ActivationCluster, Stays], ...]:
    """The same for activations."""
    return tuple(
        Decision(
            cluster,
            tuple(Option(s, s.effect(cluster)) for s in ACTIVATION_STRATEGIES if s.fits(cluster)),
        )
        for cluster in clusters
    )
