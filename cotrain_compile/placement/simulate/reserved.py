"""Reserved: what torch's allocator takes from a card for a plan, beside what the plan allocates.

In: a placed step. Out: `Reserved`, from the model of the allocator in
`analysis.caching_allocator`, to which the plan's allocations and frees are given in program order,
op by op: what compiled code fuses away is in it, and what it takes inside is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_compile.analysis.caching_allocator import CachingAllocator
from cotrain_compile.placement.placed import PlacedDataflow
from cotrain_compile.placement.residency import Instance

# The first step leaves segments that the second one finds; from then on little changes.
STEPS = 2


@dataclass(frozen=True)
class Reserved:
    """Bytes at the peak: of blocks in use, as the allocator rounds them, and of segments."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragment_bytes(self) -> int:
        """What is reserved and in no block at the peak: pieces that were too small for the rest."""
        return self.reserved_bytes - self.allocated_bytes


def reserved(placed: PlacedDataflow) -> Reserved:
    """What the allocator takes for `placed`, where the card has room for it."""
    held = [item for item in placed.instances if item.buffer.nbytes > 0]
    allocator = CachingAllocator()
    resting = [item for item in held if _rests(item)]
    for item in resting:
        allocator.allocate(item.buffer.nbytes)
    ids = {id(item) for item in resting}
    passing = [item for item in held if id(item) not in ids]
    for _ in range(STEPS):
        _run_step(allocator, passing, placed.program.end + 1)
    return Reserved(allocator.peak_allocated_bytes, allocator.reserved_bytes)


def _rests(item: Instance) -> bool:
    """Whether it is there before the step, the user's."""
    return item.buffer.is_input and item.first == 0 and item.current <= 0


def _run_step(allocator: CachingAllocator, passing: Iterable[Instance], slots: int) -> None:
    """Allocate and free what comes and goes in a step; what has had its last use goes first."""
    comes: dict[int, list[Instance]] = {}
    for item in passing:
        comes.setdefault(item.first, []).append(item)
    goes: dict[int, list[int]] = {}
    for slot in range(slots + 1):
        for address in goes.pop(slot, ()):
            allocator.free(address)
        for item in comes.get(slot, ()):
            address = allocator.allocate(item.buffer.nbytes)
            goes.setdefault(min(item.last, slots), []).append(address)
    for addresses in goes.values():  # what the step returned, freed before the next one
        for address in addresses:
            allocator.free(address)
