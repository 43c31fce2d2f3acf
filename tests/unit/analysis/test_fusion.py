"""Fusion: what a compiled step runs as one kernel, and what that moves, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.analysis.costs import kernel_parts, kernels, roofline
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine import HostUpdate, Link, Machine, TierSpec, two_tier
from cotrain_compile.machine.op_classes import OpKind

NBYTES = 1000
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
    assert kernels(step().ops) == {"gelu": "gelu", "add": "gelu", "norm": "gelu", "late": "late"}


def test_a_kernel_reads_what_others_made_once_and_writes_what_they_need() -> None:
    moved = {name: part.nbytes for name, part in kernel_parts(step()).items()}
    # gelu reads mm and is read by `late`; add reads x alone; norm writes for mm2.
    assert moved == pytest.approx({"gelu": 2000, "add": 1000, "norm": 1000, "late": 3000})


def test_a_sum_goes_over_what_its_kernel_made_once_more() -> None:
    moved = kernel_parts(step(norm=OpKind.REDUCTION))["norm"].nbytes
    assert moved == pytest.approx(2000)


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
