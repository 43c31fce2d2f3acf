"""Widths of layers: equal to brute force, and what the amplification limit buys for WRN-101-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.branches import Item, sequence_of
from cotrain_compile.cluster.profile_files import read_profile
from cotrain_compile.cluster.profiles import (
    BATCH,
    BySamples,
    Layer,
    LayerProfile,
    Read,
    constant,
    per_sample,
)
from cotrain_compile.cluster.width_problem import WidthProblem
from cotrain_compile.cluster.widths import (
    WidthPlan,
    advise_background,
    data_parallel,
    plan_widths,
    width_curve,
)
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


def problem(*layers: Layer, limit: float = inf, network: Network = DEEPPOOL) -> WidthProblem:
    return WidthProblem(LayerProfile("net", layers), network, 8, DEVICES, limit, 0.0)


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
        return self.on.allows(item.layer, len(here))

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
        draw(st.sampled_from([1.0, 1.5, 2.0, inf])),
        draw(st.sampled_from([0.0, 0.02])),
    )


@examples(12)
@given(problems())
def test_the_plan_is_as_fast_as_the_fastest_of_all(on: WidthProblem) -> None:
    plan = plan_widths(on)
    assert plan.step_s == pytest.approx(brute_force_s(on), rel=1e-12, abs=1e-15)


def test_the_plan_of_six_measured_layers_is_the_fastest_of_all() -> None:
    """Of 4,096: six blocks of the network, of which each width has some."""
    first, *others = WRN.layers[6:12]
    first = replace(first, reads=(Read(BATCH, first.reads[0].nbytes),))
    on = WidthProblem(replace(WRN, layers=(first, *others)), DEEPPOOL, 32, DEVICES, limit=1.2)
    plan = plan_widths(on)
    assert set(plan.widths.values()) == {1, 2, 4, 8}
    assert plan.step_s == pytest.approx(brute_force_s(on), rel=1e-12)


@pytest.fixture(scope="module")
def curve() -> tuple[WidthPlan, ...]:
    return width_curve(WidthProblem(WRN, DEEPPOOL, 32, DEVICES))


def test_a_higher_limit_buys_time_with_device_seconds(curve: tuple[WidthPlan, ...]) -> None:
    assert len(curve) > 20
    for low, high in pairwise(curve):
        assert low.limit < high.limit
        assert low.step_s > high.step_s
        assert low.device_s < high.device_s


def test_without_a_limit_no_data_parallel_step_is_faster(curve: tuple[WidthPlan, ...]) -> None:
    on = WidthProblem(WRN, DEEPPOOL, 32, DEVICES)
    assert curve[-1].limit == inf
    assert all(curve[-1].step_s <= data_parallel(on, w).step_s * (1 + 1e-12) for w in on.widths)


def test_twice_the_device_seconds_of_a_layer_is_a_step_in_between() -> None:
    """DeepPool's default limit: the step is 2.9 times as fast as on one device, for 1.5 times."""
    on = WidthProblem(WRN, DEEPPOOL, 32, DEVICES, limit=2.0)
    plan, alone = plan_widths(on), data_parallel(on, 1)
    assert alone.step_s / plan.step_s == pytest.approx(2.9, abs=0.05)
    assert plan.device_s / alone.device_s == pytest.approx(1.46, abs=0.02)
    for one in WRN.layers:
        if on.layer_s(one, 1) > on.least_limited_s:
            assert on.amplification(one, plan.widths[one.name]) <= 2.0


@examples(12)
@given(problems())
def test_more_limit_or_rate_or_devices_never_make_a_step_slower(on: WidthProblem) -> None:
    step_s = plan_widths(on).step_s
    faster = replace(on.network, bytes_per_s=2 * on.network.bytes_per_s)
    for richer in (
        replace(on, limit=on.limit * 1.5),
        replace(on, network=faster, limit=inf),
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
    plan = plan_widths(problem(*layers, limit=1.0))
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
    ("batch", "limit", "devices", "told"),
    [(0, inf, 8, "has samples"), (8, 0.5, 8, "below 1"), (8, inf, 0, "has samples and devices")],
)
def test_a_problem_without_an_answer_is_refused(
    batch: int, limit: float, devices: int, told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        replace(problem(layer("a", BATCH)), batch=batch, limit=limit, devices=devices)


def test_other_work_gets_what_a_step_leaves_and_what_it_may_be_slowed_by() -> None:
    """Half of the layers on one of eight devices: seven of them are idle half of the step."""
    layers = (
        layer("wide", BATCH, seconds=per_sample(1.0)),
        layer("narrow", "wide", seconds=constant(1.0)),
    )
    on = problem(*layers, limit=1.0, network=Network(1e12))
    plan = plan_widths(on)
    assert dict(plan.widths) == {"wide": 8, "narrow": 1}
    advice = advise_background(on, plan)
    assert advice.idle_device_s == pytest.approx(7.0)
    assert advice.launch_while_step_below_s == pytest.approx(2.2)
    assert advice.most_share == pytest.approx((7.0 + 0.1 * 16) / (1.1 * 16))
    assert "at most 49% of the devices' time" in str(advice)
    with pytest.raises(OptionError, match="at least 1"):
        advise_background(on, plan, slowdown=0.9)
