"""Fusion: what a compiled step runs as one kernel, and what that moves, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis import costs
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.fusion import kernel_parts, kernels
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine import HostUpdate, Link, Machine, TierSpec, two_tier
from cotrain_compile.machine.op_classes import OpKind

NBYTES = 1000
POINTWISE, REDUCTION, TEMP = OpKind.POINTWISE, OpKind.REDUCTION, Role.TEMPORARY
SHAPE = {
    # name: kind, reads
    "mm": (OpKind.PRODUCT, ("x", "w")),
    "gelu": (OpKind.POINTWISE, ("mm",)),
    "add": (OpKind.POINTWISE, ("gelu", "x")),
    "norm": (OpKind.NORM, ("add",)),
    "mm2": (OpKind.PRODUCT, ("norm", "w")),
    "late": (OpKind.POINTWISE, ("mm2", "gelu")),
}


def step(**kinds: OpKind) -> Dataflow:
    """A layer: what follows its first product is one kernel, but for what follows the second."""
    ops = tuple(
        Op(
            name,
            f"aten.{name}",
            Phase.FORWARD,
            reads,
            (name,),
            flops=10_000 if kind is OpKind.PRODUCT else 0,
            bytes_moved=NBYTES * (len(reads) + 1),
            kind=kinds.get(name, kind),
        )
        for name, (kind, reads) in SHAPE.items()
    )
    inputs = [Buffer("x", NBYTES, Role.BATCH, is_input=True)]
    inputs += [Buffer("w", NBYTES, Role.PARAM, is_input=True, is_output=True)]
    made = [Buffer(n, NBYTES, Role.TEMPORARY, is_output=n == "late") for n in SHAPE]
    return Dataflow("f", ops, (*inputs, *made))


def machine(**factors: float) -> Machine:
    tier = TierSpec(10**9, 1e9, {"float32": 1e12}, factors=factors)
    found = two_tier("round", tier, tier, Link(1e8), Link(1e8), HostUpdate(1e8))
    return found.but(fuses_updates=True)


def test_a_kernel_ends_where_another_has_to_run_before_it_goes_on() -> None:
    assert kernels(step()) == {"gelu": "gelu", "add": "gelu", "norm": "gelu", "late": "late"}


def test_a_kernel_reads_what_others_made_once_and_writes_what_they_need() -> None:
    moved = {name: part.nbytes for name, part in kernel_parts(step()).items()}
    # gelu reads mm and is read by `late`; add reads x alone; norm writes for mm2.
    assert moved == pytest.approx({"gelu": 2000, "add": 1000, "norm": 1000, "late": 3000})


def test_a_sum_goes_over_what_its_kernel_made_once_more() -> None:
    moved = kernel_parts(step(norm=OpKind.REDUCTION))["norm"].nbytes
    assert moved == pytest.approx(2000)


def made_late(phase: Phase = Phase.FORWARD) -> Dataflow:
    """`mask` needs nothing of `mm`, and only `add` behind that reads it."""
    base = step()
    mask = Op("mask", "aten.mask", phase, ("x",), ("mask",), bytes_moved=2 * NBYTES, kind=POINTWISE)
    add = replace(base.ops[2], reads=("gelu", "mask"))
    buffers = (*base.buffers, Buffer("mask", NBYTES, Role.TEMPORARY))
    return Dataflow("f", (mask, *base.ops[:2], add, *base.ops[3:]), buffers)


def test_what_is_read_in_one_later_kernel_is_made_there() -> None:
    assert kernels(made_late())["mask"] == kernels(made_late())["add"]
    parts = kernel_parts(made_late())
    assert (parts["mask"].nbytes, parts["add"].nbytes) == (NBYTES, 0)


def test_what_another_phase_makes_is_written_and_read() -> None:
    parts = kernel_parts(made_late(Phase.BACKWARD))
    assert (parts["mask"].nbytes, parts["add"].nbytes) == (2 * NBYTES, NBYTES)


def test_a_sum_over_everything_ends_its_kernel() -> None:
    base = step()
    total = Op("sum", "aten.sum", Phase.FORWARD, ("gelu",), ("sum",), 0, NBYTES + 8, kind=REDUCTION)
    for nbytes, together in ((8, False), (NBYTES // 2, True)):
        add = replace(base.ops[2], reads=("gelu", "sum"))
        buffers = (*base.buffers, Buffer("sum", nbytes, Role.TEMPORARY))
        flow = Dataflow("f", (*base.ops[:2], total, add, *base.ops[3:]), buffers)
        found = kernels(flow)
        assert found["sum"] == found["gelu"]
        assert (found["add"] == found["sum"]) is together


def test_what_is_asked_for_its_shape_alone_need_not_be_written() -> None:
    """As what a loss picked from is by its backward, which writes all of its own result."""
    base = step()
    back = Op("back", "aten.nll_loss_backward", Phase.BACKWARD, ("add",), ("back",), 0, NBYTES + 8)
    made = Buffer("back", NBYTES, TEMP, is_output=True)
    flow = Dataflow("f", (*base.ops, replace(back, kind=POINTWISE)), (*base.buffers, made))
    with_it, without = kernel_parts(flow), kernel_parts(base)
    assert {name: with_it[name] for name in without} == without
    assert with_it["back"].nbytes == pytest.approx(NBYTES, abs=8)


def test_each_kernel_takes_its_start_beside_its_bytes() -> None:
    base = step()
    found = roofline(base, machine(fused=1.0)).device_s
    parts = kernel_parts(base)
    starts = [found[n] - parts[n].nbytes / 1e9 for n in ("gelu", "add", "norm", "late")]
    assert starts == pytest.approx([costs._START_S, 0, 0, costs._START_S])


def test_only_a_machine_with_factors_knows_of_kernels() -> None:
    plain, known = (roofline(step(), m).device_s for m in (machine(), machine(fused=2.0)))
    assert plain["add"] == pytest.approx(3e-6)
    assert known["add"] == pytest.approx(2 * 1e-6)
    eager = roofline(step(), machine(fused=2.0, one_by_one=1.5), compiled=False).device_s
    assert eager["add"] == pytest.approx(1.5 * 3e-6)


def test_a_factor_is_for_its_own_kind_alone() -> None:
    found = roofline(step(), machine(product=1.25, fused=1.0)).device_s
    base = roofline(step(), machine(fused=1.0)).device_s
    assert found == pytest.approx({**base, "mm": 1.25 * base["mm"], "mm2": 1.25 * base["mm2"]})


def test_filters_that_are_not_channels_last_are_laid_out_anew() -> None:
    """But not where matrix units are not used."""
    low = replace(step().ops[0], kind=OpKind.CONVOLUTION, dtype="bfloat16")
    rates = machine(relayout=2.0)
    for op, passes in (
        (low, 2.0),
        (replace(low, kind=OpKind.CHANNELS_LAST), 0.0),
        (replace(low, dtype="float32"), 0.0),
    ):
        flow = replace(step(), ops=(op, *step().ops[1:]))
        with_it, without = (roofline(flow, m).device_s["mm"] for m in (rates, machine()))
        assert with_it - without == pytest.approx(passes * 3e-6)


@pytest.mark.parametrize("factors", [{"magic": 1.0}, {"product": 0.0}, {"fused": 1e9}])
def test_factors_of_no_kind_or_no_machine_are_refused(factors: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="factors"):
        machine(**factors)
