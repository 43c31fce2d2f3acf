"""Reserved: what torch's allocator takes from a card for a plan, beside what the plan allocates.

In: a placed step. Out: `Reserved`, from a model of torch's caching allocator, to which the plan's
allocations and frees are given in program order, op by op: what compiled code fuses away is in it,
and what it takes inside is not. The model gives addresses, the bytes of blocks in use and the bytes
asked of CUDA, on one stream. Its rules are those of `c10/cuda/CUDACachingAllocator.cpp` in torch
with its default settings (`round_size`, `get_allocation_size`, `should_split`, `get_free_block`,
`free_block`), its constants those of `c10/core/AllocatorConfig.h` in 2.13:

- sizes are rounded up to 512 bytes; up to 1 MiB a block comes from the pool of small ones;
- of the free blocks of a pool the smallest that is large enough is taken, the lowest of equal ones;
- where there is none, a segment is asked of CUDA: 2 MiB for a small block, 20 MiB for one below
  10 MiB, else its size rounded up to 2 MiB;
- what a block has too much is split off: in the small pool from 512 bytes, in the large one where
  it is more than 1 MiB;
- a freed block is joined with its free neighbours in the segment; segments stay.

What is not in the model: segments given back where CUDA has no more, and settings of the user's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.placed import PlacedDataflow

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


MIN_BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_BYTES = 10 * 2**20  # from here on a segment is as large as its block
ROUND_BYTES = 2 * 2**20


@dataclass(eq=False)
class Block:
    """Bytes from `address` on, in a segment of the small or large pool, with its neighbours."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    behind: Block | None = None


class CachingAllocator:
    """Blocks in use and free; bytes now and at most."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = 0
        self.blocks: dict[int, Block] = {}  # by address
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._end = 0

    def allocate(self, nbytes: int) -> int:
        """The address of a block for `nbytes`, which are more than 0."""
        nbytes = rounded(nbytes)
        block = self._best_fit(nbytes) or self._new_segment(nbytes)
        self._split(block, nbytes)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, address: int) -> None:
        """Free the block at `address`, which is in use."""
        block = self.blocks[address]
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        for first, second in ((block, block.behind), (block.before, block)):
            if first is not None and second is not None and first.is_free and second.is_free:
                block = self._joined(first, second)
        insort(self._free[block.is_small], (block.nbytes, block.address))

    def _best_fit(self, nbytes: int) -> Block | None:
        free = self._free[nbytes <= SMALL_BYTES]
        position = bisect_left(free, (nbytes, -1))
        return self.blocks[free.pop(position)[1]] if position < len(free) else None

    def _new_segment(self, nbytes: int) -> Block:
        block = Block(self._end, segment_bytes(nbytes), nbytes <= SMALL_BYTES)
        # Segments have gaps between them: blocks of two are never neighbours.
        self._end += block.nbytes + ROUND_BYTES
        self.reserved_bytes += block.nbytes
        self.blocks[block.address] = block
        return block

    def _split(self, block: Block, nbytes: int) -> None:
        rest = block.nbytes - nbytes
        if rest < MIN_BLOCK_BYTES if block.is_small else rest <= SMALL_BYTES:
            return
        remaining = Block(
            block.address + nbytes, rest, block.is_small, True, before=block, behind=block.behind
        )
        if block.behind is not None:
            block.behind.before = remaining
        block.behind, block.nbytes = remaining, nbytes
        self.blocks[remaining.address] = remaining
        insort(self._free[block.is_small], (rest, remaining.address))

    def _joined(self, first: Block, second: Block) -> Block:
        """One free block of two that are neighbours."""
        for block in (first, second):
            free, entry = self._free[block.is_small], (block.nbytes, block.address)
            position = bisect_left(free, entry)
            if position < len(free) and free[position] == entry:
                free.pop(position)
        del self.blocks[second.address]
        first.nbytes += second.nbytes
        first.behind = second.behind
        if second.behind is not None:
            second.behind.before = first
        return first


def rounded(nbytes: int) -> int:
    """The size of the block for `nbytes`."""
    return max(1, -(-nbytes // MIN_BLOCK_BYTES)) * MIN_BLOCK_BYTES


def segment_bytes(nbytes: int) -> int:
    """What is asked of CUDA for a block of `nbytes`."""
    if nbytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if nbytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES
