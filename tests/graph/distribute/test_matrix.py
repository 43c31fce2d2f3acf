"""Models shared in every way train on several ranks as in eager, within every memory."""

from __future__ import annotations

import pytest

from tests.support.matrix_of_ranks import ALL, MEMORIES, Cell, alike, problems, sample
from tests.support.ranks import Ranks

# A GradScaler with an overflow of one rank alone, on parts of parameters, in a small budget.
FEW = [Cell("shard", "again", "adagrad", "scaled")]


def check(ranks: Ranks, cells: list[Cell]) -> None:
    for found in ranks.run(problems, cells):
        assert not {cell: wrong for cell, wrong in found.items() if wrong}


def test_a_step_is_that_of_eager_however_it_is_shared(two_ranks: Ranks) -> None:
    check(two_ranks, FEW)


@pytest.mark.long
def test_layers_that_are_split_and_sharded_train_on_a_mesh_of_two_dimensions(
    four_ranks: Ranks,
) -> None:
    """Groups of the mesh have other names on each rank, and one plan is right for all.

    In every run `test_split_and_sharded_layers_train_within_a_budget` trains on such a mesh.
    """
    check(four_ranks, [Cell("sharded tensor parallel", "budget", "adamw", "clipped")])


@pytest.mark.long
@pytest.mark.parametrize("shared", ["replicas of fully_shard", "sharded tensor parallel"])
def test_meshes_of_two_dimensions(four_ranks: Ranks, shared: str) -> None:
    check(four_ranks, [Cell(shared, memory, "adamw", "accumulated") for memory in MEMORIES])
    check(four_ranks, [Cell(shared, "again", "adam", "clipped")])


@pytest.mark.long
@pytest.mark.parametrize("cells", alike(ALL), ids=lambda cells: str(cells[0]))
def test_every_cell_on_two_ranks(two_ranks: Ranks, cells: list[Cell]) -> None:
    check(two_ranks, cells)


@pytest.mark.long
@pytest.mark.parametrize("cell", sample(60), ids=str)
def test_many_cells_on_three_ranks(three_ranks: Ranks, cell: Cell) -> None:
    check(three_ranks, [cell])
