"""A sample of the idioms of `bench.idioms`: each is equal to eager, or refused with a way on."""

from __future__ import annotations

import pytest

from bench.idioms import all_idioms
from bench.idioms.run import Cell, cells_of, evaluate

# One of every topic, and each that has shown a fault of the package; all in a cell of their own.
IN_EVERY_RUN: dict[str, Cell] = {
    "clamp at zero": ("zero-offload", "fused", "eager"),
    "adaptive gradient clipping": ("zero-offload", "fused", "eager"),
    "gradient noise": ("streamed", "fused", "eager"),
    "cleared by hand": ("streamed", "fused", "inductor"),
    "subclass that clamps": ("streamed", "captured", "eager"),
    "truncated backpropagation": ("zero-offload", "fused", "eager"),
    "gru": ("coarse", "fused", "eager"),
    "adversarial examples": ("zero-offload", "fused", "eager"),
    "rows chosen by a mask": ("resident", "captured", "eager"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if "inductor" in cell else ())  # compiles C++
        for name, cell in IN_EVERY_RUN.items()
    ],
)
def test_an_idiom_is_equal_or_refused_with_advice_that_works(name: str) -> None:
    result = evaluate(all_idioms()[name], IN_EVERY_RUN[name])
    assert result.status in ("equal", "refused"), result.message


@pytest.mark.long
@pytest.mark.parametrize("name", all_idioms())
def test_every_idiom_in_a_cell_of_its_own(name: str) -> None:
    (cell,) = cells_of(list(all_idioms()).index(name), 1)
    result = evaluate(all_idioms()[name], cell)
    assert result.status in ("equal", "refused"), result.message


def test_there_are_four_hundred_idioms_and_each_refusal_has_a_way_on() -> None:
    idioms = all_idioms()
    assert len(idioms) >= 400
    assert all(idiom.advice for idiom in idioms.values() if idiom.instead is not None)
