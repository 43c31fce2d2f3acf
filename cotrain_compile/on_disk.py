"""On disk: which states of a placement rest there, and the rooms on the host they pass through.

A state that the host updates may rest in a file. Its update reads a piece into a room, works on it
there, and writes it back, while other pieces are read and written: the host holds a few rooms in
place of the states. Everybody who counts bytes of a plan, or carries it out, reads it here.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow, UpdateGroup
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


def resting(placement: Placement, group: UpdateGroup) -> tuple[str, ...]:
    """The states of `group` that do, under `placement`."""
    return tuple(name for name in group.states if placement.homes[name] is Tier.DISK)


def disk_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Bytes of the files of `placement`."""
    homes = placement.homes.items()
    resting = (dataflow.buffer[name].nbytes for name, tier in homes if tier is Tier.DISK)
    return sum(map(whole_blocks, resting))


def room_bytes(dataflow: Dataflow, placement: Placement) -> int:
    """Bytes of the host for the rooms, each with a piece of every state of a parameter; 0 for none.

    They are there during the whole step.
    """
    pieces = (piece_bytes(dataflow, placement, group) for group in dataflow.updates)
    return ROOMS * max(pieces, default=0)


def piece_bytes(dataflow: Dataflow, placement: Placement, group: UpdateGroup) -> int:
    """Bytes of the largest piece of all states of `group` that rest on disk."""
    sizes = (dataflow.buffer[name].nbytes for name in resting(placement, group))
    return sum(whole_blocks(min(PIECE_BYTES, nbytes)) for nbytes in sizes)


def most_room_bytes(dataflow: Dataflow) -> int:
    """Bytes of the rooms where all rests on disk that may."""
    pieces = (
        sum(min(PIECE_BYTES, whole_blocks(dataflow.buffer[name].nbytes)) for name in names)
        for names in (may_rest_on_disk(dataflow, group) for group in dataflow.updates)
    )
    return ROOMS * max(pieces, default=0)
