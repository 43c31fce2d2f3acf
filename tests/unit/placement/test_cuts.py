"""Cuts: which values of each layer may stay, so that its replay is in parts."""

from __future__ import annotations

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.dataflow.regions import part_name, whole_name
from cotrain_compile.placement.recompute.levels import StepLevel
from cotrain_compile.placement.search.cuts import cuts_of

LAYERS = ("a", "b")
MADE = ("first", "wide_part0", "small", "wide_part1", "last")


def step() -> Dataflow:
    """Two layers, each of which makes the same values, one of them in two parts."""
    names = [f"{layer}_{name}" for layer in LAYERS for name in MADE]
    ops = [Op(f"make.{n}", "mm", Phase.FORWARD, (), (n,), 0, 0) for n in names]
    sizes = {"small": 1}
    buffers = [Buffer(n, sizes.get(n.partition("_")[2], 1000), Role.TEMPORARY) for n in names]
    return Dataflow("step", tuple(ops), tuple(buffers))


def test_cuts_are_values_of_all_layers_from_the_last_to_the_first() -> None:
    """Parts of a value are one cut, and what is too small to tell is none."""
    level = StepLevel(
        frozenset(f"{layer}_{name}" for layer in LAYERS for name in MADE),
        saved_bytes=8002,
        seconds=0.0,
        by_region=tuple(frozenset(f"{layer}_{name}" for name in MADE) for layer in LAYERS),
    )
    cuts = cuts_of(step(), level)
    assert [sorted(cut.names) for cut in cuts] == [
        ["a_last", "b_last"],
        ["a_wide_part0", "a_wide_part1", "b_wide_part0", "b_wide_part1"],
        ["a_first", "b_first"],
    ]
    assert [cut.nbytes for cut in cuts] == [2000, 4000, 2000]
    assert [cut.at for cut in cuts] == [0, 1, 2]


def test_a_part_is_of_the_whole_that_its_name_says() -> None:
    assert whole_name(part_name("gelu_3", 12)) == "gelu_3"
    assert whole_name(part_name("layer_norm_3", 0) + ".1") == "layer_norm_3.1"
    assert whole_name("counterpart0") == "counterpart0"
