"""What other systems make again and keep on the host, by layers."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from bench.plans.protrain import interleaved
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.recompute.regions import every_layer, every_other_layer
from tests.support.blocks import blocks, values
from tests.support.nets import Training


def layers_of(names: Collection[str]) -> set[str]:
    return {name.removeprefix("h_in") for name in names if name.startswith("h_in")}


@pytest.fixture(scope="module")
def six() -> Dataflow:
    return blocks(6)


def test_every_layer_is_made_again_but_for_what_leaves_it(six: Dataflow) -> None:
    chosen = every_layer(six, values(six))
    assert chosen == {f"h_{part}{i}" for i in range(6) for part in ("in", "act")}


def test_every_other_layer_begins_with_the_first(six: Dataflow) -> None:
    assert layers_of(every_other_layer(six, values(six))) == {"0", "2", "4"}


def test_what_nothing_needs_again_is_not_made_again(six: Dataflow) -> None:
    """What may not be made again is kept, and nothing is made again for it alone."""
    allowed = values(six) - {"h_act1"}
    assert every_layer(six, allowed) & {"h_in1", "h_act1"} == {"h_in1"}


@pytest.mark.parametrize(
    ("swapped", "checkpointed", "offloaded_blocks", "again_blocks"),
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
    six: Dataflow, swapped: int, checkpointed: int, offloaded_blocks: str, again_blocks: str
) -> None:
    choice = interleaved(six, values(six), swapped, checkpointed)
    assert layers_of(choice.offloaded) == set(offloaded_blocks)
    assert layers_of(choice.recomputed) == set(again_blocks)
    assert choice.offloaded.isdisjoint(choice.recomputed)


def test_each_micro_batch_keeps_its_last_blocks() -> None:
    dataflow = blocks(3, Training(micro_batches=2))
    choice = interleaved(dataflow, values(dataflow), 1, 1)
    assert layers_of(choice.offloaded) == {"0.0", "0.1"}
    assert layers_of(choice.recomputed) == {"1.0", "1.1"}


def test_more_blocks_than_there_are_cannot_be_chosen(six: Dataflow) -> None:
    with pytest.raises(ValueError, match=r"5 \+ 2 of 6 blocks"):
        interleaved(six, values(six), 5, 2)
