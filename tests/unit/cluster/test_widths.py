"""Widths of layers: equal to brute force, and what they follow from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.model.profiles import (
    BATCH,
    BySamples,
    Layer,
    LayerProfile,
    Read,
    chain,
    constant,
    per_sample,
)
from cotrain_compile.cluster.sources.profile_files import read_profile
from cotrain_compile.cluster.widths.branches import Item, sequence_of
from cotrain_compile.cluster.widths.width_problem import WidthProblem
from cotrain_compile.cluster.widths.width_search import plan_widths
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network
from tests.support.examples import examples

WRN = read_profile(Path(__file__).parents[2] / "data" / "deeppool_wrn101_2_a100.json")
DEEPPOOL = Network(266e9, 40e-6)  # its planner's defaults
DEVICES = 8


def layer(name: str, *reads: str, seconds: BySamples | None = None, op: str = "conv") -> Layer:
    return Layer(
        name=name,
        op=op,
        reads=tuple(Read(source, per_sample(1.0)) for source in reads),
        forward_s=constant(0.0),
        backward_s=seconds or per_sample(1.0),
        param_bytes=0,
        grad_bytes=0,
    )


def problem(*layers: Layer, network: Network = DEEPPOOL) -> WidthProblem:
    return WidthProblem(LayerProfile("net", layers), network, 8, DEVICES)


# What a plan takes, said in another way: device by device, for given widths.


@dataclass
class Assignment:
    """The width of every layer; by join and number of a branch, whether it runs beside."""

    widths: dict[str, int]
    beside: dict[tuple[str, int], bool]


def move_s(on: WidthProblem, nbytes: float, before: range, after: range) -> float:
    if before == after:
        return 0.0
    most = 0.0
    for device in {*before, *after}:
        has = 1 / len(before) if device in before else 0.0
        wants = 1 / len(after) if device in after else 0.0
        both = min(has, wants)
        most = max(most, has - both, wants - both)
    return 2 * (most * nbytes / on.network.bytes_per_s + on.network.latency_s)


class Run:
    """Seconds and devices of one assignment; None where it may not be."""

    def __init__(self, on: WidthProblem, assignment: Assignment) -> None:
        self.on, self.assigned = on, assignment

    def of(
        self, items: tuple[Item, ...], at: tuple[str, range], first: int
    ) -> tuple[float, int, tuple[str, range]] | None:
        """Seconds, devices and where it ends, from `at`, on devices from number `first` on."""
        total_s, most = 0.0, 1
        for item in items:
            name = item.layer.name
            here = range(first, first + self.assigned.widths[name])
            led = self.led(item, at, here)
            if led is None or not self.may(item, at, here):
                return None
            total_s += led[0] + self.on.layer_s(item.layer, len(here))
            most = max(most, led[1], len(here))
            at = (name, here)
        return total_s, most, at

    def may(self, item: Item, at: tuple[str, range], here: range) -> bool:
        if item.layer.op.lower().startswith("relu") and at[0] != BATCH and item.branches == ((),):
            return at[1] == here
        return True

    def led(self, item: Item, at: tuple[str, range], here: range) -> tuple[float, int] | None:
        """Seconds and devices of all that leads to an item."""
        along_s, along, longest_s, used = 0.0, 1, 0.0, 0
        for i, branch in enumerate(item.branches):
            is_beside = self.assigned.beside.get((item.layer.name, i), False)
            first = 1000 * (i + 1) + here.start if is_beside else here.start
            run = self.of(branch, at, first)
            if run is None:
                return None
            read = next(r for r in item.layer.reads if r.source == run[2][0])
            nbytes = read.nbytes.at(self.on.batch)
            moved_s = 0.0 if read.source == BATCH else move_s(self.on, nbytes, run[2][1], here)
            devices = min(w for w in (*self.on.widths, 1000) if w >= run[1])
            if is_beside:
                longest_s, used = max(longest_s, run[0] + moved_s), used + devices
            else:
                along_s, along = along_s + run[0] + moved_s, max(along, devices)
        return max(along_s, longest_s), along + used


def brute_force_s(on: WidthProblem) -> float:
    names = [layer.name for layer in on.profile.layers]
    branches = list(all_branches(on.items))
    best = inf
    for widths in product(on.widths, repeat=len(names)):
        for beside in product((False, True), repeat=len(branches)):
            assigned = Assignment(
                dict(zip(names, widths, strict=True)), dict(zip(branches, beside, strict=True))
            )
            run = Run(on, assigned).of(on.items, (BATCH, range(0)), 0)
            if run is not None and run[1] <= on.devices:
                best = min(best, run[0])
    return best


def all_branches(items: tuple[Item, ...]) -> Iterator[tuple[str, int]]:
    for item in items:
        for i, branch in enumerate(item.branches):
            if branch:
                yield item.layer.name, i
                yield from all_branches(branch)


@st.composite
def problems(draw: st.DrawFn) -> WidthProblem:
    """Up to five layers: a chain, or a fork of up to three branches with a chain behind."""
    ms = st.integers(0, 40).map(lambda n: n / 1000)
    figures = st.lists(ms, min_size=4, max_size=4)
    layers: list[Layer] = []

    def add(*reads: str) -> str:
        name = f"l{len(layers)}"
        layers.append(
            Layer(
                name=name,
                op=draw(st.sampled_from(["conv", "conv", "relu"])),
                reads=tuple(Read(s, per_sample(draw(st.integers(0, 9)))) for s in reads),
                forward_s=BySamples((1, 2, 4, 8), tuple(draw(figures))),
                backward_s=constant(draw(ms)),
                param_bytes=0,
                grad_bytes=draw(st.integers(0, 20)),
            )
        )
        return name

    last = add(BATCH)
    if draw(st.booleans()):
        lengths = draw(st.sampled_from([(0, 1), (1, 1), (0, 2), (2, 1), (1, 1, 0)]))
        ends = []
        for length in lengths:
            end = last
            for _ in range(length):
                end = add(end)
            ends.append(end)
        last = add(*ends)
    while len(layers) < 3:
        last = add(last)
    return WidthProblem(
        LayerProfile("random", tuple(layers)),
        Network(draw(st.sampled_from([1e3, 1e4])), draw(st.sampled_from([0.0, 1e-3]))),
        8,
        DEVICES,
    )


@examples(12)
@given(problems())
def test_the_plan_is_as_fast_as_the_fastest_of_all(on: WidthProblem) -> None:
    plan = plan_widths(on)
    assert plan.step_s == pytest.approx(brute_force_s(on), rel=1e-12, abs=1e-15)


def test_the_plan_of_six_measured_layers_is_the_fastest_of_all() -> None:
    """Of 4,096: three blocks of the network that compute most, and its end, which exchanges."""
    six = (*WRN.layers[3:6], *WRN.layers[-3:])
    reads = chain([one.reads[0].nbytes for one in six], [one.name for one in six])
    layers = [replace(one, reads=read) for one, read in zip(six, reads, strict=True)]
    on = WidthProblem(LayerProfile("six", tuple(layers)), Network(10e9, 40e-6), 32, DEVICES)
    plan = plan_widths(on)
    assert set(plan.widths.values()) == {1, 8}
    assert plan.step_s == pytest.approx(brute_force_s(on), rel=1e-12)


@examples(12)
@given(problems())
def test_more_rate_or_devices_never_make_a_step_slower(on: WidthProblem) -> None:
    step_s = plan_widths(on).step_s
    faster = replace(on.network, bytes_per_s=2 * on.network.bytes_per_s)
    for richer in (
        replace(on, network=faster),
        replace(on, devices=2 * on.devices),
    ):
        assert plan_widths(richer).step_s <= step_s * (1 + 1e-12)


def test_a_heavy_side_branch_takes_devices_of_its_own_where_moving_is_cheap() -> None:
    flat = constant(1.0)  # more devices do not help it
    layers = (
        layer("in", BATCH),
        layer("main", "in", seconds=flat),
        layer("side", "in", seconds=flat),
        layer("out", "main", "side"),
    )
    fast, slow = Network(1e9), Network(1.0)
    plan = plan_widths(problem(*layers, network=fast))
    assert len(plan.beside) == 1
    assert plan.step_s == pytest.approx(1.0 + 2.0, rel=1e-6)  # not 2.0 + 2.0
    assert plan_widths(problem(*layers, network=slow)).beside == ()


def test_a_pointwise_layer_has_the_width_of_what_it_reads() -> None:
    layers = (layer("in", BATCH), layer("act", "in", seconds=constant(0.0), op="ReLU2d"))
    plan = plan_widths(problem(*layers))
    assert plan.widths["act"] == plan.widths["in"] == 8


def test_widths_share_the_batch_evenly() -> None:
    assert replace(problem(layer("a", BATCH)), batch=12, devices=7).widths == (1, 2, 4)


def test_branches_may_lie_inside_one_another() -> None:
    profile = LayerProfile(
        "nested",
        (
            layer("in", BATCH),
            layer("a", "in"),
            layer("b", "a"),
            layer("c", "a", "b"),
            layer("d", "in", "c"),
        ),
    )
    first, last = sequence_of(profile)
    assert (first.layer.name, last.layer.name) == ("in", "d")
    (a, c), skip = last.branches
    assert (a.layer.name, c.layer.name, skip) == ("a", "c", ())
    assert [len(branch) for branch in c.branches] == [1, 0]


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((layer("a", BATCH), layer("b", "a"), layer("c", "a")), "layers b, c of net are read by"),
        (
            (
                layer("a", BATCH),
                layer("b", "a"),
                layer("c", "a"),
                layer("d", "b", "c"),
                layer("e", "c"),
                layer("f", "d", "e"),
            ),
            "merge layers that read across branches",
        ),
    ],
)
def test_layers_that_are_not_nested_branches_are_refused(
    layers: tuple[Layer, ...], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        plan_widths(problem(*layers))


@pytest.mark.parametrize(
    ("batch", "devices", "told"), [(0, 8, "has samples"), (8, 0, "has samples and devices")]
)
def test_a_problem_without_an_answer_is_refused(batch: int, devices: int, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        replace(problem(layer("a", BATCH)), batch=batch, devices=devices)
