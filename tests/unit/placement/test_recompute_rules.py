"""What other systems make again and keep on the host, by layers."""

from __future__ import annotations

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.recompute.rules import (
    LayerChoice,
    every_layer,
    every_other_layer,
    interleaved,
)
from tests.support.blocks import blocks, values
from tests.support.nets import Training


def made_again(choice: LayerChoice) -> set[str]:
    return {name.removeprefix("h_in") for name in choice.recomputed if name.startswith("h_in")}


def away(choice: LayerChoice) -> set[str]:
    return {name.removeprefix("h_in") for name in choice.away if name.startswith("h_in")}


@pytest.fixture(scope="module")
def six() -> Dataflow:
    return blocks(6)


def test_every_layer_is_made_again_but_for_what_leaves_it(six: Dataflow) -> None:
    choice = every_layer(six, values(six))
    assert choice.recomputed == {f"h_{part}{i}" for i in range(6) for part in ("in", "act")}
    assert not choice.away


def test_every_other_layer_begins_with_the_first(six: Dataflow) -> None:
    assert made_again(every_other_layer(six, values(six))) == {"0", "2", "4"}


def test_what_nothing_needs_again_is_not_made_again(six: Dataflow) -> None:
    """What may not be made again is kept, and nothing is made again for it alone."""
    allowed = values(six) - {"h_act1"}
    assert every_layer(six, allowed).recomputed & {"h_in1", "h_act1"} == {"h_in1"}


@pytest.mark.parametrize(
    ("swapped", "checkpointed", "away_blocks", "again_blocks"),
    [
        (0, 2, "", "01"),
        (2, 0, "01", ""),
        (1, 3, "0", "123"),
        (2, 2, "02", "13"),
        (2, 4, "03", "1245"),
        (3, 1, "023", "1"),
    ],
)
def test_blocks_are_swapped_between_checkpoints_and_the_last_are_kept(
    six: Dataflow, swapped: int, checkpointed: int, away_blocks: str, again_blocks: str
) -> None:
    choice = interleaved(six, values(six), swapped, checkpointed)
    assert away(choice) == set(away_blocks)
    assert made_again(choice) == set(again_blocks)
    assert choice.away.isdisjoint(choice.recomputed)


def test_each_micro_batch_keeps_its_last_blocks() -> None:
    dataflow = blocks(3, Training(micro_batches=2))
    choice = interleaved(dataflow, values(dataflow), 1, 1)
    assert away(choice) == {"0.0", "0.1"}
    assert made_again(choice) == {"1.0", "1.1"}


def test_more_blocks_than_there_are_cannot_be_chosen(six: Dataflow) -> None:
    with pytest.raises(ValueError, match=r"5 \+ 2 of 6 blocks"):
        interleaved(six, values(six), 5, 2)
