"""On disk: what of a placement rests there, and the rooms on the host that it passes through.

A state that the host updates may rest in a file, and so may the parameter itself, a frozen one, a
gradient that is kept in `.grad`, and an activation while it is offloaded. What reads it, an update,
a cast or a fetch, gets a piece into a room and works on it there; an update, or an offload, writes
it back, while other pieces are read and written: the host holds a few rooms in place of all.
Everybody who counts bytes of a plan, or carries it out, reads it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cotrain_compile.dataflow import Dataflow, Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement

# What a drive reads and writes at a time: of less, its latency is a part that can be told.
PIECE_BYTES = 1 << 22
# One is being worked on, some are read meanwhile, and some are on their way back.
ROOMS = 6
# Pieces that a drive has to do at a time: one of each of two states is read while another is
# written, and one more waits of each.
THREADS = 8
# Direct reads and writes begin and end at multiples of it, on all drives of today.
BLOCK_BYTES = 4096
# The rule that says itself what rests there; of all other placements what the host has no room for.
RESTING_RULE = "zero-infinity-nvme"
# A drive takes about as long to begin as for so much: what is smaller stays on the host.
LEAST_BYTES = 1 << 18


def whole_blocks(nbytes: int) -> int:
    """The bytes that a file takes for `nbytes`."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def may_rest_on_disk(dataflow: Dataflow, group: UpdateGroup) -> tuple[str, ...]:
    """The states of `group` that may: large ones, of which a fused loop takes piece by piece."""
    if not group.has_loop:
        return ()
    sizes = {name: dataflow.buffer[name].nbytes for name in group.states}
    return tuple(name for name, nbytes in sizes.items() if nbytes >= LEAST_BYTES)


def weight_may_rest(dataflow: Dataflow, param: str) -> bool:
    """Whether a parameter may, where it is at home on the host and updated there, or frozen.

    An update takes pieces of it beside those of its states, which are of the same size.
    """
    nbytes, group = dataflow.buffer[param].nbytes, dataflow.update.get(param)
    if nbytes < LEAST_BYTES:
        return False
    if group is None:
        return param not in dataflow.written
    states = may_rest_on_disk(dataflow, group)
    return bool(states) and all(dataflow.buffer[state].nbytes == nbytes for state in states)


def gradients_may_rest(dataflow: Dataflow, param: str) -> tuple[str, ...]:
    """What is kept in the `.grad` of a parameter and may, where that does: of the same size.

    An update that reads one takes pieces of it beside those of all else. It does not where the step
    itself has made it, a piece at a time.
    """
    if not weight_may_rest(dataflow, param):
        return ()
    nbytes, group = dataflow.buffer[param].nbytes, dataflow.update.get(param)
    return tuple(
        name
        for name in dataflow.kept_gradients.get(param, ())
        if (kept := dataflow.buffer[name]).nbytes == nbytes
        and (kept.is_input or group is None or group.gradient != name)
    )


def value_may_rest(dataflow: Dataflow, name: str) -> bool:
    """Whether the copy of an offloaded value may; of one that an update reads there is none."""
    buffer = dataflow.buffer[name]
    is_temporary = not (buffer.is_input or buffer.is_output or buffer.role is Role.PARAM)
    is_read = name in dataflow.read_by_updates
    return is_temporary and buffer.nbytes >= LEAST_BYTES and not is_read


def resting(placement: Placement, group: UpdateGroup) -> tuple[str, ...]:
    """The states of `group` that do, and the parameter, under `placement`: it writes them."""
    names = (group.param, *group.states)
    return tuple(name for name in names if placement.homes[name] is Tier.DISK)


def read_for_update(placement: Placement, group: UpdateGroup) -> tuple[str, ...]:
    """The same, and the gradient where that does, which an update only reads."""
    rests = placement.homes.get(group.gradient) is Tier.DISK
    return (*resting(placement, group), *((group.gradient,) if rests else ()))


def disk_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Bytes of the files of `placement`."""
    return sum(whole_blocks(dataflow.buffer[name].nbytes) for name in _on_disk(placement))


def room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Bytes of the host for all rooms, which are there during the whole step; 0 for none."""
    return (
        update_room_bytes(dataflow, placement)
        + read_room_bytes(dataflow, placement)
        + write_room_bytes(dataflow, placement)
    )


def update_room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Of rooms for updates, each with a piece of all that rests on disk of a parameter."""
    pieces = (
        sum(_piece_bytes(dataflow, name) for name in read_for_update(placement, group))
        for group in dataflow.updates
    )
    return ROOMS * max(pieces, default=0)


def read_room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Of rooms for casts and fetches, each with a piece of what is read."""
    states = {state for group in dataflow.updates for state in group.states}
    return _rooms(dataflow, (name for name in _on_disk(placement) if name not in states))


def write_room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Of rooms for offloads, each with a piece of a kept gradient or of an offloaded value."""
    kept = (name for name in _on_disk(placement) if dataflow.buffer[name].role is Role.GRADIENT)
    return _rooms(dataflow, (*kept, *placement.offloaded_to_disk))


def _rooms(dataflow: Dataflow, names: Iterable[str]) -> int:
    return ROOMS * max((_piece_bytes(dataflow, name) for name in names), default=0)


def _on_disk(placement: Placement) -> Iterator[str]:
    yield from (name for name, tier in placement.homes.items() if tier is Tier.DISK)
    yield from placement.offloaded_to_disk


def most_room_bytes(dataflow: Dataflow) -> int:
    """Bytes of the rooms for homes where all rests on disk that may."""
    params = (buffer.name for buffer in dataflow.buffers if buffer.role is Role.PARAM)
    weights = {name for name in params if weight_may_rest(dataflow, name)}
    groups = (
        [*may_rest_on_disk(dataflow, group), *weights.intersection([group.param])]
        for group in dataflow.updates
    )
    updated = (sum(_piece_bytes(dataflow, name) for name in names) for names in groups)
    read = (_piece_bytes(dataflow, name) for name in weights)
    return ROOMS * (max(updated, default=0) + max(read, default=0))


def _piece_bytes(dataflow: Dataflow, name: str) -> int:
    return whole_blocks(min(PIECE_BYTES, dataflow.buffer[name].nbytes))
