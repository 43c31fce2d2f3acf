"""Sound: what a dataflow has to be, whoever made it, and what one from a file has to be besides.

What is wrong is told as a ValueError, which whoever reads a file tells with the file's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_compile.dataflow.parts import (
    MOST_BYTES,
    PERSISTENT_ROLES,
    Role,
    UpdateGroup,
    require,
)

if TYPE_CHECKING:
    from cotrain_compile.dataflow import Dataflow


def require_sound(step: Dataflow) -> None:
    """Raise ValueError where names do not fit each other, or an order is no order of a step."""
    _require_exchanges_awaited_later(step)
    require(step.ranks >= 1, f"the step is of {step.ranks} ranks")
    _require_names_of_their_own(step)
    _require_gradients_of_parameters(step)
    nbytes = sum(buffer.nbytes for buffer in step.buffers)
    require(nbytes <= MOST_BYTES, f"the buffers have {nbytes} bytes, more than there are")
    known = set(step.buffer)
    for op in step.ops:
        if not known.issuperset(op.touched):
            strange = sorted({*op.touched} - known)
            raise ValueError(f"op {op.name} touches unknown buffers {strange[:3]}")
    _require_updates_of_parameters(step, known)
    unknown = set(step.checkpoints.values) - known
    require(not unknown, f"the step's checkpoints name {sorted(unknown)[:3]}")
    _require_draws_in_order(step)
    require(len(step.update) == len(step.updates), "two updates are of one parameter")
    in_updates = [name for group in step.updates for name in group.ops]
    require(len(set(in_updates)) == len(in_updates), "two updates, or one, name an op twice")


def require_made_by_extract(step: Dataflow) -> None:
    """Raise ValueError where a sound step cannot be what `extract` has made."""
    _require_made(step)
    for group in step.updates:
        _require_read(step, group)
        places = [step.position[name] for name in group.ops]
        require(places == sorted(places), f"ops of the update of {group.param} are shuffled")


def _require_exchanges_awaited_later(step: Dataflow) -> None:
    """What an op awaits was begun by an op before it."""
    begun = set[str]()
    for op in step.ops:
        if op.collective is not None:
            begun.add(op.name)
        if op.awaits and op.awaits not in begun:
            raise ValueError(f"op {op.name} awaits {op.awaits}, which has begun no exchange")


def _require_names_of_their_own(step: Dataflow) -> None:
    require(len(step.buffer) == len(step.buffers), "two buffers share a name")
    require(len(step.position) == len(step.ops), "two ops share a name")


def _require_gradients_of_parameters(step: Dataflow) -> None:
    params = {buffer.name for buffer in step.buffers if buffer.role is Role.PARAM}
    for buffer in step.buffers:
        if buffer.param and buffer.param not in params:
            raise ValueError(f"{buffer.name} is a gradient of {buffer.param}, no parameter here")


def _require_updates_of_parameters(step: Dataflow, known: set[str]) -> None:
    """Each update names what is there: ops, a parameter, what the step keeps."""
    ops = set(step.position)
    params = {buffer.name for buffer in step.buffers if buffer.role is Role.PARAM}
    kept = {buffer.name for buffer in step.buffers if buffer.role in PERSISTENT_ROLES}
    for group in step.updates:
        unknown = {group.param, group.gradient, *group.states, *group.scalars} - known
        unknown |= {group.low_precision, *group.recasts} - known - {""}
        unknown |= set(group.ops) - ops
        require(not unknown, f"the update of {group.param} names {sorted(unknown)[:3]}")
        require(group.param in params, f"{group.param} is updated and no parameter")
        require(kept.issuperset(group.states), f"the step does not keep {group.states}")
        require(bool(group.ops), f"the update of {group.param} has no ops")


def _require_draws_in_order(step: Dataflow) -> None:
    """No op of an update, which may run elsewhere and at another time, is kept in order."""
    ordered = {Role.RNG: "draws random numbers", Role.GROUP: "exchanges with other ranks"}
    told = {b.name: ordered[b.role] for b in step.buffers if b.role in ordered}
    in_updates = ((group, name) for group in step.updates for name in group.ops)
    for group, name in in_updates if told else ():
        touched = step.ops[step.position[name]].touched
        if not told.keys().isdisjoint(touched):
            does = next(told[each] for each in touched if each in told)
            raise ValueError(f"op {name} of the update of {group.param} {does}")


def _require_made(step: Dataflow) -> None:
    """Whatever an op reads is an input of the step, or was made before."""
    made = {buffer.name for buffer in step.buffers if buffer.is_input}
    for op in step.ops:
        early = [name for name in op.reads if name not in made]
        require(
            not early,
            f"op {op.name} reads {', '.join(early[:3])}, which no op before it has made; the "
            "ops are in another order than the step's",
        )
        made.update(op.writes)


def _require_read(step: Dataflow, group: UpdateGroup) -> None:
    """The gradient of an update is another buffer than what it writes, and is read by it."""
    own = {group.param, *group.states}
    require(group.gradient not in own, f"the update of {group.param} is its own gradient")
    if not step.buffer[group.gradient].is_input:  # else by what follows from it alone
        reads = {name for op in group.ops for name in step.ops[step.position[op]].reads}
        require(
            group.gradient in reads,
            f"the update of {group.param} does not read {group.gradient}, its gradient",
        )
