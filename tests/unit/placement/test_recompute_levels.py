"""What is worth making again: closures against brute force, regions, and levels of small steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.placement.recompute.closure import (
    DEAREST,
    ForwardStretch,
    Need,
    at_price,
    closures,
)
from cotrain_compile.placement.recompute.levels import MOST_LEVELS, Level, find_levels
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.regions import Value, inside, regions_of, stretches
from tests.support.blocks import blocks, in_modules, values
from tests.support.nets import MIB, Layer, Training, perceptron, recurrent, residual_conv, step_of

PRICES = (1e-12, 3e-11, 1e-10, 3e-10, 1e-9, 3e-9, DEAREST)


# Closures.


def random_stretch(rng: random.Random) -> ForwardStretch:
    """Up to 9 ops with bypasses; some values the backward reads, and some come from outside."""
    count = rng.randint(1, 9)
    is_read = [rng.random() < 0.6 for _ in range(count)]
    nbytes = [rng.randint(1, 9) * 1000 for _ in range(count)]
    readers: dict[int, list[int]] = {}
    for op in range(count):
        for source in {op - 1, *rng.sample(range(-2, op + 1), k=rng.randint(0, 2))} - {op}:
            readers.setdefault(source, []).append(op)
    return ForwardStretch(
        gains=tuple(n if read else 0 for n, read in zip(nbytes, is_read, strict=True)),
        seconds=tuple(rng.choice((0.0, 1.0, 2.0, 5.0, 9.0)) * 1e-6 for _ in range(count)),
        needs=tuple(
            Need(nbytes[source], tuple(ops), source if source >= 0 else None)
            for source, ops in readers.items()
            if source < 0 or not is_read[source]
        ),
    )


def objective(stretch: ForwardStretch, again: frozenset[int], price: float) -> float:
    return stretch.spent_s(again) - price * stretch.saved_bytes(again)


def subsets(count: int) -> Iterator[frozenset[int]]:
    for size in range(count + 1):
        yield from map(frozenset, combinations(range(count), size))


@pytest.mark.parametrize("seed", range(40))
def test_what_runs_again_at_a_price_is_the_best_of_all_subsets(seed: int) -> None:
    stretch = random_stretch(random.Random(seed))
    every = list(subsets(len(stretch.gains)))
    for price in PRICES:
        best = min(objective(stretch, again, price) for again in every)
        found = objective(stretch, at_price(stretch, price), price)
        # Seconds count as whole bytes at the price.
        assert found <= best + price * len(stretch.gains)


@pytest.mark.parametrize("seed", range(40))
def test_closures_are_nested_and_all_that_any_price_finds(seed: int) -> None:
    stretch = random_stretch(random.Random(seed))
    found = [frozenset[int](), *closures(stretch)]
    assert all(less < more for less, more in pairwise(found))
    prices = [
        (stretch.spent_s(more) - stretch.spent_s(less))
        / (stretch.saved_bytes(more) - stretch.saved_bytes(less))
        for less, more in pairwise(found)
    ]
    assert all(less <= more + 1e-18 for less, more in pairwise(prices))
    for price in PRICES:
        reached = min(objective(stretch, again, price) for again in found)
        best = objective(stretch, at_price(stretch, price), price)
        assert reached <= best + price * len(stretch.gains)


def test_a_value_is_kept_for_an_op_where_that_saves_more() -> None:
    """The op's input, which the backward does not read, is a tenth of what the op makes."""
    kept = ForwardStretch((1000,), (1e-9,), (Need(100, (0,)),))
    assert closures(kept) == [frozenset({0})]
    assert kept.saved_bytes({0}) == 900
    too_large = ForwardStretch((1000,), (1e-9,), (Need(1001, (0,)),))
    assert closures(too_large) == []


def test_an_input_is_kept_until_making_it_again_costs_less() -> None:
    stretch = ForwardStretch((0, 1000), (1e-6, 1e-9), (Need(100, (1,), 0),))
    assert closures(stretch) == [frozenset({1}), frozenset({0, 1})]


# Regions.


def seconds_of(dataflow: Dataflow) -> dict[str, float]:
    return {op.name: 1e-12 * op.flops + 1e-12 * op.bytes_moved for op in dataflow.ops}


def test_a_numbered_module_is_a_region() -> None:
    dataflow = blocks(3)
    regions = regions_of(dataflow, values(dataflow))
    assert [region.name for region in regions] == [f"model.blocks.{i}" for i in range(3)]
    free = inside(dataflow, regions, values(dataflow))
    assert free[1] == {"h_in1", "h_act1"}  # h_out1 is what the next block reads


def test_each_micro_batch_has_regions_of_its_own() -> None:
    dataflow = blocks(2, Training(micro_batches=2))
    regions = regions_of(dataflow, values(dataflow))
    assert [region.name for region in regions] == ["model.blocks.0", "model.blocks.1"] * 2
    found = find_levels(dataflow, seconds_of(dataflow), values(dataflow))
    first, _, second, _ = found.regions
    assert {n.removesuffix(".0") for n in first.levels[0].recomputed} == {
        n.removesuffix(".1") for n in second.levels[0].recomputed
    }


def test_modules_around_a_whole_model_are_looked_into() -> None:
    dataflow = blocks(3)
    wrapped = {op.name: f"0.{op.module}" for op in dataflow.ops if op.module}
    dataflow = in_modules(dataflow, wrapped)
    names = [region.name for region in regions_of(dataflow, values(dataflow))]
    assert names == [f"0.model.blocks.{i}" for i in range(3)]


def test_what_leads_to_a_module_is_of_its_region() -> None:
    """As in a U-Net: a module of one op makes a value larger, and no module joins it to another."""
    net = [
        Layer("a", ("x",)),
        Layer("b", ("a",)),
        Layer("up", ("b",)),
        Layer("cat", ("up", "a")),
        Layer("c", ("cat",)),
        Layer("d", ("c",)),
        Layer("head", ("d",)),
    ]
    modules = {"f_a": "down.0.0", "f_b": "down.0.1", "f_up": "up.0"}
    modules |= {"f_c": "join.0.0", "f_d": "join.0.1"}
    dataflow = in_modules(step_of("U", net), modules)
    regions = regions_of(dataflow, values(dataflow))
    assert [region.name for region in regions] == ["down.0", "join.0"]
    ops = [[dataflow.ops[at].name for at in region.ops] for region in regions]
    assert ops == [["f_a", "f_b"], ["f_up", "f_cat", "f_c", "f_d"]]
    assert inside(dataflow, regions, values(dataflow))[1] == {"h_up", "h_cat", "h_c"}


def test_modules_of_one_op_are_no_regions() -> None:
    """As in one long Sequential: every value would leave its region."""
    dataflow = step_of("sequential", perceptron(32, MIB, MIB))
    modules = {f"f_l{i}": f"{i}" for i in range(32)}
    dataflow = in_modules(dataflow, modules)
    regions = regions_of(dataflow, values(dataflow))
    assert max(len(region.ops) for region in regions) > 1
    assert find_levels(dataflow, seconds_of(dataflow), values(dataflow)).uniform


@pytest.mark.parametrize("net", [residual_conv(12, MIB >> 10, MIB), recurrent(30, MIB, MIB)])
def test_without_modules_the_forward_is_cut_where_it_is_narrow(net: list[Layer]) -> None:
    dataflow = step_of("plain", net)
    regions = regions_of(dataflow, values(dataflow))
    forward = [i for i, op in enumerate(dataflow.ops) if op.phase is Phase.FORWARD]
    assert [position for region in regions for position in region.ops] == forward
    assert 4 <= len(regions) <= 32
    assert find_levels(dataflow, seconds_of(dataflow), values(dataflow)).uniform


def test_a_chain_is_cut_as_by_its_square_root() -> None:
    """What is kept at the cuts and what one stretch makes are then the least together."""
    chain = [Value(op, op + 1, 1) for op in range(36)]
    assert [len(stretch) for stretch in stretches([1] * 36, chain[:-1])] == [6] * 6


def test_a_cut_spares_what_many_bytes_cross() -> None:
    """Every fourth value is narrow."""
    nbytes = [100, 100, 100, 1] * 6
    chain = [Value(op, op + 1, size) for op, size in enumerate(nbytes)]
    found = stretches(nbytes, chain[:-1])
    assert all(stretch.stop % 4 == 0 for stretch in found)
    assert len(found) == 6


def test_a_cut_is_between_equal_layers() -> None:
    dataflow = in_modules(blocks(12), {})
    regions = regions_of(dataflow, values(dataflow))
    assert [len(region.ops) for region in regions[:-1]] == [3] * (len(regions) - 1)
    assert all(dataflow.ops[region.ops[0]].name.startswith("f_in") for region in regions)


# What may be made again.


@pytest.mark.parametrize(
    ("target", "may"),
    [
        ("aten.mul.Tensor", True),
        ("aten.sigmoid.default", True),
        ("prims.convert_element_type.default", True),
        ("aten.topk.default", False),
        ("aten.max_pool2d_with_indices.default", False),
        ("aten.adaptive_max_pool2d.default", False),
        ("mylib.mul.default", False),
    ],
)
def test_an_op_that_decides_or_is_not_torchs_is_not_run_again(target: str, may: bool) -> None:
    dataflow = blocks(2)
    ops = (
        replace(op, target=target if op.name == "f_act0" else "aten.mul.Tensor")
        for op in dataflow.ops
    )
    found = recomputable(replace(dataflow, ops=tuple(ops)))
    assert ("h_act0" in found) is may
    assert "h_in0" in found


# Levels.


def test_cheap_ops_are_made_again_before_expensive_ones() -> None:
    dataflow = blocks(3)
    found = find_levels(dataflow, seconds_of(dataflow), values(dataflow))
    cheap, all_of_it = found.regions[1].levels
    assert cheap.recomputed == {"h_act1"}
    assert all_of_it.recomputed == {"h_in1", "h_act1"}
    assert (cheap.saved_bytes, all_of_it.saved_bytes) == (4 * MIB, 8 * MIB)
    assert all_of_it.seconds == seconds_of(dataflow)["f_in1"] + seconds_of(dataflow)["f_act1"]
    for of_step, which in ((found.uniform[0], 0), (found.uniform[-1], -1)):
        parts = [region.levels[which] for region in found.regions]
        assert of_step.recomputed == frozenset().union(*(part.recomputed for part in parts))
        assert of_step.saved_bytes == sum(part.saved_bytes for part in parts)


def test_equal_layers_have_equal_levels_also_where_times_are_measured() -> None:
    dataflow, rng = blocks(6), random.Random(0)
    measured = {name: s * rng.uniform(0.8, 1.2) for name, s in seconds_of(dataflow).items()}
    found = find_levels(dataflow, measured, values(dataflow))
    for number, region in enumerate(found.regions):
        for level, of_first in zip(region.levels, found.regions[0].levels, strict=True):
            assert level.recomputed == {f"{n[:-1]}{number}" for n in of_first.recomputed}
            assert level.saved_bytes == of_first.saved_bytes
            own = (measured[f"f_{n.removeprefix('h_')}"] for n in level.recomputed)
            assert level.seconds == pytest.approx(sum(own))


def dearer_and_dearer(count: int) -> tuple[Dataflow, dict[str, float]]:
    """A step of values h0, h1, ... that the backward reads, each dearer than the one before it."""
    buffers = [Buffer("x", MIB, Role.BATCH, is_input=True)]
    buffers += [
        Buffer(name, MIB, Role.TEMPORARY) for name in (*(f"h{i}" for i in range(count)), "g")
    ]
    forward = [
        Op(f"f{i}", "aten.mul", Phase.FORWARD, ("x",), (f"h{i}",), flops=2**i) for i in range(count)
    ]
    backward = Op("b", "aten.sum", Phase.BACKWARD, tuple(f"h{i}" for i in range(count)), ("g",))
    dataflow = Dataflow("many", (*forward, backward), tuple(buffers))
    return dataflow, {op.name: 1e-6 * op.flops for op in dataflow.ops}


def test_at_most_five_levels_are_told_of_many() -> None:
    dataflow, seconds = dearer_and_dearer(10)
    levels = find_levels(dataflow, seconds, {f"h{i}" for i in range(10)}).uniform
    assert len(levels) == MOST_LEVELS
    assert all(less.recomputed < more.recomputed for less, more in pairwise(levels))


def test_what_the_backward_reads_at_once_is_not_made_again() -> None:
    """Nothing is made between the last value and its use, for which it could give up its place."""
    dataflow, seconds = dearer_and_dearer(4)
    last = find_levels(dataflow, seconds, {f"h{i}" for i in range(4)}).uniform[-1]
    assert last.recomputed == {"h0", "h1", "h2"}


def test_a_step_with_nothing_to_make_again_has_no_levels() -> None:
    dataflow = blocks(2)
    found = find_levels(dataflow, seconds_of(dataflow), frozenset())
    assert found.uniform == ()
    assert found.regions == ()


def test_levels_are_in_no_way_random() -> None:
    dataflow = blocks(4)
    found = [find_levels(dataflow, seconds_of(dataflow), values(dataflow)) for _ in range(2)]
    assert found[0] == found[1]
    assert all(isinstance(level, Level) for level in found[0].uniform)
