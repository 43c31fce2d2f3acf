"""Memory: what the turns of a rank are compiled with, so that all stay within its budget.

In: the parts of a rank, the plan, the user's options. Out: a `StageMemory`, with the options of
each turn and of the update; and, where the plan swaps stages, the copies that come and go.

What a turn does not know of rests beside it (`TurnBudgets`): other stages of the rank, gradients
and states beside a forward, states beside a backward. Where all of it fits twice, room is left for
it; else, and where stages are swapped, everything rests on the host between two turns, and each of
them has the whole room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cotrain_compile import presets
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.dataflow import Role
from cotrain_compile.entry.compiled import inspect
from cotrain_compile.errors import DistributeError, OptionError, PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.pipelining.cut import StagePart
from cotrain_compile.pipelining.swapped import Swapped
from cotrain_compile.support.units import Size, format_bytes

# States of the optimizers that take most, Adam and its like, have so many times the parameters.
STATES_PER_PARAM = 2


@dataclass(frozen=True)
class TurnBudgets:
    """Bytes of the device for the turns of each stage, and for the update of all of them.

    `held` are on the device all the time. With `rests_on_host` nothing else is on the
    device between two turns.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update: int
    held: int
    rests_on_host: bool

    def less(self, beside: OtherStages) -> TurnBudgets:
        """What is left for turns that are not alone on the device.

        Raises `PlacementError` where nothing is.
        """
        forward, backward = (
            tuple(room - nbytes for room, nbytes in zip(rooms, others, strict=True))
            for rooms, others in (
                (self.forward, beside.forward),
                (self.backward, beside.backward),
            )
        )
        least = min(*forward, *backward)
        if least <= 0:
            most = max(*beside.forward, *beside.backward)
            raise PlacementError(
                f"what comes and goes beside a stage takes {format_bytes(most)}, which leaves "
                "nothing for the stage; cut the model into more stages, take ahead=False, or raise "
                "memory_budget",
                shortfall_bytes=1 - least,
            )
        return replace(self, forward=forward, backward=backward)


@dataclass(frozen=True)
class OtherStages:
    """Bytes of other stages on the device, beside the forwards and the backwards of each stage."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def beside_swapped(param_bytes: Sequence[int], gradient_bytes: Sequence[int]) -> OtherStages:
    """Where stages with so many bytes come ahead of their turns.

    Beside forwards are the parameters of the stage after. Backwards come in reverse: beside them
    are the parameters of the stage before, and the gradients of the stage after. The last stage
    stays for its backwards, so the one before is next already beside its forwards.
    """
    before, after = (0, *param_bytes[:-1]), param_bytes[1:]
    going = (*gradient_bytes[1:], 0)
    return OtherStages(
        (*after, before[-1]), tuple(n + gone for n, gone in zip(before, going, strict=True))
    )


def turn_budgets(
    budget: int,
    param_bytes: Sequence[int],
    held: int,
    *,
    swapped: bool = False,
    resting: int | None = None,
) -> TurnBudgets:
    """How `budget` is divided between stages with so many bytes of parameters each.

    So many bytes are `resting` beside parameters and gradients: without, states of all of them.

    `held` is what enters and leaves the stages of this rank in all micro-batches, twice, since
    torch's schedules have room for each of these and for its gradient; and the buffers of modules.

    Raises `PlacementError` where these alone take it all.
    """
    room = budget - held
    if room <= 0:
        raise PlacementError(
            f"what goes from stage to stage, and buffers of modules, take {format_bytes(held)}, "
            f"and the budget of this rank is {format_bytes(budget)}; make micro-batches fewer or "
            "smaller",
            shortfall_bytes=1 - room,
        )
    params = sum(param_bytes)
    states = STATES_PER_PARAM * params if resting is None else resting
    if swapped or 2 * (2 * params + states) > room:
        alike = (room,) * len(param_bytes)
        return TurnBudgets(alike, alike, room, held, rests_on_host=True)
    forward = tuple(room - 2 * params - states + own for own in param_bytes)
    backward = tuple(room - 2 * params - states + 2 * own for own in param_bytes)
    return TurnBudgets(forward, backward, room, held, rests_on_host=False)


class StageMemory:
    """What each turn of a rank may take. `budgets` is None where that is all that there is.

    `swaps` counts what has come to the device and gone home, where stages are swapped.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        parts: Sequence[StagePart],
        budgets: TurnBudgets | None,
        swaps: Swapped | None,
    ) -> None:
        self.budgets = budgets
        self.swaps = swaps
        self._options = options
        self._place = {id(part): place for place, part in enumerate(parts)}

    def of_forward(self, part: StagePart) -> Mapping[str, Any]:
        """Options of the forward."""
        budgets = self.budgets
        return self._of_turn(None if budgets is None else budgets.forward[self._place[id(part)]])

    def of_backward(self, part: StagePart) -> Mapping[str, Any]:
        """Options of the backward, or of the whole turn of the last stage."""
        budgets = self.budgets
        return self._of_turn(None if budgets is None else budgets.backward[self._place[id(part)]])

    def of_update(self) -> Mapping[str, Any]:
        """Options of the update of all stages."""
        budgets = self.budgets
        at_home = self.swaps is not None or (budgets is not None and budgets.rests_on_host)
        return self._within(None if budgets is None else budgets.update, at_home)

    def bring(self, part: StagePart) -> Callable[[bool], None] | None:
        """What brings the parameters of `part`; None where they are there all the time."""
        if self.swaps is None:
            return None
        swaps, number = self.swaps, self.swaps.add(part.module)
        return lambda backward: swaps.come(number, backward=backward)

    def begin(self, *, training: bool) -> None:
        """A step begins: all stages are to come in turn."""
        if self.swaps is not None:
            self.swaps.begin(training=training)

    def leave(self) -> None:
        """The stage that was swapped in goes home."""
        if self.swaps is not None:
            self.swaps.leave()

    def set_up_is_done(self) -> None:
        """Nothing is on the device after it, and what comes and goes is counted from now on."""
        if self.swaps is not None:
            self.swaps.leave()
            self.swaps.count_from_now()

    def require_whole(self, part: StagePart, functions: Sequence[Callable[..., Any]]) -> None:
        """Raise `PlacementError` where a stage that comes as a whole is more than fits."""
        if self.swaps is None:
            return
        for function in functions:
            step = inspect(function)
            dataflow, homes = step.problem.dataflow, step.plan.placement.homes
            offloaded = {b.name: b.nbytes for b in dataflow.buffers if b.role is Role.PARAM}
            missing = sum(n for name, n in offloaded.items() if homes.get(name) is Tier.HOST)
            if missing:
                beside = ", and the next one beside it" if self.swaps.ahead else ""
                raise PlacementError(
                    f"the stage that begins at {part.begins_at or 'the input'} does not fit the "
                    f"device with all of its parameters{beside}; cut the model into more stages, "
                    "or raise memory_budget",
                    shortfall_bytes=missing,
                )

    def _of_turn(self, budget: int | None) -> Mapping[str, Any]:
        budgets = self.budgets
        at_home = self.swaps is None and budgets is not None and budgets.rests_on_host
        return self._within(budget, at_home)

    def _within(self, budget: int | None, at_home: bool) -> Mapping[str, Any]:
        home = {"rests_on": "host"} if at_home else {}
        size = {} if budget is None else {"memory_budget": budget}
        return {**self._options, **home, **size}


def stage_memory(
    parts: Sequence[StagePart],
    plan: StagePlan,
    options: Mapping[str, Any],
    gathered: Iterable[torch.Tensor] = (),
) -> StageMemory:
    """What the turns of `parts` are compiled with; parameters are still those of the model, or are
    `gathered` from what these ones have.

    Raises `PlacementError` where what goes from stage to stage leaves nothing, `DistributeError`
    where parameters would have to leave a card.
    """
    trained = [[p for p in part.module.parameters() if p.requires_grad] for part in parts]
    trained_bytes = [sum(map(_nbytes, own)) for own in trained]
    budgets = _budgets(parts, plan, options, trained_bytes, _resting(gathered))
    if budgets is not None and plan.ahead:
        param_bytes = [sum(map(_nbytes, part.module.parameters())) for part in parts]
        budgets = budgets.less(beside_swapped(param_bytes, trained_bytes))
    rests = plan.swapped or (budgets is not None and budgets.rests_on_host)
    parsed = Options.parse(options)
    if rests and (parsed.device == "cuda" or any(p.is_cuda for own in trained for p in own)):
        raise DistributeError(
            "stages whose parameters rest on the host between turns run on the emulated device "
            "alone; on cards, raise memory_budget, or spread the model over more ranks"
        )
    if not plan.swapped:
        return StageMemory(options, parts, budgets, None)
    machine = presets.find(parsed.machine) if parsed.throttle else None
    return StageMemory(options, parts, budgets, Swapped(machine, ahead=plan.ahead))


def _budgets(
    parts: Sequence[StagePart],
    plan: StagePlan,
    options: Mapping[str, Any],
    param_bytes: Sequence[int],
    resting: int | None,
) -> TurnBudgets | None:
    """None where the rank may take what the device has."""
    if "memory_budget" not in options:
        return None
    size = Size.parse(options["memory_budget"])
    if size.fraction is not None:
        raise OptionError("of a pipeline, memory_budget is a size such as '20GiB', not a share")
    ends = [end for part in parts for end in (part.enters, part.leaves) if end is not None]
    crossing = plan.micro_batches * sum(end.nbytes for end in ends)
    buffers = {id(buffer): buffer for part in parts for buffer in part.module.buffers()}
    held = 2 * crossing + sum(map(_nbytes, buffers.values()))
    return turn_budgets(size.of(0), param_bytes, held, swapped=plan.swapped, resting=resting)


def _resting(gathered: Iterable[torch.Tensor]) -> int | None:
    """Bytes of parts with their gradients and states; None where nothing is in parts."""
    nbytes = sum(map(_nbytes, gathered))
    return (2 + STATES_PER_PARAM) * nbytes or None


def fit_whole(
    parts: Sequence[StagePart], plan: StagePlan, options: Mapping[str, Any], ranks: int
) -> bool:
    """Whether the stages of a rank fit the device as a whole during a step, twice, beside the parts
    that one of so many ranks has at rest."""
    trained = [sum(_nbytes(p) for p in part.module.parameters()) for part in parts]
    resting = (2 + STATES_PER_PARAM) * -(-sum(trained) // ranks)
    try:
        budgets = _budgets(parts, plan, options, trained, resting)
    except PlacementError:
        return False
    return budgets is None or not budgets.rests_on_host


def _nbytes(tensor: torch.Tensor) -> int:
    """Of what this rank has of it."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()
