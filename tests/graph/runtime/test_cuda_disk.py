"""What rests on disk comes to a card of threads, and is cast, by way of pinned rooms."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cotrain_compile.dataflow import Buffer, Dataflow, Role
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement, Plan, Timeline, Transfer
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool
from cotrain_compile.runtime.disk.drive import Drive
from cotrain_compile.runtime.disk.state_files import file_of, rest_on_disk
from cotrain_compile.runtime.ops import Launch
from tests.support.thread_card import ThreadCard

PLENTY = 1 << 40
# More pieces than there are rooms, the last one short.
ELEMENTS = 7_500_001


def plan_of(homes: Mapping[str, Tier], *tasks: Transfer, **placed: Any) -> Plan:
    placement = Placement("by hand", homes, {}, **placed)
    return Plan("", "", {}, placement, tasks, Timeline("predicted", (), {}))


def test_a_weight_on_disk_comes_by_pinned_rooms_and_is_cast_from_there(tmp_path: Path) -> None:
    weight = torch.randn(ELEMENTS)
    expected = weight.clone()
    rest_on_disk([weight], tmp_path)
    dataflow = Dataflow("w", (), (Buffer("w", weight.nbytes, Role.PARAM, is_input=True),), ())
    card = ThreadCard()
    device = CudaDevice(card, PinnedPool(card.pin, card.unpin, lambda: PLENTY), PLENTY, {})
    device.use(Drive(str(tmp_path), dataflow, plan_of({"w": Tier.DISK}), {}))
    for _ in range(2):
        device.start_step()
        cast = device.host_cast(weight, torch.bfloat16, Launch("cast"))
        fetched = device.prefetch(weight, Launch("fetch", after=["cast"]))
        device.wait(["fetch"])
        assert torch.equal(fetched, expected)
        assert torch.equal(cast, expected.bfloat16())
        device.finish_step()
    assert not card.faults
    before = len(card.pinned)
    device.drive = None
    gc.collect()
    assert len(card.pinned) < before


def test_a_value_goes_to_disk_and_comes_back_in_every_step(tmp_path: Path) -> None:
    nbytes = 4 * ELEMENTS
    dataflow = Dataflow("v", (), (Buffer("v", nbytes, Role.TEMPORARY),), ())
    sent = Transfer("offload.v", "offload", "v", nbytes, None, None)
    card = ThreadCard()
    device = CudaDevice(card, PinnedPool(card.pin, card.unpin, lambda: PLENTY), PLENTY, {})
    plan = plan_of({}, sent, offloaded=("v",), offloaded_to_disk=("v",))
    device.use(Drive(str(tmp_path), dataflow, plan, {}))
    files = set()
    for _ in range(2):
        device.start_step()
        value = torch.randn(ELEMENTS)
        resting = device.offload(value, Launch("offload.v"))
        fetched = device.prefetch(resting, Launch("fetch.v", after=["offload.v"]))
        device.wait(["offload.v", "fetch.v"])
        assert torch.equal(fetched, value)
        files.add(file_of(resting))
        device.finish_step()
    assert len(files) == 1
    assert not card.faults
