"""Which machine a card is planned for: a preset like it, else what its properties say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cotrain_compile import files
from cotrain_compile.machine import Machine
from cotrain_compile.runtime.cuda.setup import machine_like

A_CARD = SimpleNamespace(
    name="NVIDIA RTX 9999",
    total_memory=1234 << 20,
    major=8,
    minor=9,
    multi_processor_count=100,
    clock_rate=2_000_000,
    memory_clock_rate=10_000_000,
    memory_bus_width=256,
)


@pytest.mark.parametrize(
    ("card", "like"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla T4", "t4"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
        ("NVIDIA GeForce RTX 4070 SUPER", "rtx4070-super"),
        ("NVIDIA GeForce RTX 4070 Ti", "rtx4070ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070ti-super"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "rtx5070ti-laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
    ],
)
def test_a_card_gets_the_rates_of_the_preset_like_it_and_its_own_memory(
    card: str, like: str
) -> None:
    machine: Machine = machine_like(SimpleNamespace(**{**vars(A_CARD), "name": card}))
    assert machine.device.capacity_bytes == 1234 << 20
    assert f"rates of the preset {like}" in machine.source
    assert "no preset" not in machine.source


@pytest.mark.parametrize(("name", "mib"), [("rtx4060ti-8", 8188), ("rtx4060ti-16", 16380)])
def test_of_cards_with_one_name_the_one_with_as_much_memory_is_taken(name: str, mib: int) -> None:
    own = {"name": "NVIDIA GeForce RTX 4060 Ti", "total_memory": mib << 20}
    machine = machine_like(SimpleNamespace(**{**vars(A_CARD), **own}))
    assert f"rates of the preset {name};" in machine.source


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA RTX A1000 6GB Laptop GPU",
        "NVIDIA GeForce RTX 3070 Ti Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G",
        "Quadro RTX 6000",
    ],
)
def test_a_card_is_not_taken_for_one_whose_name_is_in_its_own(card: str) -> None:
    machine = machine_like(SimpleNamespace(**{**vars(A_CARD), "name": card}))
    assert "no preset; by its properties" in machine.source


def test_the_machine_of_a_card_says_its_compute_capability() -> None:
    machine = machine_like(A_CARD)
    assert machine.compute_capability == (A_CARD.major, A_CARD.minor)
    assert files.from_json(files.to_json(machine), Machine) == machine


def test_an_unknown_card_is_priced_by_its_properties_and_says_so() -> None:
    machine = machine_like(A_CARD)
    assert machine.device.flops_per_s["bfloat16"] == pytest.approx(0.6 * 1024 * 100 * 2e9)
    assert machine.device.bytes_per_s == pytest.approx(0.85 * 2 * 10e9 * 256 / 8)
    assert "no preset; by its properties (100 multiprocessors at 2.00 GHz" in machine.source
    gamer = machine_like(SimpleNamespace(**{**vars(A_CARD), "name": "NVIDIA GeForce RTX 9999"}))
    assert 2 * gamer.device.flops_per_s["bfloat16"] == machine.device.flops_per_s["bfloat16"]


def test_a_card_whose_driver_says_too_little_has_rates_that_are_called_a_guess() -> None:
    machine = machine_like(SimpleNamespace(**{**vars(A_CARD), "memory_clock_rate": 0}))
    assert machine.device.capacity_bytes == 1234 << 20
    assert "its driver says too little; rates of the preset rtx3090, which may be" in machine.source
