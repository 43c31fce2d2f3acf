"""The model of torch's caching allocator: its rules one by one, and what holds for any program."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import resident, streamed
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.simulate.reserved import CachingAllocator, reserved, rounded
from cotrain_compile.presets import find
from tests.support.examples import examples
from tests.support.nets import clipped_step

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_a_block_comes_from_a_segment_of_its_size_class(asked: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved_bytes == segment


def test_a_large_block_keeps_a_rest_of_a_mebibyte_that_a_small_one_gives_away() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(20 * MIB)
    allocator.free(whole)
    allocator.allocate(19 * MIB)  # the rest of 1 MiB is too small to be split off
    assert allocator.allocated_bytes == allocator.reserved_bytes == 20 * MIB
    for _ in range(4096):
        allocator.allocate(1)
    assert allocator.reserved_bytes == 22 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, between, small = (allocator.allocate(n * KIB) for n in (64, 1, 32))
    allocator.allocate(1)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(20 * KIB) == small
    assert allocator.allocate(40 * KIB) == large
    assert between


def test_fragments_are_reserved_beside_what_is_allocated() -> None:
    """Every second block is freed: none of the holes is large enough for one more block."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(12 * MIB) for _ in range(8)]
    for address in blocks[::2]:
        allocator.free(address)
    allocator.allocate(14 * MIB)
    assert allocator.reserved_bytes == 8 * 12 * MIB + 14 * MIB
    assert allocator.allocated_bytes == 4 * 12 * MIB + 14 * MIB


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 40 * MIB))


@examples(60)
@given(st.lists(SIZES, max_size=40), st.randoms(use_true_random=False))
def test_blocks_never_overlap_and_frees_coalesce(sizes: list[int], choose: random.Random) -> None:
    allocator, alive = CachingAllocator(), dict[int, int]()
    for size in sizes:
        address = allocator.allocate(size)
        assert allocator.blocks[address].nbytes >= size
        alive[address] = size
        if choose.random() < 0.5:
            allocator.free(alive.popitem()[0] if choose.random() < 0.5 else _any(alive, choose))
        _check(allocator, alive)
    for address in list(alive):
        allocator.free(address)
    _check(allocator, {})
    assert allocator.allocated_bytes == 0
    # Whole segments again: the same program finds room for its largest block at least.
    before = allocator.reserved_bytes
    for size in sizes[-1:]:
        allocator.allocate(size)
    assert allocator.reserved_bytes == before


def _any(alive: dict[int, int], choose: random.Random) -> int:
    address = choose.choice(list(alive))
    del alive[address]
    return address


def _check(allocator: CachingAllocator, alive: dict[int, int]) -> None:
    """Blocks tile the segments, those in use are the given ones, no two free ones touch."""
    blocks = sorted(allocator.blocks.values(), key=lambda block: block.address)
    for one, other in pairwise(blocks):
        assert one.address + one.nbytes <= other.address
        touches = one.address + one.nbytes == other.address
        assert (one.behind is other) == touches == (other.before is one)
        assert not (touches and one.is_free and other.is_free)
    assert {block.address for block in blocks if not block.is_free} == set(alive)
    assert sum(block.nbytes for block in blocks) == allocator.reserved_bytes
    used = sum(block.nbytes for block in blocks if not block.is_free)
    assert used == allocator.allocated_bytes <= allocator.peak_allocated_bytes
    assert allocator.peak_allocated_bytes <= allocator.reserved_bytes
    assert sum(map(rounded, alive.values())) <= allocator.allocated_bytes


@pytest.mark.parametrize("place", [resident, streamed])
def test_a_plan_reserves_what_it_allocates_in_whole_segments(place: Any) -> None:
    dataflow, machine = clipped_step(4, 3 * MIB, 5 * MIB), find("a100-80")
    capacities = {Tier.DEVICE: 1 << 40, Tier.HOST: 1 << 40}
    problem = formulate(dataflow, machine, capacities)
    plan = schedule(problem, place(dataflow))
    found = reserved(place_plan(problem, plan))
    planned = plan.predicted.peak_bytes[Tier.DEVICE]
    # Buffers of whole MiB are not rounded, but a block keeps a rest of up to one.
    assert planned <= found.allocated_bytes < 1.5 * planned
    assert found.allocated_bytes <= found.reserved_bytes
    assert found.reserved_bytes % (2 * MIB) == 0
