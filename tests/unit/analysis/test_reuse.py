"""How long each parameter's update may take before the next step waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.reuse import reuse_distances
from cotrain_compile.dataflow import Buffer, Op, Phase, Role
from tests.support.dataflows import chain, mixed_precision_step


def test_the_first_layers_have_the_shortest_windows() -> None:
    step = chain(5)
    distances = reuse_distances(step, {op.name: 1.0 for op in step.ops})
    windows = [distances[f"w{i}"].seconds for i in range(5)]
    assert windows == sorted(windows)
    assert len(set(windows)) == 5


def test_a_window_goes_round_the_end_of_the_step() -> None:
    step = chain(3)
    seconds = {op.name: 10.0**index for index, op in enumerate(step.ops)}
    # Order: forward_0..2, loss, backward_2..0, update_0..2.
    distance = reuse_distances(step, seconds)["w1"]
    assert (distance.gradient_op, distance.next_use_op) == ("backward_1", "forward_1")
    inside = ("backward_0", "update_0", "update_2", "forward_0")
    assert distance.seconds == sum(seconds[name] for name in inside)
    assert distance.ops == len(inside)


def test_making_the_low_precision_copy_is_no_use_of_the_parameter() -> None:
    step = mixed_precision_step(2)
    distance = reuse_distances(step, {op.name: 1.0 for op in step.ops})["p32_1"]
    assert distance.next_use_op == "forward_1"


def test_a_view_of_the_parameter_is_no_use_yet() -> None:
    step = chain(1)
    view = Op("view", "aten.t", Phase.FORWARD, ("w0",), ())
    step = replace(step, ops=(view, *step.ops))
    distance = reuse_distances(step, {op.name: 1.0 for op in step.ops})["w0"]
    assert distance.next_use_op == "forward_0"


def test_the_seconds_are_never_below_zero_for_rounding() -> None:
    step = chain(1)
    seconds = {"forward_0": 0.1, "loss": 0.2, "backward_0": 0.7, "update_0": 1e-17}
    assert reuse_distances(step, seconds)["w0"].seconds == 0.0


def test_a_parameter_without_a_gradient_or_a_use_has_no_window() -> None:
    step = chain(2)
    first, second = step.updates
    spare = Buffer("spare", 4, Role.PARAM, is_input=True)
    lost = replace(
        step,
        buffers=(*step.buffers, spare),
        updates=(replace(first, gradient="x"), replace(second, param="spare")),
    )
    assert reuse_distances(lost, {op.name: 1.0 for op in step.ops}) == {}


def test_every_op_needs_its_seconds() -> None:
    with pytest.raises(KeyError, match="loss"):
        reuse_distances(chain(1), {"forward_0": 1.0})


def test_the_parameters_own_ops_are_not_in_its_window() -> None:
    step = mixed_precision_step(2)
    seconds = {op.name: 1.0 for op in step.ops}
    group = step.updates[1]
    with_cast = replace(step, updates=(replace(group, ops=("cast_p_1", *group.ops)),))
    before = reuse_distances(step, seconds)["p32_1"]
    after = reuse_distances(with_cast, seconds)["p32_1"]
    # backward_0, cast_g_0, update_0, cast_p_0, forward_0, and at first cast_p_1.
    assert (before.ops, before.seconds) == (6, 6.0)
    assert (after.ops, after.seconds) == (5, 5.0)
