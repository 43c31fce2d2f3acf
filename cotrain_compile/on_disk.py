"""On disk: what of a placement rests there, and the rooms on the host that it passes through.

A state that the host updates may rest in a file, and so may the parameter itself, and a frozen one.
What reads it, an update, a cast or a fetch, gets a piece into a room and works on it there; an
update writes it back, while other pieces are read and written: the host holds a few rooms in place
of all. Everybody who counts bytes of a plan, or carries it out, reads it here.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow, Role, UpdateGroup
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement

# What a drive reads and writes at a time: of less, its latency is a part that can be told.
PIECE_BYTES = 1 << 22
# One is being worked on, some are read meanwhile, and some are on their way back.
ROOMS = 6
# Direct reads and writes begin and end at multiples of it, on all drives of today.
BLOCK_BYTES = 4096
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
    if nbytes < LEAST_BYTES or param in dataflow.kept_gradients:
        return False
    if group is None:
        return param not in dataflow.written
    states = may_rest_on_disk(dataflow, group)
    return bool(states) and all(dataflow.buffer[state].nbytes == nbytes for state in states)


def resting(placement: Placement, group: UpdateGroup) -> tuple[str, ...]:
    """The states of `group` that do, and the parameter, under `placement`."""
    names = (group.param, *group.states)
    return tuple(name for name in names if placement.homes[name] is Tier.DISK)


def disk_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Bytes of the files of `placement`."""
    homes = placement.homes.items()
    resting = (dataflow.buffer[name].nbytes for name, tier in homes if tier is Tier.DISK)
    return sum(map(whole_blocks, resting))


def room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Bytes of the host for all rooms, which are there during the whole step; 0 for none."""
    return update_room_bytes(dataflow, placement) + read_room_bytes(dataflow, placement)


def update_room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Of rooms for updates, each with a piece of all that rests on disk of a parameter."""
    pieces = (
        sum(_piece_bytes(dataflow, name) for name in resting(placement, group))
        for group in dataflow.updates
    )
    return ROOMS * max(pieces, default=0)


def read_room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Of rooms for casts and fetches, each with a piece of a parameter."""
    homes = placement.homes.items()
    on_disk = [name for name, tier in homes if tier is Tier.DISK]
    weights = (name for name in on_disk if dataflow.buffer[name].role is Role.PARAM)
    return ROOMS * max((_piece_bytes(dataflow, name) for name in weights), default=0)


def most_room_bytes(dataflow: Dataflow) -> int:
    """Bytes of the rooms where all rests on disk that may."""
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
