"""A sample of the matrix of models, optimizers and idioms; `bench.matrix` runs the whole of it."""

from __future__ import annotations

import pytest

from bench.matrix import CALLS, Cell, cells, evaluate, sample
from bench.matrix_steps import ARCHITECTURES, IDIOMS, OPTIMIZERS

IN_CI = sample(4, seed=1)


def marked(cell: Cell) -> object:
    return pytest.param(cell, id=" ".join(cell), marks=() if cell in IN_CI else pytest.mark.long)


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
@pytest.mark.parametrize("cell", [marked(cell) for cell in cells()])
def test_a_cell_gives_eagers_numbers_or_a_way_to_go_on(cell: Cell) -> None:
    result = evaluate(cell)
    if result.status == "refused":
        assert "Nothing was updated." in result.message
    else:
        assert result.status == "equal", result


def test_a_sample_has_every_value_of_every_axis() -> None:
    models, optimizers, idioms = map(set, zip(*sample(40), strict=True))
    assert models == set(ARCHITECTURES)
    assert optimizers == set(OPTIMIZERS)
    assert idioms == set(IDIOMS)
    assert CALLS >= 3  # across calls, the third one updates
