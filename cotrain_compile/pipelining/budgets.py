"""Budgets: what each turn of a rank may take on the device, of what the rank may take in all.

In: the bytes that rest on the rank, and what goes from stage to stage. Out: `TurnBudgets`. What a
turn does not know of rests beside it: other stages of the rank, gradients and states beside a
forward, states beside a backward. Where all of it fits twice, room is left for it; else, and where
stages are swapped, everything rests on the host between two turns, and each of them has the whole
room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cotrain_compile.errors import PlacementError
from cotrain_compile.support.units import format_bytes

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

    def less(self, beside: Beside) -> TurnBudgets:
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
class Beside:
    """Bytes of other stages on the device, beside the forwards and the backwards of each stage."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def beside_swapped(param_bytes: Sequence[int], gradient_bytes: Sequence[int]) -> Beside:
    """Where stages with so many bytes come ahead of their turns.

    Beside forwards are the parameters of the stage after. Backwards come in reverse: beside them
    are the parameters of the stage before, and the gradients of the stage after. The last stage
    stays for its backwards, so the one before is next already beside its forwards.
    """
    before, after = (0, *param_bytes[:-1]), param_bytes[1:]
    going = (*gradient_bytes[1:], 0)
    return Beside(
        (*after, before[-1]), tuple(n + gone for n, gone in zip(before, going, strict=True))
    )


def turn_budgets(
    budget: int, param_bytes: Sequence[int], held: int, *, swapped: bool = False
) -> TurnBudgets:
    """How `budget` is divided between stages with so many bytes of parameters each.

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
    states = STATES_PER_PARAM * params
    if swapped or 2 * (2 * params + states) > room:
        alike = (room,) * len(param_bytes)
        return TurnBudgets(alike, alike, room, held, rests_on_host=True)
    forward = tuple(room - 2 * params - states + own for own in param_bytes)
    backward = tuple(room - 2 * params - states + 2 * own for own in param_bytes)
    return TurnBudgets(forward, backward, room, held, rests_on_host=False)
