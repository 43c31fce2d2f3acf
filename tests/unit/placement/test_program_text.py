"""The integer program of a step of two layers, row by row, beside its formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotrain_compile.machine import HostUpdate, Link, Tier, TierSpec, two_tier
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.problem import formulate
from tests.conftest import update_golden
from tests.support.dataflows import chain
from tests.support.pages import ROOT
from tests.support.program_text import abridged, text

PAGE = ROOT / "docs" / "placement.md"
BEGIN, END = "<!-- the conservative program -->\n", "<!-- its end -->"
DEVICE_MIB, HOST_MIB = 6.0, 64.0


def two_layers() -> DecisionSpace:
    """Tensors of 1 MiB, a link of 1 MiB/ms, forwards of 1 ms and backwards of 2: numbers are plain.

    The link's latency is nothing, an update takes 4 ms of the host and reads and writes 5 MiB.
    """
    flops = 2 * 512**3 * 1e3
    machine = two_tier(
        "plain",
        TierSpec(1 << 30, bytes_per_s=1e12, flops_per_s={"float32": flops}),
        TierSpec(1 << 30, bytes_per_s=1e12, flops_per_s={"float32": flops}),
        Link(bytes_per_s=1e3 * MIB),
        Link(bytes_per_s=1e3 * MIB),
        HostUpdate(bytes_per_s=1.25e3 * MIB),
    )
    budgets = {Tier.DEVICE: int(DEVICE_MIB * MIB), Tier.HOST: int(HOST_MIB * MIB)}
    return decision_space(formulate(chain(2, width=512, batch=512), machine, budgets), 2)


@pytest.mark.parametrize("version", ["conservative", "relaxed"])
def test_the_program_of_two_layers(version: str, golden: Callable[[str, str], None]) -> None:
    relaxed = version == "relaxed"
    golden(f"program.{version}.txt", text(two_layers(), DEVICE_MIB, HOST_MIB, relaxed=relaxed))


def test_the_page_shows_the_conservative_program(request: pytest.FixtureRequest) -> None:
    shown = abridged(text(two_layers(), DEVICE_MIB, HOST_MIB, relaxed=False))
    head, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    before, end, tail = rest.partition(END)
    assert begin
    assert end
    fenced = f"\n```text\n{shown}```\n\n"
    if request.config.getoption("--update-golden"):
        update_golden(PAGE, f"{head}{BEGIN}{fenced}{END}{tail}")
        before = fenced
    assert before == fenced
