"""Agreement: ranks that train together compile the same step, by one plan, or none of them does.

Every rank has to issue the same collectives in the same order. So before the first one the ranks
compare their steps, take the plan of the first of them, and after a dry run decide together
whether to plan again. In every step they meet before the first collective, with the settings that
are inputs of the step; in some, they compare the parameters that have to be the same on all. They
talk over a group of their own, on CPUs, so that nothing of this meets a collective of a step.
"""

from __future__ import annotations

import datetime
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from cotrain_compile.dataflow import Role
from cotrain_compile.distribute.meet import (
    AFTER_EXCHANGE,
    LONGEST,
    SAME_BATCHES,
    Meeting,
    meeting_of,
)
from cotrain_compile.distribute.ranks import (
    groups_apart,
    members_of,
    ranks_that_run,
    signature_of_step,
    told_of_step,
)
from cotrain_compile.distribute.replicas import Digests, Ranks, first_apart, same_on
from cotrain_compile.distribute.same_numbers import (
    by_rank,
    first_few,
    losses_apart,
    numbers_of,
    settings_read,
    updates_apart,
    values_apart,
    values_of,
)
from cotrain_compile.errors import CotrainError, DistributeError, PlacementError, RanksApart
from cotrain_compile.files import from_json, to_json
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.collectives import group_name_of, group_numbers, is_collective
from cotrain_compile.graph.user_lines import user_line
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan

_WOULD_DIFFER = "the ranks would update with different numbers, and their parameters would differ"
_SAME_SETTINGS = (
    "Give every rank the same settings; nothing was updated. What is meant to differ by rank, such "
    "as the weight of a loss, belongs before backward(), or in a parameter that is not exchanged"
)

_CHANGED_ALONE = "a number has changed on some ranks alone, and is an input of their step only"
_SAME_MESH = (
    "Make the same DeviceMesh on every rank, and use its dimensions alike; nothing was updated"
)
_ANEW = (
    "Give every rank the same settings, then call torch._dynamo.reset() on every rank, which "
    "compiles the step anew; nothing was updated"
)


@dataclass(frozen=True)
class Overshoot:
    """By how much a dry run passed its plan: at its end, and where it first did.

    `ran_out` says whether it came to no end, `beyond` what kernels took beside the plan, by op,
    `pieces_bytes` by how much more a card's allocator had reserved than the step may take.
    """

    over_bytes: int
    first_bytes: int
    ran_out: bool
    beyond: Mapping[str, int]
    pieces_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        """By how much it should be less."""
        return max(self.over_bytes, self.pieces_bytes)


@dataclass(frozen=True)
class _Compiled:
    """What a rank says of the step that it has compiled, for all to compare.

    `updates` and `losses` are digests of its numbers, `same_on` has the ranks with the same
    parameters, `check_every` after how many steps they are compared. `read` has the numbers that
    are inputs: what has changed on this rank once, and is a constant before. `groups` has the
    ranks of each group that it exchanges something with, in the order of its step.
    """

    signature: str
    told: str
    fingerprint: str
    updates: str
    losses: str
    same_on: Mapping[str, Ranks]
    check_every: int
    read: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


class Together:
    """The ranks that run a step; without a meeting this process alone, which agrees with itself.

    `plans_alike` says whether one plan is right for all of them.
    """

    def __init__(
        self,
        meeting: Meeting | None = None,
        signature: str = "",
        told: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        """`signature` is that of the step of `ranks`, `told` what it is in words."""
        self._meeting = meeting
        self._signature = signature
        self._told = told
        self._ranks = tuple(ranks)
        self.plans_alike = True
        self._settings: Mapping[str, int] = {}  # positions of the inputs that they are
        self._replicas: Mapping[str, tuple[int, Sequence[Ranks]]] = {}  # positions, and on whom
        self._check_every = 0
        self._met = 0  # so many steps
        self._values: Mapping[str, str] = {}  # of the settings, in the step that runs
        self._digests: Digests | None = None  # of the replicas, if they are compared in this step

    @property
    def rank(self) -> int | None:
        """Which of all ranks this process is; None where it trains alone."""
        return None if self._meeting is None else dist.get_rank()

    def require_same_step(self, step: StepGraph, check_every: int = 0) -> None:
        """Raise `RanksApart` on every rank where they are about to run different steps.

        Those are steps that exchange other things, or that update with other numbers. Replicas are
        compared every so many steps, where the first rank says so.
        """
        if self._meeting is None:
            return
        numbers = numbers_of(step)
        ranks = frozenset(self._ranks)
        own = _Compiled(
            self._signature,
            told_of_step(step),
            step.fingerprint,
            numbers.of_updates,
            numbers.of_losses,
            same_on(step, dist.get_rank(), ranks, lambda name: frozenset(members_of(name))),
            check_every,
            tuple(_numbers_read(step)),
            tuple(map(members_of, group_numbers(step.nodes))),
        )
        found: list[_Compiled] = self._exchange(own, "compiles")
        self.plans_alike = len({each.fingerprint for each in found}) == 1
        same_updates = len({each.updates for each in found}) == 1
        same_losses = len({each.losses for each in found}) == 1
        of_all = [] if same_updates and same_losses else self._meeting.gather(numbers)
        # Parts of unequal size are padded and masked by ops of their own.
        apart = [] if same_updates else updates_apart(of_all, settings_alone=not self.plans_alike)
        if len({each.signature for each in found}) > 1:
            told = "; ".join(f"rank {rank}: {each.told}" for rank, each in enumerate(found))
            also = f". {_sentence(first_few(apart))}" if apart else ""
            if read_apart := _read_apart([each.read for each in found]):
                raise RanksApart(f"{_CHANGED_ALONE}: {first_few(read_apart)}{also}. {_ANEW}")
            why = "the ranks compiled different steps and would wait for each other for ever"
            raise RanksApart(f"{why}: {told}{also}. {SAME_BATCHES}")
        if lost := groups_apart({r: e.groups for r, e in zip(self._ranks, found, strict=True)}):
            raise RanksApart(f"the ranks would wait for each other for ever: {lost}. {_SAME_MESH}")
        if apart:
            raise RanksApart(f"{_WOULD_DIFFER}: {first_few(apart)}. {_SAME_SETTINGS}")
        if self.plans_alike and not same_losses and (told_of_losses := losses_apart(of_all)):
            warnings.warn(
                f"cotrain: the ranks compute their gradients with different numbers: "
                f"{first_few(told_of_losses)}. Gradients are exchanged after that, so parameters "
                "stay the same; where it is meant, pass the number to the step as a tensor, which "
                "nobody compares",
                stacklevel=2,
            )
        self._settings = settings_read(step)
        self._check_every = found[0].check_every
        if self.plans_alike:  # else an offset or a size may have made other values of the same
            self._replicas = {
                item.name: (position, [each.same_on.get(item.name, Ranks()) for each in found])
                for position, item in enumerate(step.inputs)
                if any(item.name in each.same_on for each in found)
            }

    @property
    def checks_replicas(self) -> bool:
        """Whether the step that is about to begin compares parameters, and so reads them all."""
        return bool(self._replicas and self._check_every) and self._met % self._check_every == 0

    def step_begins(self, inputs: Sequence[Any]) -> None:
        """A step begins with these `inputs`, all at home and with no update of theirs under way."""
        self._values = values_of(self._settings, inputs)
        self._digests = None
        if self.checks_replicas:
            at = {name: position for name, (position, _) in self._replicas.items()}
            self._digests = Digests({name: inputs[position] for name, position in at.items()})

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
        found = self._exchange(own, "has had its dry run")
        ops = dict.fromkeys(op for of_rank in found for op in of_rank.beyond)
        return Overshoot(
            max(of_rank.over_bytes for of_rank in found),
            max(of_rank.first_bytes for of_rank in found),
            any(of_rank.ran_out for of_rank in found),
            {op: max(of_rank.beyond.get(op, 0) for of_rank in found) for op in ops},
            max(of_rank.pieces_bytes for of_rank in found),
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

        Raises `RanksApart` on every rank where one of them has failed in this step, does something
        else or with other settings, or has other parameters; this step has changed none on any.
        """
        if self._meeting is None:
            return
        if self._meeting.exchanges == 0:
            left_at = self._meeting.left_at
            after = "" if left_at is None else f", {AFTER_EXCHANGE} {left_at}"
            line = partial(user_line, collective.stack_trace)
            compares = "" if self._digests is None else ", and compares parameters"
            same_values = self._meeting.meet(
                f"run {self._signature}{after}{compares}",
                lambda: f"runs {self._told}{after}, and is at {line() or collective.name}",
                values=repr(self._values),
            )
            self._meeting.left_at = None
            if not same_values:
                apart = values_apart(self._meeting.gather(self._values))
                raise RanksApart(f"{_WOULD_DIFFER}: {first_few(apart)}. {_SAME_SETTINGS}")
            self._compare_replicas()
            self._met += 1
        self._meeting.exchanges += 1

    def _compare_replicas(self) -> None:
        if self._digests is None or self._meeting is None:
            return
        digests = self._meeting.gather(self._digests.read())
        self._digests = None
        ranks_of = {name: [sorted(same) for same in on] for name, (_, on) in self._replicas.items()}
        found = first_apart(digests, ranks_of, self._ranks)
        if found is not None:
            name, first, differing = found
            raise RanksApart(
                f"{name} is not the same on ranks {first} and {', '.join(map(str, differing))}, "
                "which train it together: its update, something between the steps (a checkpoint "
                "that was loaded, a parameter that was written), or the memory of one rank has "
                "made it another. This step has changed nothing; load a checkpoint on all ranks, "
                "or send the parameters of one to all (torch.distributed.broadcast)"
            )

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
    """The ranks that exchange something in `step`: one group's, or all that run it where there are
    several groups.

    `code` is the user's function, by which `tell_of_refusal` finds them again.
    """
    names = {group_name_of(node) for node in step.nodes if is_collective(node)}
    if not names or not dist.is_initialized() or dist.get_backend() == "fake":
        return ALONE
    groups = {members_of(name) for name in names}
    ranks = groups.pop() if len(groups) == 1 else ranks_that_run(code)
    if len(ranks) == 1:
        return ALONE
    where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" if code else "a step"
    told = f"{where} with {told_of_step(step)}"
    together = Together(meeting_of(ranks), signature_of_step(step, code), told, ranks)
    if code is not None:
        _of_steps[code] = together
    return together


def tell_of_refusal(code: CodeType, error: Exception) -> None:
    """Tell the ranks that have run the step of `code` that this one cannot compile it anew."""
    together = _of_steps.get(code, ALONE)
    if dist.is_available() and dist.is_initialized():
        together.failed(error)


def _numbers_read(step: StepGraph) -> Iterator[str]:
    """Inputs that may be numbers of Python's: settings of an optimizer, and what has no shape."""
    for item, node in zip(step.inputs, step.nodes, strict=False):
        value = node.meta.get("val")
        is_single = isinstance(value, torch.Tensor) and not value.dim()
        if item.role is Role.HYPERPARAMETER or (item.role is Role.BATCH and is_single):
            yield item.name


def _read_apart(found: Sequence[Sequence[str]]) -> list[str]:
    """In words, which numbers are inputs on some ranks and constants on others."""
    names = dict.fromkeys(name for of_rank in found for name in of_rank)
    kinds = {
        name: ["an input" if name in of_rank else "a constant" for of_rank in found]
        for name in names
    }
    return [f"{name} is {by_rank(each)}" for name, each in kinds.items() if len(set(each)) > 1]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


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
