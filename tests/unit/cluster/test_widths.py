"""Widths of layers: equal to brute force, and what they follow from."""

from __future__ import annotations

from dataclasses import replace
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
from cotrain_compile.cluster.widths import WidthProblem, plan_widths
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


def move_s(on: WidthProblem, nbytes: float, before: int, after: int) -> float:
    """Said in another way: device by device."""
    if before == after:
        return 0.0
    most = 0.0
    for device in range(max(before, after)):
        has = 1 / before if device < before else 0.0
        wants = 1 / after if device < after else 0.0
        both = min(has, wants)
        most = max(most, has - both, wants - both)
    return 2 * (most * nbytes / on.network.bytes_per_s + on.network.latency_s)


def brute_force_s(on: WidthProblem) -> float:
    best = inf
    for widths in product(on.widths, repeat=len(on.profile.layers)):
        total_s, before = 0.0, 0
        for layer, width in zip(on.profile.layers, widths, strict=True):
            if before:
                if layer.op.lower().startswith("relu") and width != before:
                    total_s = inf
                total_s += move_s(on, layer.reads[0].nbytes.at(on.batch), before, width)
            total_s += on.layer_s(layer, width)
            before = width
        best = min(best, total_s)
    return best


@st.composite
def problems(draw: st.DrawFn) -> WidthProblem:
    """Three to five layers in a chain."""
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
    count = draw(st.integers(3, 5))
    while len(layers) < count:
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


def test_a_pointwise_layer_has_the_width_of_what_it_reads() -> None:
    layers = (layer("in", BATCH), layer("act", "in", seconds=constant(0.0), op="ReLU2d"))
    plan = plan_widths(problem(*layers))
    assert plan.widths["act"] == plan.widths["in"] == 8


def test_widths_share_the_batch_evenly() -> None:
    assert replace(problem(layer("a", BATCH)), batch=12, devices=7).widths == (1, 2, 4)


def test_branches_are_refused() -> None:
    layers = (layer("in", BATCH), layer("main", "in"), layer("side", "in"), layer("out", "main"))
    with pytest.raises(OptionError, match=r"net has branches.*join the layers of a branch"):
        problem(*layers)


@pytest.mark.parametrize(
    ("batch", "devices", "told"), [(0, 8, "has samples"), (8, 0, "has samples and devices")]
)
def test_a_problem_without_an_answer_is_refused(batch: int, devices: int, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        replace(problem(layer("a", BATCH)), batch=batch, devices=devices)
