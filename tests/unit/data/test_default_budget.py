"""The default budget: a plan made elsewhere fits the card that it is made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.machine import Tier, default_budget
from cotrain_compile.options import Options
from cotrain_compile.presets import PRESETS, find

GIB = 2**30


def test_offline_the_default_is_what_a_card_gives_that_nothing_else_uses() -> None:
    """The budget there is of what is free beside the context, less the same reserve."""
    for machine in PRESETS.values():
        total = machine.device.capacity_bytes
        free = total - default_budget.CONTEXT_BYTES
        offline = Options.parse({}).budgets(machine)[Tier.DEVICE]
        assert offline == default_budget.of_what_is_free(free, total)
        assert 0.8 * total < offline <= 0.95 * total - 0.5 * GIB


def test_what_is_asked_for_is_of_all_the_card_has() -> None:
    total = find("h100").device.capacity_bytes
    assert Options.parse({"memory_budget": "100%"}).budgets(find("h100"))[Tier.DEVICE] == total


def test_an_emulated_device_has_nothing_to_reserve_for() -> None:
    machine = find("this-machine")
    assert default_budget.of_machine(machine) == machine.device.capacity_bytes


@given(st.integers(1, 200 * GIB))
def test_a_device_of_any_size_has_a_budget(nbytes: int) -> None:
    budget_bytes = default_budget.of_machine(find(f"rtx4090 device-memory={nbytes}"))
    assert nbytes // 2 <= budget_bytes <= nbytes
