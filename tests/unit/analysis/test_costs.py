"""Costs: the roofline by hand arithmetic, and what measured times replace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.costs import (
    KEPT_BYTES,
    CostTable,
    roofline,
    update_bytes,
    with_measured,
)
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import MEMORIES, HostUpdate, Link, Tier, TierSpec, two_tier
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from tests.support.dataflows import chain

MACHINE = two_tier(
    name="round numbers",
    device=TierSpec(10**9, 1e9, {"float32": 1e12, "bfloat16": 4e12}, launch_s=1e-6),
    host=TierSpec(10**9, 1e8, {"float32": 1e11}, launch_s=2e-6),
    h2d=Link(1e8),
    d2h=Link(1e8),
    host_update=HostUpdate(1e8),
)


def step() -> Dataflow:
    """A matmul, a view, and Adam on the weight in the ops of an unfused step."""
    ops = (
        Op("mm", "aten.mm", Phase.FORWARD, ("x", "w"), ("y",), 4 * 10**9, 3000, "float32"),
        Op("mm_low", "aten.mm", Phase.FORWARD, ("x", "w"), ("y",), 4 * 10**9, 3000, "bfloat16"),
        Op("view", "aten.view", Phase.FORWARD, ("y",), ()),
        Op("add", "aten.add", Phase.FORWARD, ("y",), ("y",), 10, 50_000),
        Op("tiny", "aten.add", Phase.FORWARD, ("y",), ("y",), 1, 8),
        Op("m_new", "aten.lerp_", Phase.OPTIMIZER, ("m", "g"), ("m",), 10, 12_000),
        Op("v_new", "aten.addcmul_", Phase.OPTIMIZER, ("v", "g"), ("v",), 10, 12_000),
        Op("root", "aten.sqrt", Phase.OPTIMIZER, ("v",), ("t",), 10, 8_000),
        Op("w_new", "aten.addcdiv_", Phase.OPTIMIZER, ("w", "m", "t"), ("w",), 10, 16_000),
    )
    buffers = tuple(
        Buffer(name, 4000, role)
        for name, role in {
            "x": Role.BATCH,
            "y": Role.TEMPORARY,
            "t": Role.TEMPORARY,
            "g": Role.TEMPORARY,
            "w": Role.PARAM,
            "m": Role.OPTIMIZER_STATE,
            "v": Role.OPTIMIZER_STATE,
        }.items()
    )
    group = UpdateGroup("w", "g", ("m", "v"), (), ("m_new", "v_new", "root", "w_new"))
    return Dataflow("f", ops, buffers, (group,))


def test_an_op_takes_what_limits_it() -> None:
    costs = roofline(step(), MACHINE)
    assert costs.source == "roofline"
    assert costs.device_s["mm"] == pytest.approx(4e-3)  # flops
    assert costs.device_s["mm_low"] == pytest.approx(1e-3)  # flops of another dtype
    assert costs.device_s["add"] == pytest.approx(50e-6)  # bytes
    assert costs.device_s["tiny"] == 1e-6  # launch
    assert costs.device_s["view"] == 0.0


def test_an_adam_update_moves_seven_times_the_parameter() -> None:
    """28 bytes for each float32: gradient, parameter and two moments in, the last three out."""
    dataflow = step()
    assert update_bytes(dataflow, dataflow.updates[0]) == 7 * 4000
    costs = roofline(dataflow, MACHINE)
    assert costs.seconds("w", Tier.HOST) == pytest.approx(2e-6 + 28_000 / 1e8)


def test_a_loop_takes_as_long_for_a_narrow_element_as_for_one_of_float32() -> None:
    wide = step()
    narrow = replace(
        wide,
        ops=tuple(
            replace(op, dtype="bfloat16", bytes_moved=op.bytes_moved // 2) for op in wide.ops
        ),
        buffers=tuple(replace(buffer, nbytes=buffer.nbytes // 2) for buffer in wide.buffers),
    )
    seconds = [roofline(one, MACHINE).seconds("w", Tier.HOST) for one in (wide, narrow)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_an_update_without_a_fused_loop_takes_its_time_for_each_element_of_its_ops() -> None:
    """48000 bytes are 12000 elements in float32, and twice as many in bfloat16."""
    plain = step()
    loopless = replace(plain, updates=(replace(plain.updates[0], has_loop=False),))
    rates = HostUpdate(1e8, elements_per_s=1e6, fresh_bytes_per_s=1e7)
    machine = MACHINE.but(host_update=rates)
    costs = roofline(loopless, machine)
    assert costs.seconds("w", Tier.HOST) == pytest.approx(2e-6 + 0.012)
    assert costs.device_s == roofline(plain, machine).device_s
    narrow = replace(loopless, ops=tuple(replace(op, dtype="bfloat16") for op in plain.ops))
    assert roofline(narrow, machine).seconds("w", Tier.HOST) == pytest.approx(2e-6 + 0.024)


def test_updates_that_run_as_captured_go_through_memory_that_is_made_for_them() -> None:
    """Also where there is a loop. What the C library keeps is not made anew."""
    plain, rates = step(), HostUpdate(1e8, elements_per_s=1e6, fresh_bytes_per_s=1e7)
    machine = MACHINE.but(host_update=rates)
    loop_s = roofline(plain, machine).seconds("w", Tier.HOST)
    own_s = roofline(plain, machine, captured=True).seconds("w", Tier.HOST)
    assert own_s == pytest.approx(2e-6 + 0.012 + 48_000 / 1e8)
    assert own_s > loop_s

    made = Op("made", "aten.mul", Phase.OPTIMIZER, ("g", "m"), ("large",), 0, 0)
    group = replace(plain.updates[0], ops=(*plain.updates[0].ops, "made"), has_loop=False)
    large = Buffer("large", KEPT_BYTES, Role.TEMPORARY)
    dataflow = Dataflow("f", (*plain.ops, made), (*plain.buffers, large), (group,))
    more_s = roofline(dataflow, machine).seconds("w", Tier.HOST) - own_s
    # It has another size than the parameter, so the update does not go in parts.
    assert more_s == pytest.approx(KEPT_BYTES / 1e7)


def test_a_plan_says_how_many_of_its_host_updates_have_no_fused_loop() -> None:
    dataflow = chain(2)
    first, *others = dataflow.updates
    dataflow = replace(dataflow, updates=(replace(first, has_loop=False), *others))
    problem = formulate(dataflow, MACHINE, dict.fromkeys(MEMORIES, 10**9))
    (note,) = solve(problem, SolveSettings("zero-offload")).notes
    assert note.startswith("1 of 2 updates on the host have no fused loop")
    assert solve(problem, SolveSettings("resident")).notes == ()


def test_a_low_precision_copy_made_by_the_update_counts_once() -> None:
    plain = step()
    cast = Op("cast", "aten._to_copy", Phase.OPTIMIZER, ("w",), ("w16",), 0, 6000)
    group = UpdateGroup("w", "g", ("m", "v"), (), (*plain.updates[0].ops, "cast"), "w16")
    low = Buffer("w16", 2000, Role.TEMPORARY)
    dataflow = Dataflow("f", (*plain.ops, cast), (*plain.buffers, low), (group,))
    assert update_bytes(dataflow, group) == 7 * 4000 + 2000


def test_a_device_that_fuses_updates_takes_one_loop_for_each() -> None:
    dataflow = step()
    costs = roofline(dataflow, MACHINE.but(fuses_updates=True))
    update = dataflow.updates[0]
    assert sum(costs.device_s[name] for name in update.ops) == pytest.approx(28_000 / 1e9)
    assert costs.device_s["root"] == pytest.approx(28e-6 * 8 / 48)  # shared by bytes moved
    assert costs.device_s["add"] == roofline(dataflow, MACHINE).device_s["add"]


def test_an_update_that_multiplies_matrices_is_no_loop() -> None:
    plain = step()
    product = Op("mm_w", "aten.mm", Phase.OPTIMIZER, ("g", "m"), ("t",), 10**7, 12_000)
    group = replace(plain.updates[0], ops=(*plain.updates[0].ops, "mm_w"))
    dataflow = replace(plain, ops=(*plain.ops, product), updates=(group,))
    assert roofline(dataflow, MACHINE.but(fuses_updates=True)) == roofline(dataflow, MACHINE)


def test_measured_times_replace_computed_ones_and_the_table_says_so() -> None:
    costs = roofline(step(), MACHINE)
    some = with_measured(costs, device_s={"mm": 7.0})
    assert some.source == "mixed"
    assert some.seconds("mm", Tier.DEVICE) == 7.0
    assert some.seconds("add", Tier.DEVICE) == costs.seconds("add", Tier.DEVICE)

    worked = {name: 1.0 for name, seconds in costs.device_s.items() if seconds > 0}
    assert with_measured(costs, device_s=worked).source == "mixed"  # the host update is not
    everything = with_measured(costs, device_s=worked, host_update_s={"w": 2.0})
    assert everything.source == "measured"  # though the view has no time of its own
    assert everything.seconds("w", Tier.HOST) == 2.0


def test_an_empty_profile_changes_nothing() -> None:
    costs = CostTable({"view": 0.0}, {})
    assert with_measured(costs) == costs


def test_a_profile_of_another_step_is_refused() -> None:
    costs = roofline(step(), MACHINE)
    with pytest.raises(PlanError, match="op mm_7, which this step does not have"):
        with_measured(costs, device_s={"mm_7": 1.0})
    with pytest.raises(PlanError, match="update of parameter b"):
        with_measured(costs, host_update_s={"b": 1.0})
