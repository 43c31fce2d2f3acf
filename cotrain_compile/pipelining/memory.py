"""Memory: what the turns of a rank are compiled with, so that all stay within its budget.

In: the parts of a rank, the plan, the user's options. Out: a `StageMemory`, with the options of
each turn and of the update; and, where the plan swaps stages, the copies that come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cotrain_compile import presets
from cotrain_compile.cluster.model.stage_plan import StagePlan
from cotrain_compile.dataflow import Role
from cotrain_compile.entry.compiled import inspect
from cotrain_compile.errors import DistributeError, OptionError, PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.pipelining.budgets import TurnBudgets, beside_swapped, turn_budgets
from cotrain_compile.pipelining.cut import Part
from cotrain_compile.pipelining.swapped import Swapped
from cotrain_compile.support.sizes import Size


class StageMemory:
    """What each turn of a rank may take. `budgets` is None where that is all that there is.

    `swaps` counts what has come to the device and gone home, where stages are swapped.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        parts: Sequence[Part],
        budgets: TurnBudgets | None,
        swaps: Swapped | None,
    ) -> None:
        self.budgets = budgets
        self.swaps = swaps
        self._options = options
        self._place = {id(part): place for place, part in enumerate(parts)}

    def of_forward(self, part: Part) -> Mapping[str, Any]:
        """Options of the forward."""
        budgets = self.budgets
        return self._of_turn(None if budgets is None else budgets.forward[self._place[id(part)]])

    def of_backward(self, part: Part) -> Mapping[str, Any]:
        """Options of the backward, or of the whole turn of the last stage."""
        budgets = self.budgets
        return self._of_turn(None if budgets is None else budgets.backward[self._place[id(part)]])

    def of_update(self) -> Mapping[str, Any]:
        """Options of the update of all stages."""
        budgets = self.budgets
        at_home = self.swaps is not None or (budgets is not None and budgets.rests_on_host)
        return self._within(None if budgets is None else budgets.update, at_home)

    def bring(self, part: Part) -> Callable[[bool], None] | None:
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

    def require_whole(self, part: Part, functions: Sequence[Callable[..., Any]]) -> None:
        """Raise `PlacementError` where a stage that comes as a whole is more than fits."""
        if self.swaps is None:
            return
        for function in functions:
            step = inspect(function)
            dataflow, homes = step.problem.dataflow, step.plan.placement.homes
            away = {b.name: b.nbytes for b in dataflow.buffers if b.role is Role.PARAM}
            missing = sum(n for name, n in away.items() if homes.get(name) is Tier.HOST)
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


def stage_memory(parts: Sequence[Part], plan: StagePlan, options: Mapping[str, Any]) -> StageMemory:
    """What the turns of `parts` are compiled with; parameters are still those of the model.

    Raises `PlacementError` where what goes from stage to stage leaves nothing, `DistributeError`
    where parameters would have to leave a card.
    """
    trained = [[p for p in part.module.parameters() if p.requires_grad] for part in parts]
    trained_bytes = [sum(map(_nbytes, own)) for own in trained]
    budgets = _budgets(parts, plan, options, trained_bytes)
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
    parts: Sequence[Part],
    plan: StagePlan,
    options: Mapping[str, Any],
    param_bytes: Sequence[int],
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
    return turn_budgets(size.of(0), param_bytes, held, swapped=plan.swapped)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
