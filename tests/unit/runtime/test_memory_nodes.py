"""Memory nodes: where there are several, pinned memory and host work keep to the card's own."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile import presets
from cotrain_compile.machine import MEMORIES
from cotrain_compile.runtime import examine as doctor
from cotrain_compile.runtime.cuda import setup
from cotrain_compile.runtime.cuda.card import CudaCard
from cotrain_compile.runtime.process import cores as cores_module
from cotrain_compile.runtime.process.cores import (
    ANY_CORE,
    Cores,
    as_ranges,
    cores_beside,
    memory_nodes,
    node_of_card,
    run_on,
    usable_cores,
)

CARD = SimpleNamespace(
    name="NVIDIA GeForce RTX 4090",
    major=8,
    minor=9,
    total_memory=24 << 30,
    pci_domain_id=0,
    pci_bus_id=0xC1,
    pci_device_id=0,
)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /sys with one card, of which nothing is known yet."""
    monkeypatch.setattr(cores_module, "SYSTEM", tmp_path)
    (tmp_path / "bus/pci/devices/0000:c1:00.0").mkdir(parents=True)
    return tmp_path


def make_node(system: Path, number: int, cpulist: str) -> None:
    folder = system / f"devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpulist}\n")


def put_card(system: Path, node: int) -> None:
    (system / "bus/pci/devices/0000:c1:00.0/numa_node").write_text(f"{node}\n")


def two_nodes(system: Path) -> int:
    """The card's node has the last core that there is, the other one the rest; that core."""
    last = max(usable_cores())
    make_node(system, 0, as_ranges(frozenset(range(last)) or frozenset([last + 1])))
    make_node(system, 1, str(last))
    put_card(system, 1)
    return last


def test_the_cores_beside_a_card_are_those_of_its_node(system: Path) -> None:
    make_node(system, 0, "0-3,8-11")
    make_node(system, 1, "4-7,12-15")
    make_node(system, 2, "")  # memory alone, as a card's own on a GH200
    assert {n: as_ranges(c) for n, c in memory_nodes().items()} == {0: "0-3, 8-11", 1: "4-7, 12-15"}
    assert node_of_card(CARD) is None
    put_card(system, 1)
    assert node_of_card(CARD) == 1
    put_card(system, 0)
    own = cores_beside(CARD)
    assert own.numbers == usable_cores() & {*range(4), *range(8, 12)}
    assert own.threads == min(len(own.numbers), torch.get_num_threads())


def test_nothing_is_bound_on_one_node_or_where_the_card_is_on_none(system: Path) -> None:
    assert cores_beside(CARD) == ANY_CORE  # no node is told of
    make_node(system, 0, "0-1023")
    put_card(system, 0)
    assert cores_beside(CARD) == ANY_CORE
    make_node(system, 1, "1024-1025")  # which this process may not use
    for node in (-1, 1, 7):
        put_card(system, node)
        assert cores_beside(CARD) == ANY_CORE
    assert cores_beside(SimpleNamespace(name="of a torch that does not tell")) == ANY_CORE


def test_pinned_memory_is_first_touched_on_the_cards_node(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = two_nodes(system)
    registered: list[Any] = []

    def register(*of: int) -> int:
        registered.append(of)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register)
    for name, stand_in in (
        ("current_stream", lambda device: None),
        ("get_device_properties", lambda device: CARD),
        ("device", lambda device: nullcontext()),
        ("cudart", lambda: cudart),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    touched_on: list[tuple[set[int], int]] = []

    class Row:
        nbytes = 64

        def zero_(self) -> None:
            touched_on.append((os.sched_getaffinity(0), torch.get_num_threads()))

        def data_ptr(self) -> int:
            return 4096

    before = os.sched_getaffinity(0), torch.get_num_threads()
    row: Any = Row()
    CudaCard(torch.device("cuda", 0)).pin(row)
    assert touched_on == [({near}, 1)]
    assert [of[:2] for of in registered] == [(4096, 64)]
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_host_work_keeps_to_the_cards_node_where_the_user_names_no_cores(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = two_nodes(system)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: CARD)
    kept_to: list[Cores] = []
    monkeypatch.setattr(
        setup, "CudaDevice", lambda *_, host_cores, **__: kept_to.append(host_cores)
    )
    named = Cores.one_thread_each([0])
    for host_cores in (ANY_CORE, named):
        setup.cuda_device(
            torch.device("cuda", 0),
            presets.find("rtx4090"),
            dict.fromkeys(MEMORIES, 1 << 30),
            {},
            {},
            host_cores=host_cores,
            timed=False,
        )
    assert kept_to == [Cores(frozenset([near]), 1), named]


def test_what_fails_on_other_cores_fails_here() -> None:
    core = Cores.one_thread_each([max(usable_cores())])
    with pytest.raises(ZeroDivisionError):
        run_on(core, lambda: 1 // 0)


def test_doctor_tells_the_nodes_and_what_is_used_of_them(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = two_nodes(system)
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 1),
        ("get_device_properties", lambda device: CARD),
        ("mem_get_info", lambda device: (20 << 30, 24 << 30)),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    found = {one.topic: one for one in doctor.examine()}
    assert f"on 2 memory nodes (NUMA; node 0: {as_ranges(memory_nodes()[0])}; node 1: {near})" in (
        found["cores"].found
    )
    assert found["card 0"].found.endswith("on node 1")
    assert f"pinned memory and updates on the host keep to cores {near} on its node, with 1" in (
        found["card 0"].used
    )


@given(st.frozensets(st.integers(0, 64)))
def test_core_numbers_are_written_as_they_are_read(cores: frozenset[int]) -> None:
    assert cores_module._numbers(as_ranges(cores)) == cores
