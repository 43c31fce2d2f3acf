"""Decisions: what a placement can decide about a step, as numbers in buckets.

Types alone: `find_decisions` makes a `DecisionSpace` from a Problem. It has for each cluster of
parameters or activations the strategies that fit it, each with its `Effect`, and what the device
holds whatever is decided; and it turns `Decisions` into a Placement.

`NetworkWork` is what the exchanges of a step take, by bucket: fixed work on a lane of its own,
which the program and the bound count beside what is decided (`milp/time.py`). Nothing where the
machine has no network, or the step no exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.dataflow import Op
from cotrain_compile.placement.decisions.activation_strategies import ACTIVATION_STRATEGIES, Stays
from cotrain_compile.placement.decisions.bucketed_step import BucketedStep
from cotrain_compile.placement.decisions.clusters import ActivationCluster, ParamCluster
from cotrain_compile.placement.decisions.effects import Effect, Exchanged
from cotrain_compile.placement.decisions.strategies import Placed, Strategy, fitting
from cotrain_compile.placement.pieces import PIECE_BYTES
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.levels import RegionLevels
from cotrain_compile.placement.residency import low_precision_copies
from cotrain_compile.placement.schedule.exchanges_ahead import (
    chain_of,
    is_shifted,
    loosest,
    shifted_along,
)
from cotrain_compile.plan import Placement

# What the host holds changes slowly: as many moments of a step show it.
HOST_BUCKETS = 12


@dataclass(frozen=True)
class NetworkWork:
    """The exchanges of a step, as it has them; `loose`, as far apart as any plan may have them.

    As the step has them no bucket takes less than its part of `least_s`, in no plan less than that
    of `loose_s`, but for the ops that are moved with an exchange: they take `shifted_s` together.
    No plan takes less than `chain_s`: what the others take in the loosest order, with the exchanges
    that they wait for, without any that a plan may leave to the host.
    """

    exchanges: tuple[Exchanged, ...] = ()
    loose: tuple[Exchanged, ...] = ()
    least_s: tuple[float, ...] = ()
    loose_s: tuple[float, ...] = ()
    chain_s: float = 0.0
    shifted_s: float = 0.0


NO_NETWORK = NetworkWork()


def network_work(step: BucketedStep) -> NetworkWork:
    """The exchanges of `step`, in the buckets that it is cut in."""
    problem, program = step.problem, step.program
    network_s = problem.costs.network_s
    if not network_s:
        return NO_NETWORK
    awaited = {op.awaits: slot for slot, op in enumerate(program.ops) if op.awaits}
    exchanges = tuple(
        Exchanged(
            network_s[op.name],
            step.bucket(slot),
            step.bucket(awaited.get(op.name, program.end)),
        )
        for slot, op in enumerate(program.ops)
        if op.name in network_s
    )
    last = step.bucket(program.end)
    loose = tuple(
        replace(
            each,
            begun=0 if kind.startswith("all_gather") else each.begun,
            awaited=last if kind.startswith("reduce_scatter") else each.awaited,
        )
        for each, kind in zip(exchanges, _kinds(program.ops, network_s), strict=True)
    )
    casts = set(step.low_precision_copies.values())
    staying_s = {
        op.name: 0.0 if casts.intersection(op.writes) else problem.costs.device_s[op.name]
        for op in program.ops
    }
    along = shifted_along(program.ops)
    unshifted_s = staying_s | dict.fromkeys(along, 0.0)
    fixed = {op.name for op in program.ops if not is_shifted(op)}
    return NetworkWork(
        exchanges,
        loose,
        _least(step, staying_s, network_s),
        _least(step, staying_s, {name: s for name, s in network_s.items() if name in fixed}),
        chain_of(loosest(program.ops), unshifted_s, network_s).end_s,
        sum(staying_s[name] for name in along),
    )


def _least(
    step: BucketedStep, device_s: Mapping[str, float], network_s: Mapping[str, float]
) -> tuple[float, ...]:
    """What each bucket takes at least: its own ops, and the exchanges that they wait for."""
    ops = step.program.ops
    least = [0.0]
    for start, end in zip(step.starts, step.ends, strict=True):
        stalls = chain_of(ops[start:end], device_s, network_s).stalls
        least.append(sum(stalls) + sum(device_s[op.name] for op in ops[start:end]))
    return (*least, 0.0)


def _kinds(ops: Sequence[Op], network_s: Mapping[str, float]) -> list[str]:
    return [op.collective.kind for op in ops if op.collective and op.name in network_s]


Row = NDArray[np.float64]

C = TypeVar("C")
S = TypeVar("S")


@dataclass(frozen=True)
class DecisionOption(Generic[S]):
    """A strategy, and what it does with the cluster that it is chosen for."""

    strategy: S
    effect: Effect


@dataclass(frozen=True)
class Decision(Generic[C, S]):
    """One of the `options` is chosen for a cluster."""

    cluster: C
    options: tuple[DecisionOption[S], ...]

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
    def host_buckets(self) -> Sequence[int]:
        """The buckets in which the host's memory is counted: some of all, and before updates."""
        last = self.epilogue
        spread = {last * part // HOST_BUCKETS for part in range(1, HOST_BUCKETS + 1)}
        return sorted(spread | {max(0, d.cluster.release - 1) for d in self.params[:1]})

    @property
    def effects(self) -> list[tuple[Effect, ...]]:
        """What each option of each decision does: those about activations come first."""
        of_activations = [decision.effects for decision in self.activations]
        return of_activations + [decision.effects for decision in self.params]

    def placement(self, policy: str, decisions: Decisions) -> Placement:
        """The placement that `decisions` make."""
        base = resident(self.problem.dataflow)
        homes, updates, offloaded = dict(base.homes), dict(base.updates), list[str]()
        recomputed, speculative = list(self.problem.recomputed), list[str]()
        refetched = dict[str, None]()  # of several gaps the longest counts
        for placed in self._placed(decisions):
            homes |= placed.homes
            updates |= placed.updates
            offloaded += placed.offloaded
            refetched |= dict.fromkeys(placed.refetched)
            recomputed += placed.recomputed
            speculative += placed.speculative
        return Placement(
            policy,
            homes,
            updates,
            tuple(offloaded),
            early_updates=True,
            recomputed=tuple(recomputed),
            recomputed_apart=self.problem.apart,
            speculative=tuple(speculative),
            piece_bytes=PIECE_BYTES,
            splits=self.problem.splits,
            refetched=tuple(name for name in offloaded if name in refetched),
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
        Decision(cluster, tuple(DecisionOption(s, s.effect(cluster)) for s in fitting(cluster)))
        for cluster in clusters
    )


def activation_decisions(
    clusters: Sequence[ActivationCluster],
) -> tuple[Decision[ActivationCluster, Stays], ...]:
    """The same for activations."""
    return tuple(
        Decision(
            cluster,
            tuple(
                DecisionOption(s, s.effect(cluster))
                for s in ACTIVATION_STRATEGIES
                if s.fits(cluster)
            ),
        )
        for cluster in clusters
    )
