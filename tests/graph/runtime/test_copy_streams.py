"""Small copies at one place are given to their stream at once, before anything could need them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cotrain_compile.errors import StepFailed
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.course import WHOLE
from cotrain_compile.runtime.cuda.copy_streams import TOGETHER_BYTES, CopyStreams, LateCopy
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.ops import Launch
from tests.support.thread_card import ThreadCard

PLENTY = 1 << 40


class CountingCard(ThreadCard):
    """Notes how many copies each call gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def copy_all(self, stream: Any, destinations: Any, sources: Any) -> None:
        self.given.append(len(sources))
        super().copy_all(stream, destinations, sources)


@pytest.fixture
def card() -> CountingCard:
    return CountingCard()


@pytest.fixture
def device(card: CountingCard) -> CudaDevice:
    pool = PinnedPool(card.pin, card.unpin, lambda: PLENTY)
    device = CudaDevice(card, pool, PLENTY, {})
    device.start_step()
    return device


def offload(device: CudaDevice, sources: list[Tensor]) -> list[Tensor]:
    """Copies of `sources` in one run of offloads, as in a placed graph."""
    last = len(sources) - 1
    return [
        device.offload(source, Launch(f"copy.{i}", alongside=i > 0, more=i < last))
        for i, source in enumerate(sources)
    ]


def test_a_run_of_small_copies_is_one_call_with_one_event(
    device: CudaDevice, card: CountingCard
) -> None:
    sources = [torch.full((64,), float(i)) for i in range(3)]
    with mock.patch.object(card, "record", wraps=card.record) as record:
        copies = offload(device, sources)
    assert card.given == [3]
    assert record.call_count == 2  # their place and their end
    device.wait(["copy.0"])
    assert all(map(torch.equal, copies, sources))
    assert not card.faults


def test_large_copies_do_not_wait_for_each_other(device: CudaDevice, card: CountingCard) -> None:
    large = torch.zeros(TOGETHER_BYTES // 4 + 1)
    copies = offload(device, [large, large])
    assert card.given == [1, 1]
    device.wait(["copy.0", "copy.1"])
    assert len(copies) == 2


@pytest.mark.parametrize("needed_by", ["wait", "skip", "prefetch", "drain"])
def test_whoever_could_need_a_copy_finds_it_given(
    needed_by: str, device: CudaDevice, card: CountingCard
) -> None:
    source = torch.ones(64)
    (copy,) = [device.offload(source, Launch("copy", more=True))]  # the next one never comes
    assert card.given == []
    if needed_by == "wait":
        device.wait(["copy"])
    elif needed_by == "skip":
        device.skip(Launch("nothing", ("copy",)))
    elif needed_by == "prefetch":
        back = device.prefetch(copy, Launch("back", ("copy",)))
        device.wait(["back"])
        assert torch.equal(back, source)
    device.drain()
    assert card.given[0] == 1
    assert torch.equal(copy, source)
    assert not card.faults


def test_a_run_that_cannot_be_issued_fails_where_it_is_waited_for(
    device: CudaDevice, card: CountingCard
) -> None:
    with mock.patch.object(card, "copy_all", side_effect=RuntimeError("the link is down")):
        offload(device, [torch.ones(64)] * 2)
    for name in ("copy.0", "copy.1"):
        with pytest.raises(StepFailed, match="the link is down"):
            device.wait([name])


def test_homes_on_the_host_are_pinned_in_one_call(device: CudaDevice, card: CountingCard) -> None:
    values = [torch.full((n,), float(n)) for n in (10, 200, 3000)]
    before = [value.clone() for value in values]
    device.bring_home([(value, Tier.HOST) for value in values])
    assert len(card.pinned) == 1
    assert all(map(torch.equal, values, before))


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize("lines", [("begin",), ("_is_asked_again", "_ended")])
def test_a_copy_that_an_interrupt_keeps_from_its_stream_ends_all_the_same(
    device: CudaDevice, lines: Sequence[str]
) -> None:
    """Nobody would issue it: no thread has it, and what it waits for ends without a word to it."""
    may_end = threading.Event()
    device._start_work(may_end.wait, Launch("slow"), WHOLE)
    interrupts = dict.fromkeys(lines, mock.Mock(side_effect=KeyboardInterrupt))
    with mock.patch.multiple(LateCopy, **interrupts), pytest.raises(KeyboardInterrupt):
        device.offload(torch.ones(4), Launch("copy", after=("slow",)))
    may_end.set()
    device.drain()
    assert device._tasks["slow"].ran
    assert not device._tasks["copy"].ran


@pytest.mark.usefixtures("watchdog")
def test_a_copy_that_an_interrupt_comes_before_may_be_half_written(device: CudaDevice) -> None:
    with (
        mock.patch.object(CopyStreams, "issue_now", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        device.offload(torch.ones(4), Launch("copy"))
    device.drain()
    assert not device.is_busy
    assert device._tasks["copy"].broke_off
