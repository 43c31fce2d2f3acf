"""Starts: ops of a processor that waits for each take a start of their class and their roofline."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cotrain_compile import files
from cotrain_compile.analysis.costs import fuses, roofline
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.machine import Machine, TierSpec
from cotrain_compile.machine.op_classes import IN_A_ROW, VIEW, OpKind, classes_of
from cotrain_compile.presets import PRESETS, this_machine

DEVICE = TierSpec(
    1 << 30,
    1e9,
    {"float32": 1e12},
    1e-5,
    {"softmax": 3.0, "softmax_backward": 2.0, "pointwise": 0.5},
    {"softmax": 4e-5, VIEW: 5e-6, IN_A_ROW: 3e-6},
)


def machine(device: TierSpec = DEVICE) -> Machine:
    return this_machine().but(device=device)


def step(small: bool = True) -> Dataflow:
    nbytes = 1 << 10 if small else 1 << 20
    ops = (
        Op("view", "aten.view.default", Phase.FORWARD, (), ()),
        _op("softmax", "aten._softmax.default", OpKind.NORM),
        _op("back", "aten._softmax_backward_data.default", OpKind.NORM),
        _op("relu", "aten.relu.default", OpKind.POINTWISE),
        replace(_op("mul", "aten.mul.Tensor", OpKind.POINTWISE), phase=Phase.OPTIMIZER),
    )
    buffers = (
        Buffer("p", nbytes, Role.PARAM),
        Buffer("g", nbytes, Role.TEMPORARY),
    )
    return Dataflow(
        fingerprint="", buffers=buffers, ops=ops, updates=(UpdateGroup("p", "g", (), (), ("mul",)),)
    )


def _op(name: str, target: str, kind: OpKind) -> Op:
    return Op(name, target, Phase.FORWARD, ("g",), ("p",), bytes_moved=10**6, kind=kind)


def test_an_op_takes_its_start_and_its_roofline() -> None:
    seconds = roofline(step(), machine()).device_s
    assert seconds["view"] == 5e-6
    assert seconds["softmax"] == pytest.approx(4e-5 + 3 * 1e-3)
    assert seconds["back"] == pytest.approx(4e-5 + 2 * 1e-3)  # its start is that of the forward
    assert seconds["relu"] == pytest.approx(1e-5 + 0.5 * 1e-3)  # the least that any op takes
    assert seconds["mul"] == pytest.approx(3e-6 + 0.5 * 1e-3)


def test_an_update_of_a_large_parameter_is_in_no_row() -> None:
    seconds = roofline(step(small=False), machine()).device_s
    assert seconds["mul"] == pytest.approx(1e-5 + 0.5 * 1e-3)


def test_compiled_code_has_no_starts() -> None:
    seconds = roofline(step(), machine(), compiled=True).device_s
    assert seconds["view"] == 0
    assert seconds["softmax"] == pytest.approx(3 * 1e-3)
    assert not fuses(machine(), compiled=True)  # nobody has measured what is fused


def test_without_starts_the_least_of_an_op_is_part_of_it() -> None:
    seconds = roofline(step(), machine(replace(DEVICE, starts_s={}))).device_s
    assert seconds["view"] == 0
    assert seconds["softmax"] == pytest.approx(3 * 1e-3)


def test_no_preset_has_a_constant_of_a_finer_class() -> None:
    for each in PRESETS.values():
        assert not each.device.starts_s
        assert not {"random", "softmax", "norm", "pointwise", "view"} & each.device.factors.keys()


def test_the_finest_class_comes_first() -> None:
    assert classes_of(
        OpKind.CONVOLUTION, "aten.convolution_backward.default", "bfloat16", computes=True
    ) == (
        "convolution_backward:bfloat16",
        "convolution:bfloat16",
        "convolution_backward",
        "convolution",
    )
    assert classes_of(
        OpKind.MASKED_ATTENTION, "aten.some_attention.default", "float32", computes=True
    ) == ("masked_attention", "attention")
    assert classes_of(
        OpKind.POINTWISE, "aten.native_dropout.default", "float32", computes=False
    ) == (
        "random",
        "pointwise",
        "one_by_one",
    )


@pytest.mark.parametrize("starts_s", [{"softmax": -1.0}, {"nothing": 1.0}, {"view": float("nan")}])
def test_a_start_that_no_processor_has_is_refused(starts_s: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="starts_s"):
        replace(DEVICE, starts_s=starts_s)


def test_a_file_without_starts_still_loads() -> None:
    document = files.to_json(machine())
    assert files.from_json(document, Machine) == machine()
    before = files.to_json(machine(replace(DEVICE, starts_s={})))
    old = json.loads(before)
    for processor in old["data"]["processors"].values():
        del processor["starts_s"]
    assert files.from_json(json.dumps(old), Machine).device.starts_s == {}
