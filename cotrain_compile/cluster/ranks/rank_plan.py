"""Rank plan: the step of one rank of replicas or shards, planned tensor by tensor, as when it runs.

In: a traced step with a symbolic batch, a cluster, a strategy, how many devices share the samples.
Out: a `RankPlan`, the solver's plan on what that rank has of its machine. A layer profile tells
whole units apart; a plan decides on each tensor. The step has the exchanges of its rank
(`rank_step`): of a shard for each of its micro-batches, of a replica behind the last. A step of
several runs its forward and backward for each, adds gradients up, and updates once behind the last,
as a captured loop over micro-batches does. Where the solver has no plan, a `NoRankPlan` says so:
what the ranking says of whole units stands. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cotrain_compile.analysis.symbolic import at
from cotrain_compile.cluster.model.description import Cluster, fastest_first, first_devices
from cotrain_compile.cluster.model.machines import rank_machine
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.cluster.ranks.rank_step import (
    replica_step,
    require_exchangeable,
    shard_step,
    with_typed_gradients,
)
from cotrain_compile.cluster.sources.traced_profile import runnable_on, sample_symbols
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, SizeExpressions
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.machine.op_classes import OpKind
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.placement.simulate.predict import predict
from cotrain_compile.plan import Plan
from cotrain_compile.support.units import format_bytes, format_seconds

# What is there once for each micro-batch: its samples, and all that is made of them.
_OWN = frozenset({Role.BATCH, Role.TEMPORARY, Role.WORKSPACE})


def in_micro_batches(step: Dataflow, count: int) -> Dataflow:
    """`step` for so many micro-batches of its batch; `step` itself for one."""
    if count == 1:
        return step
    made = [_MicroBatch(step, i) for i in range(count)]
    last = made[-1]
    ops = [op for copy in made for op in copy.ops(copy is last)]
    updates = tuple(
        replace(group, gradient=last.summed[group.gradient], low_precision="", recasts=())
        for group in step.updates
    )
    values = step.checkpoints.values
    again = tuple(copy.own.get(name, name) for copy in made for name in values)
    return replace(
        step,
        fingerprint=f"{count}.{step.fingerprint}",
        ops=tuple(ops),
        buffers=tuple(_buffers(step, made)),
        updates=updates,
        checkpoints=replace(step.checkpoints, values=again),
    )


class _MicroBatch:
    """The ops of one micro-batch, by names of its own."""

    def __init__(self, step: Dataflow, number: int) -> None:
        self.step, self.number = step, number
        early = [op for op in step.ops if op.phase is not Phase.OPTIMIZER]
        touched = {name for op in early for name in (*op.reads, *op.writes)}
        self.own: Mapping[str, str] = {
            name: self._named(name) for name in touched if step.buffer[name].role in _OWN
        }
        self._begun = {op.name: self._named(op.name) for op in early}
        self._complete = {
            name: op.name for op in early for name in op.writes if name in self._gradients
        }
        self.summed = {name: self._sum(name, number) for name in self._gradients}

    @property
    def _gradients(self) -> set[str]:
        return {group.gradient for group in self.step.updates}

    def _named(self, name: str) -> str:
        return f"{name}.batch{self.number}"

    def _sum(self, gradient: str, number: int) -> str:
        """That of the micro-batches up to one; of the first its gradient itself."""
        return f"{gradient}.sum{number}" if number else f"{gradient}.batch0"

    def ops(self, is_last: bool) -> Iterator[Op]:
        """With the optimizer's behind the last one's."""
        for op in self.step.ops:
            if op.phase is Phase.OPTIMIZER:
                if is_last:
                    yield self._renamed(op, {**self.own, **self.summed})
                continue
            yield replace(
                self._renamed(op, self.own),
                name=self._begun[op.name],
                awaits=self._begun.get(op.awaits, ""),
            )
            for name in dict.fromkeys(op.writes):
                if self.number and self._complete.get(name) == op.name:
                    yield self._add(name, op)

    def _renamed(self, op: Op, names: Mapping[str, str]) -> Op:
        reads = tuple(names.get(name, name) for name in op.reads)
        return replace(op, reads=reads, writes=tuple(names.get(name, name) for name in op.writes))

    def _add(self, gradient: str, maker: Op) -> Op:
        reads = (self._sum(gradient, self.number - 1), self.own[gradient])
        nbytes = 3 * self.step.buffer[gradient].nbytes
        made = self.summed[gradient]
        return Op(
            f"add.{made}",
            "add",
            maker.phase,
            reads,
            (made,),
            bytes_moved=nbytes,
            kind=OpKind.POINTWISE,
        )


def _buffers(step: Dataflow, copies: list[_MicroBatch]) -> Iterator[Buffer]:
    for buffer in step.buffers:
        named = [copy.own[buffer.name] for copy in copies if buffer.name in copy.own]
        for name in named or [buffer.name]:
            yield replace(buffer, name=name)
        for copy in copies[1:]:
            if buffer.name in copy.summed:
                yield replace(buffer, name=copy.summed[buffer.name])


REPLICATE, SHARD = "replicate", "shard"
PLANNED = (REPLICATE, SHARD)

# Where a plan is found already, no step with more ops is planned: its search takes minutes.
_MOST_OPS = 50_000


@dataclass(frozen=True)
class RankPlan:
    """One of `devices` ranks of `strategy` with so many samples, in micro-batches.

    Seconds are with all exchanges. `bound_s` is
    certified for these micro-batches, 0 where there is none. `by_units_s` is the step that the
    ranking has for the strategy, None where it has none that fits.
    """

    plan: Plan
    strategy: str
    devices: int
    samples: int
    micro_batches: int
    step_s: float
    bound_s: float
    peak_bytes: int
    host_bytes: int
    by_units_s: float | None = None

    def __str__(self) -> str:
        least = f", at least {format_seconds(self.bound_s)}" if self.bound_s else ""
        size, count = self.samples // self.micro_batches, self.micro_batches
        batches = f"{count} micro-batches of {size}" if count > 1 else f"one micro-batch of {size}"
        return (
            f"one of {self.devices} ranks of {self.strategy} with {batches}, "
            f"planned tensor by tensor: {format_seconds(self.step_s)}{least}, exchanges included; "
            f"{format_bytes(self.peak_bytes)} on the device, {format_bytes(self.host_bytes)} on "
            f"the host; {self._by_units}"
        )

    @property
    def _by_units(self) -> str:
        if self.by_units_s is None:
            return "by whole units it does not fit"
        return f"by whole units {format_seconds(self.by_units_s)}"

    def figures(self) -> dict[str, Any]:
        """As JSON has it; the plan is a file of its own."""
        return {name: value for name, value in vars(self).items() if name != "plan"}


@dataclass(frozen=True)
class NoRankPlan:
    """Why no rank of `strategy` is planned tensor by tensor."""

    strategy: str
    devices: int
    reason: str
    plan: None = None

    def __str__(self) -> str:
        return (
            f"one of {self.devices} ranks of {self.strategy}: no plan tensor by tensor, so none is "
            f"saved; what is said of it above, by whole units, stands: {self.reason}"
        )

    def figures(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: value for name, value in vars(self).items() if name != "plan"}


def plan_answered_rank(
    found: Answer, step: Dataflow, cluster: Cluster, symbols: Sequence[str] = ()
) -> RankPlan | NoRankPlan:
    """A rank of the first strategy of `found` that can be planned, on as many devices as that has,
    or, where it does not fit there, on the most that share the samples evenly.

    Raises:
        OptionError: there is none, or as `plan_rank`.
    """
    rows = [one for one in found.strategies if one.name in PLANNED and one.devices]
    if not rows:
        asked = ", ".join(one.name for one in found.strategies)
        raise OptionError(
            f"a rank of {asked} is planned by no solver; ask for {' or '.join(PLANNED)} too"
        )
    row = rows[0]
    devices = row.devices
    if row.fits is False:  # its devices are those that leave least missing by whole units
        shared = range(1, len(cluster.devices) + 1)
        devices = max(count for count in shared if found.samples % count == 0)
    try:
        rank = plan_rank(step, cluster, row.name, devices, found.samples, symbols)
    except PlacementError as error:
        return NoRankPlan(row.name, devices, str(error))
    return replace(rank, by_units_s=None if row.fits is False else row.step_s)


def plan_rank(
    step: Dataflow,
    cluster: Cluster,
    strategy: str,
    devices: int,
    samples: int,
    symbols: Sequence[str] = (),
) -> RankPlan:
    """The rank with the smallest device, of the first `devices` that share the samples evenly, the
    fastest in front.

    It is tried in micro-batches of all sizes that share its samples evenly, the largest first,
    until one needs no plan, for smaller ones only exchange more; the fastest counts.

    Raises:
        OptionError: they do not share them evenly, `symbols` are none of the step's, or nobody
            knows the step of such a rank.
        PlacementError: its samples do not fit, wherever tensors rest.
    """
    if strategy not in PLANNED:
        raise OptionError(
            f"a rank of {strategy} is planned by no solver; {' and '.join(PLANNED)} are"
        )
    if samples % devices:
        raise OptionError(f"{samples} samples are not shared evenly by {devices} devices")
    share = samples // devices
    counts = [n for n in range(1, share + 1) if share % n == 0]
    rank = _Rank(step, cluster, strategy, devices, share, sample_symbols(step, symbols))
    best: RankPlan | None = None
    for count in counts:
        if best and count * len(step.ops) > _MOST_OPS:
            break
        try:
            found = rank.planned(count)
        except PlacementError:
            if best is None and count == counts[-1]:
                raise
            continue
        if best is None or found.step_s < best.step_s:
            best = found
        if not (found.plan.tasks or found.plan.placement.recomputed):
            break
    assert best is not None  # else the last one has raised
    return best


@dataclass(frozen=True)
class _Rank:
    """What is planned, and where; `samples` are those of the rank."""

    step: Dataflow
    cluster: Cluster
    strategy: str
    devices: int
    samples: int
    symbols: Sequence[str]

    @cached_property
    def machine(self) -> Machine:
        part = first_devices(fastest_first(self.cluster), self.devices)
        group, device = min(
            {(place.group, place.device) for place in part.devices},
            key=lambda place: part.groups[place[0]].each[place[1]].device.capacity_bytes,
        )
        return rank_machine(part.groups[group], device).but(network=part.ring)

    def sized(self, micro_batches: int) -> Dataflow:
        """Its step."""
        values = dict.fromkeys(self.symbols, self.samples // micro_batches)
        sized = at(runnable_on(self.step, self.machine), {**self.step.symbols, **values})
        require_exchangeable(sized)
        typed = with_typed_gradients(replace(sized, symbols={}, expressions=SizeExpressions()))
        if self.strategy == REPLICATE:
            return replica_step(in_micro_batches(typed, micro_batches), self.devices)
        return in_micro_batches(shard_step(typed, self.devices), micro_batches)

    def planned(self, micro_batches: int) -> RankPlan:
        machine = self.machine
        budgets = {
            Tier.DEVICE: machine.device.capacity_bytes,
            Tier.HOST: machine.host.capacity_bytes,
        }
        problem = formulate(self.sized(micro_batches), machine, budgets)
        plan = solve(problem)
        check(problem, plan)
        timeline = predict(place_plan(problem, plan))
        return RankPlan(
            plan,
            self.strategy,
            self.devices,
            self.samples,
            micro_batches,
            timeline.makespan_s,
            plan.report.lower_bound_s if plan.report else 0.0,
            timeline.peak_bytes[Tier.DEVICE],
            timeline.peak_bytes[Tier.HOST],
        )
