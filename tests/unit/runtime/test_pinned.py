"""The pool of pinned memory: exact sizes, used again, and nobody writes over a copy under way."""

from __future__ import annotations

import gc
import mmap
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.errors import HostMemoryError
from cotrain_compile.runtime.cuda.pinned import PinnedPool, available_host_bytes
from cotrain_compile.support import limits


@dataclass(eq=False)
class FakeEvent:
    came: bool = False

    def query(self) -> bool:
        return self.came

    def synchronize(self) -> None:
        self.came = True


@dataclass
class Pins:
    """What has been pinned: bytes by address."""

    sizes: dict[int, int] = field(default_factory=dict)

    def __call__(self, row: torch.Tensor) -> None:
        assert row.data_ptr() not in self.sizes, "pinned twice"
        self.sizes[row.data_ptr()] = row.nbytes

    def remove(self, row: torch.Tensor) -> None:
        del self.sizes[row.data_ptr()]


def make_pool(available_bytes: int = 1 << 40) -> tuple[PinnedPool, Pins]:
    pins = Pins()
    return PinnedPool(pins, pins.remove, lambda: available_bytes), pins


def test_a_slab_is_as_large_as_asked_for() -> None:
    pool, pins = make_pool()
    row = pool.empty(3 * 2**20 + 5)
    assert row.nbytes == 3 * 2**20 + 5
    assert list(pins.sizes.values()) == [row.nbytes]
    assert pool.held_bytes == row.nbytes


def test_a_slab_is_used_again_when_every_view_of_it_is_gone() -> None:
    pool, pins = make_pool()
    row = pool.empty(4096)
    address, view = row.data_ptr(), row.view(torch.float32)[2:8]
    del row
    gc.collect()
    assert pool.empty(4096).data_ptr() != address
    assert pool.holds(view)
    del view
    assert address in {pool.empty(4096).data_ptr(), pool.empty(4096).data_ptr()}
    assert len(pins.sizes) == 2


def test_the_next_writer_learns_of_copies_that_still_read() -> None:
    pool, _ = make_pool()
    row, reads, done = pool.empty(64), FakeEvent(), FakeEvent(came=True)
    pool.note(row, done)
    pool.note(row, reads)
    del row
    assert pool.pending(pool.empty(64)) == [reads]


def test_a_tensor_keeps_its_dtype_shape_and_strides() -> None:
    pool, _ = make_pool()
    like = torch.zeros(4, 6, dtype=torch.bfloat16).t()
    made = pool.empty_like(like)
    assert (made.dtype, made.shape, made.stride()) == (like.dtype, like.shape, like.stride())
    assert made.untyped_storage().nbytes() == 48
    assert pool.empty_like(like, torch.float32).untyped_storage().nbytes() == 96


def test_nothing_needs_no_memory() -> None:
    pool, pins = make_pool()
    assert pool.empty(0).numel() == 0
    assert not pins.sizes


def test_more_than_the_computer_has_is_refused_with_both_sizes() -> None:
    pool, pins = make_pool(available_bytes=2**20)
    taken = pool.empty(2**20)
    with pytest.raises(HostMemoryError, match=r"2\.0 MiB .*on top of 1\.0 MiB.*only 1\.0 MiB"):
        pool.empty(2**21)
    assert list(pins.sizes) == [taken.data_ptr()]


def test_slabs_that_nobody_uses_make_room_for_one_of_another_size() -> None:
    pins = Pins()
    pool = PinnedPool(pins, pins.remove, lambda: 2**22 - sum(pins.sizes.values()))
    kept, gone, reads = pool.empty(2**20), pool.empty(2**21), FakeEvent()
    pool.note(gone, reads)
    del gone
    large = pool.empty(3 * 2**20)
    assert pins.sizes == {kept.data_ptr(): 2**20, large.data_ptr(): 3 * 2**20}
    assert pool.held_bytes == 2**22
    assert reads.came  # its copy was waited for before the memory went


def flags_of(address: int) -> set[str]:
    """The flags of the mapping at `address` in this process; none where nothing is mapped."""
    found: set[str] = set()
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(span[1], 16) <= address < int(span[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            found.update(line.split()[1:])
    return found


def test_a_forked_process_has_no_pinned_memory_and_the_parent_keeps_it() -> None:
    pool, _ = make_pool()
    small, large = pool.empty(64), pool.empty(2**22)
    own = torch.empty(2**22, dtype=torch.uint8)
    large.fill_(7)
    assert {"dc", "hg"} <= flags_of(large.data_ptr())
    assert "dc" in flags_of(small.data_ptr())
    reads, writes = os.pipe()
    if os.fork() == 0:
        gone = [not flags_of(row.data_ptr()) for row in (small, large, own)]
        os.write(writes, bytes(gone))
        os._exit(0)
    told = os.read(reads, 8)
    os.wait()
    os.close(reads)
    os.close(writes)
    assert list(map(bool, told)) == [True, True, False]
    assert int(large.min()) == 7


def test_a_kernel_that_takes_no_advice_is_told_of_and_the_memory_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        monkeypatch.setattr(mmap, advice, 12345)
    pool, _ = make_pool()
    with pytest.warns(UserWarning, match="pinned host memory is") as told:
        row = pool.empty(2**21)
    assert len(told) == 2
    assert int(row.fill_(3).min()) == 3


def test_this_computer_has_host_memory_left_but_not_more_than_is_installed() -> None:

    assert available_host_bytes() < limits.usable_memory_bytes()


sizes = st.sampled_from([16, 64, 4096, 5000])
actions = st.lists(st.tuples(st.sampled_from(["take", "drop", "copy", "come"]), sizes), max_size=40)


@settings(max_examples=100, deadline=None)
@given(actions)
def test_whatever_happens_no_two_tensors_share_a_slab_and_no_copy_is_forgotten(
    actions: list[tuple[str, int]],
) -> None:
    pool, pins = make_pool()
    alive: list[torch.Tensor] = []
    under_way: dict[int, list[FakeEvent]] = {}
    most: dict[int, int] = {}
    for action, size in actions:
        if action == "take":
            alive.append(pool.empty(size))
            address = alive[-1].data_ptr()
            assert address not in {other.data_ptr() for other in alive[:-1]}
            waiting = {e for e in under_way.get(address, []) if not e.came}
            assert waiting <= set(pool.pending(alive[-1]))
            count = sum(row.nbytes == size for row in alive)
            most[size] = max(most.get(size, 0), count)
        elif action == "drop" and alive:
            alive.pop(size % len(alive))
        elif action == "copy" and alive:
            event = FakeEvent()
            pool.note(alive[-1], event)
            under_way.setdefault(alive[-1].data_ptr(), []).append(event)
        elif action == "come":
            for events in under_way.values():
                events[0].came = True
    assert pool.held_bytes == sum(pins.sizes.values()) == sum(s * n for s, n in most.items())


def test_slabs_that_are_asked_for_together_are_pinned_in_one_call() -> None:
    pool, pins = make_pool()
    there = pool.empty(64)
    del there
    pool.reserve([64, 4096, 100, 100])  # of 64 there is one
    assert list(pins.sizes.values()) == [64, 4096 + 512 + 100]
    rows = [pool.empty(n) for n in (64, 100, 4096, 100)]
    for number, row in enumerate(rows):
        row.fill_(number)
    assert [int(row.max()) for row in rows] == [int(row.min()) for row in rows] == [0, 1, 2, 3]
    assert len(pins.sizes) == 2


def test_memory_that_slabs_share_is_given_back_when_nobody_uses_any_of_them() -> None:
    pool, pins = make_pool()
    pool.reserve([4096, 100])
    kept, gone = pool.empty(4096), pool.empty(100)
    del gone
    pool.release()
    assert pool.held_bytes == sum(pins.sizes.values()) == 4096 + 100
    again = pool.empty(100)
    assert len(pins.sizes) == 1
    del kept, again
    pool.release()
    assert pool.held_bytes == 0
    assert not pins.sizes
