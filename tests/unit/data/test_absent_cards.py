"""Which card a machine stands for when a step is traced without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile import presets
from cotrain_compile.capture.offline.absent_card import ANY_CARD, capability_of, card_for
from cotrain_compile.errors import OptionError


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("rtx4090", (8, 9)),
        ("8xh100", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA RTX A1000 6GB Laptop GPU", (8, 6)),
        ("Tesla T4", (7, 5)),
        ("T4 data sheet: 65 TFLOP/s fp16 x 0.6", (7, 5)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("gb200", (10, 0)),
        ("NVIDIA GeForce RTX 14090", None),
        ("a computer", None),
    ],
)
def test_a_card_is_known_by_a_whole_word(text: str, capability: tuple[int, int] | None) -> None:
    assert capability_of(text) == capability


def test_every_preset_stands_for_a_card() -> None:
    for name in presets.PRESETS:
        assert card_for(None, name) is not None


def test_what_a_machine_says_itself_comes_first() -> None:
    machine = presets.find("a100-80").but(name="h100", compute_capability=(8, 6))
    assert card_for(None, machine) == ((8, 6), machine.device.capacity_bytes)


def test_a_machine_with_a_card_that_nobody_knows_is_refused() -> None:
    machine = presets.find("a100-80").but(name="mine", source="measured by hand")
    machine = replace(machine, compute_capability=None)
    with pytest.raises(OptionError, match=r'add "compute_capability": \[8, 9\]'):
        card_for(None, machine)
    assert card_for("cpu", machine) is None
    assert card_for("cuda", None) == (ANY_CARD, 80 << 30)
