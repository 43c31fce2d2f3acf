"""Guesses: the values that hold up every update, and mostly change none of them.

In: a Dataflow. Out: for each parameter, the scalars of its update that follow from all gradients
and are neutral in most steps: the factor of a clipped norm, which is then exactly 1, and the flag
with which a loss scaler skips a step, which is then False. An update on the host may begin before
they are known (`docs/decisions/0040-speculative-updates.md`).
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow, Phase, UpdateGroup

# What cuts a factor off at 1.
_CLAMPS = frozenset({"aten.clamp.default", "aten.clamp_max.default", "aten.minimum.default"})
_CHOICE = "aten.where.self"
_FLAG_BYTES, _NUMBER_BYTES = 1, 8


def guesses_of(dataflow: Dataflow) -> dict[str, tuple[str, ...]]:
    """The scalars that each update on the host may take for neutral, of parameters that have any.

    What is computed in place, or is there before the step, is none.
    """
    late = _follows_from_backward(dataflow)
    found = {group.param: _guesses(dataflow, group, late) for group in dataflow.updates}
    return {param: names for param, names in found.items() if names}


def second_bytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    """Bytes of what an update overwrites: those of its second buffers, where it is speculative."""
    return sum(dataflow.buffer[name].nbytes for name in overwritten(dataflow, group))


def overwritten(dataflow: Dataflow, group: UpdateGroup) -> tuple[str, ...]:
    """The buffers there before an update that it writes: parameter, states, perhaps a gradient."""
    ops = (dataflow.ops[dataflow.position[name]] for name in group.ops)
    written = dict.fromkeys(name for op in ops for name in op.writes)
    return tuple(name for name in written if dataflow.buffer[name].is_input)


def _guesses(
    dataflow: Dataflow, group: UpdateGroup, late: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    ops = [dataflow.ops[dataflow.position[name]] for name in group.ops]
    written = {name for op in ops for name in op.writes}
    chosen_by = {name for op in ops if op.target == _CHOICE for name in op.reads}
    return tuple(
        name
        for name in group.scalars
        if name in late and name not in written and not dataflow.buffer[name].is_input
        if _is_clamped(dataflow, name, late[name])
        or (dataflow.buffer[name].nbytes == _FLAG_BYTES and name in chosen_by)
    )


def _is_clamped(dataflow: Dataflow, name: str, made_by: tuple[str, ...]) -> bool:
    is_number = dataflow.buffer[name].nbytes <= _NUMBER_BYTES
    return is_number and len(made_by) == 1 and made_by[0] in _CLAMPS


def _follows_from_backward(dataflow: Dataflow) -> dict[str, tuple[str, ...]]:
    """Buffers that follow from what the backward makes, with the targets of what writes them."""
    made: dict[str, tuple[str, ...]] = {}
    for op in dataflow.ops:
        if op.phase is Phase.BACKWARD or any(name in made for name in op.reads):
            for name in op.writes:
                made[name] = (*made.get(name, ()), op.target)
    return made
