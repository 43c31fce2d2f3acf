"""Agreement: ranks that train together compile the same step, by one plan, or none of them does.

Every rank has to issue the same collectives in the same order. So before the first one the ranks
compare their steps, take the plan of the first of them, and after a rehearsal decide together
whether to plan again. In every step they meet before the first collective. They talk over a group
of their own, on CPUs, so that nothing of this meets a collective of a step.

Private torch API used: `_resolve_process_group`, which no public function is. Tried on torch
2.13.0.
"""

from __future__ import annotations

import datetime
import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from cotrain_compile.collectives import group_name_of, is_collective
from cotrain_compile.dataflow import Role
from cotrain_compile.distribute.meet import LONGEST, SAME_BATCHES, Meeting, meeting_of
from cotrain_compile.errors import CotrainError, DistributeError, PlacementError, RanksApart
from cotrain_compile.files import from_json, to_json
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan
from cotrain_compile.user_lines import user_line


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
    """The ranks that run a step; without a meeting this process alone, which agrees with itself.

    `plans_alike` says whether one plan is right for all of them.
    """

    def __init__(self, meeting: Meeting | None = None, signature: str = "", told: str = "") -> None:
        """`signature` is that of the step, `told` what it is in words."""
        self._meeting = meeting
        self._signature = signature
        self._told = told
        self.plans_alike = True

    @property
    def rank(self) -> int | None:
        """Which of all ranks this process is; None where it trains alone."""
        return None if self._meeting is None else dist.get_rank()

    def require_same_step(self, step: StepGraph) -> None:
        """Raise `RanksApart` on every rank where they are about to run different steps."""
        found = self._exchange((_signature(step), _told(step), step.fingerprint), "compiles")
        self.plans_alike = len({fingerprint for _, _, fingerprint in found}) == 1
        if len({signature for signature, _, _ in found}) > 1:
            each = "; ".join(f"rank {rank}: {told}" for rank, (_, told, _) in enumerate(found))
            why = "the ranks compiled different steps and would wait for each other for ever"
            raise RanksApart(f"{why}: {each}. {SAME_BATCHES}")

    def plan(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the first rank makes, or its `PlacementError`, on every rank.

        Where shapes differ by rank, as those of uneven shards, each makes its own.
        """
        if self._meeting is None or not self.plans_alike:
            return make()
        made: Plan | CotrainError | None = None
        if self._meeting.rank == 0:
            try:
                made = make()
            except CotrainError as error:
                made = error
        ((text, told), *_) = self._exchange(_as_sent(made), "has a plan for", LONGEST)
        if isinstance(made, CotrainError):
            raise made
        if isinstance(told, dict):
            raise PlacementError(**told)
        if told is not None:
            raise DistributeError(f"the first rank has no plan for this step: {told}")
        return made or from_json(text, Plan, where="the plan of the first rank")

    def least(self, budgets: Mapping[Tier, int]) -> dict[Tier, int]:
        """What every rank may take of each tier."""
        found = self._exchange(dict(budgets), "plans")
        return {tier: min(of_rank[tier] for of_rank in found) for tier in budgets}

    def worst(self, own: Overshoot) -> Overshoot:
        """What all ranks together have to spare, so that all plan again or none does."""
        found = self._exchange(own, "has rehearsed")
        ops = dict.fromkeys(op for of_rank in found for op in of_rank.beyond)
        return Overshoot(
            max(of_rank.over_bytes for of_rank in found),
            max(of_rank.first_bytes for of_rank in found),
            any(of_rank.ran_out for of_rank in found),
            {op: max(of_rank.beyond.get(op, 0) for of_rank in found) for op in ops},
        )

    def told_of_failures(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, whose errors the other ranks are told of."""
        if self._meeting is None:
            return run

        def run_together(inputs: list[Any]) -> Any:
            try:
                return run(inputs)
            except BaseException as error:
                self.failed(error)
                raise

        return run_together

    def exchange_begins(self, collective: fx.Node) -> None:
        """Called before each `collective` of a step that runs; before its first, all ranks meet.

        Raises `RanksApart` on every rank where one of them has
        failed in this step, or does something else; no parameter has changed on any of them then.
        """
        if self._meeting is None:
            return
        if self._meeting.exchanges == 0:
            left_at = self._meeting.left_at
            after = "" if left_at is None else f", after a step that failed at exchange {left_at}"
            line = partial(user_line, collective.stack_trace)
            self._meeting.meet(
                f"run {self._signature}{after}",
                lambda: f"runs {self._told}{after}, and is at {line() or collective.name}",
            )
            self._meeting.left_at = None
        self._meeting.exchanges += 1

    def step_ended(self) -> None:
        """The step that began last is over."""
        if self._meeting is not None:
            self._meeting.exchanges = 0

    def failed(self, error: BaseException) -> None:
        """Tell the others, if they can be told, or remember at which exchange this rank failed."""
        if self._meeting is None:
            return
        if self._meeting.exchanges:
            self._meeting.left_at = self._meeting.exchanges
            self._meeting.exchanges = 0
        elif isinstance(error, Exception):  # who presses Ctrl-C does not wait
            self._meeting.tell_failure(error)

    def _exchange(self, value: Any, does: str, wait: datetime.timedelta | None = None) -> list[Any]:
        """What every rank brings, in their order; `does` says where in compiling they are."""
        if self._meeting is None:
            return [value]
        self._meeting.meet(does, lambda: f"{does} {self._told}", wait)
        return self._meeting.gather(value)


ALONE = Together()
_of_steps: weakref.WeakKeyDictionary[CodeType, Together] = weakref.WeakKeyDictionary()


def ranks_of(step: StepGraph, code: CodeType | None = None) -> Together:
    """The ranks that exchange something in `step`: one group's, or all where there are several.

    `code` is the user's function, by which `tell_of_refusal` finds them again.
    """
    names = {group_name_of(node) for node in step.nodes if is_collective(node)}
    if not names or not dist.is_initialized() or dist.get_backend() == "fake":
        return ALONE
    world = tuple(range(dist.get_world_size()))
    groups = {_members(name) for name in names}
    ranks = groups.pop() if len(groups) == 1 else world
    if len(ranks) == 1:
        return ALONE
    where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" if code else "a step"
    together = Together(meeting_of(ranks), _signature(step), f"{where} with {_told(step)}")
    if code is not None:
        _of_steps[code] = together
    return together


def tell_of_refusal(code: CodeType, error: Exception) -> None:
    """Tell the ranks that have run the step of `code` that this one cannot compile it anew."""
    together = _of_steps.get(code, ALONE)
    if dist.is_available() and dist.is_initialized():
        together.failed(error)


def _members(group_name: str) -> tuple[int, ...]:
    name: Any = group_name  # a type of its own for checkers
    group = torch._C._distributed_c10d._resolve_process_group(name)
    return tuple(sorted(dist.get_process_group_ranks(group)))


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
