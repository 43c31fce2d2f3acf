"""Agreement: ranks that train together compile the same step, by one plan, or none of them does.

Every rank has to issue the same collectives in the same order. So before the first one the ranks
compare their steps, take the plan of the first of them, and after a rehearsal decide together
whether to plan again. They talk over a group of their own, on CPUs, so that nothing of this meets
a collective of a step.

Private torch API used: `torch._dispatch.python.no_python_dispatcher`, as ranks agree within a
trace; and `_resolve_process_group`, which no public function is. Tried on torch 2.13.0.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dispatch.python import no_python_dispatcher

from cotrain_compile.collectives import group_name_of, is_collective
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CotrainError, DistributeError, PlacementError
from cotrain_compile.files import from_json, to_json
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan

# No rank plans for longer, nor traces for so much longer than another one.
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Overshoot:
    """By how much a rehearsal passed its plan: at its end, and where it first did.

    `ran_out` says whether it came to no end, `beyond` what kernels took beside the plan, by op.
    """

    over_bytes: int
    first_bytes: int
    ran_out: bool
    beyond: Mapping[str, int]


class Together:
    """The ranks that run a step; without a group this process alone, which agrees with itself."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._plans_alike = True

    def require_same_step(self, step: StepGraph) -> None:
        """Raise `DistributeError` on every rank where they are about to run different steps."""
        found = self._exchange((_signature(step), _told(step), step.fingerprint))
        self._plans_alike = len({fingerprint for _, _, fingerprint in found}) == 1
        if len({signature for signature, _, _ in found}) > 1:
            each = "; ".join(f"rank {rank}: {told}" for rank, (_, told, _) in enumerate(found))
            why = "the ranks compiled different steps and would wait for each other for ever"
            raise DistributeError(
                f"{why}: {each}. Run the same code on every rank, on batches of the same shape "
                "(drop_last=True)"
            )

    def plan(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the first rank makes, or its `PlacementError`, on every rank.

        Where shapes differ by rank, as those of uneven shards, each makes its own.
        """
        if self._group is None or not self._plans_alike:
            return make()
        made: Plan | CotrainError | None = None
        if dist.get_rank(self._group) == 0:
            try:
                made = make()
            except CotrainError as error:
                made = error
        ((text, told), *_) = self._exchange(_as_sent(made))
        if isinstance(made, CotrainError):
            raise made
        if isinstance(told, dict):
            raise PlacementError(**told)
        if told is not None:
            raise DistributeError(f"the first rank has no plan for this step: {told}")
        return made or from_json(text, Plan, where="the plan of the first rank")

    def least(self, budgets: Mapping[Tier, int]) -> dict[Tier, int]:
        """What every rank may take of each tier."""
        found = self._exchange(dict(budgets))
        return {tier: min(of_rank[tier] for of_rank in found) for tier in budgets}

    def worst(self, own: Overshoot) -> Overshoot:
        """What all ranks together have to spare, so that all plan again or none does."""
        found = self._exchange(own)
        ops = dict.fromkeys(op for of_rank in found for op in of_rank.beyond)
        return Overshoot(
            max(of_rank.over_bytes for of_rank in found),
            max(of_rank.first_bytes for of_rank in found),
            any(of_rank.ran_out for of_rank in found),
            {op: max(of_rank.beyond.get(op, 0) for of_rank in found) for op in ops},
        )

    def _exchange(self, value: Any) -> list[Any]:
        """What every rank brings, in their order."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            # In a trace, calls of torch go by Python and hold its lock: gloo would wait for it, to
            # free the tensors of the last exchange, and this thread for gloo.
            with no_python_dispatcher():
                dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise DistributeError(
                "another rank failed, or did not compile its step when this one did (a batch of "
                f"another shape on this rank alone?): {error}. Look at the first error of the "
                "other ranks; nothing was updated in this step"
            ) from error
        return found


ALONE = Together()


def ranks_of(step: StepGraph) -> Together:
    """The ranks that exchange something in `step`: one group's, or all where there are several."""
    names = {group_name_of(node) for node in step.nodes if is_collective(node)}
    if not names or not dist.is_initialized() or dist.get_backend() == "fake":
        return ALONE
    world = tuple(range(dist.get_world_size()))
    groups = {_members(name) for name in names}
    ranks = groups.pop() if len(groups) == 1 else world
    if len(ranks) == 1:
        return ALONE
    return Together(_group_on_cpus(dist.group.WORLD, ranks, ranks == world))


def _members(group_name: str) -> tuple[int, ...]:
    name: Any = group_name  # a type of its own for checkers
    group = torch._C._distributed_c10d._resolve_process_group(name)
    return tuple(sorted(dist.get_process_group_ranks(group)))


@functools.lru_cache(8)
def _group_on_cpus(world: Any, ranks: tuple[int, ...], is_world: bool) -> Any:
    """A group of `ranks` of the group `world`; only they have to ask for it."""
    del world  # another one has other groups
    return dist.new_group(
        list(ranks), backend="gloo", timeout=TIMEOUT, use_local_synchronization=not is_world
    )


def _as_sent(made: Plan | CotrainError | None) -> tuple[str, dict[str, Any] | str | None]:
    """A plan as text, and why there is none: of a `PlacementError` all that it says."""
    match made:
        case PlacementError():
            told = {"message": str(made), "shortfall_bytes": made.shortfall_bytes}
            return "", {**told, "tier": made.tier}
        case CotrainError():
            return "", str(made)
        case Plan():
            return to_json(made), None
        case None:  # of a rank that makes none
            return "", None


def _signature(step: StepGraph) -> str:
    """Equal for steps that issue the same collectives, on batches of the same shape.

    What a rank does between them may differ, as with parts of unequal size, which each pads or
    slices in its own way.
    """
    lines = [f"{item.name} {item.role}" for item in step.inputs]
    lines += [_exchanged(node) for node in step.nodes if is_collective(node)]
    return hashlib.sha256("\n".join([*lines, _told(step)]).encode()).hexdigest()


def _exchanged(collective: fx.Node) -> str:
    """What all ranks have to issue alike: the collective, its settings, and its result's shape."""
    value = collective.meta.get("val")
    result = (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None
    settings = [item for item in collective.args if not isinstance(item, fx.Node | list | tuple)]
    return f"{collective.target} {settings} {result}"


def _told(step: StepGraph) -> str:
    """What tells steps apart, in words."""
    exchanges = sum(map(is_collective, step.nodes))
    batch = [
        f"{item.name} {tuple(value.shape)}"
        for item, node in zip(step.inputs, step.nodes, strict=False)
        if item.role is Role.BATCH and isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    return f"{exchanges} collectives, batch {', '.join(batch) or 'none'}"
