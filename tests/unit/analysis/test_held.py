"""Held: which values of compiled code take memory, by hand and of random programs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.held import held_bytes, holding
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine.op_classes import OpKind

NBYTES = 1000
TEMP = Role.TEMPORARY
# name: kind, reads
CHAIN = {
    "mm": (OpKind.PRODUCT, ("x",)),
    "gelu": (OpKind.POINTWISE, ("mm",)),
    "scaled": (OpKind.POINTWISE, ("gelu",)),
    "add": (OpKind.POINTWISE, ("scaled", "x")),
    "mm2": (OpKind.PRODUCT, ("add",)),
}


def step(shape: dict[str, tuple[OpKind, tuple[str, ...]]], wide: tuple[str, ...] = ()) -> Dataflow:
    ops = tuple(
        Op(n, f"aten.{n}", Phase.BACKWARD, reads, (n,), bytes_moved=NBYTES, kind=kind)
        for n, (kind, reads) in shape.items()
    )
    made = [
        Buffer(n, (2 if n in wide else 1) * NBYTES, TEMP, is_output=n == [*shape][-1])
        for n in shape
    ]
    return Dataflow("f", ops, (Buffer("x", NBYTES, Role.BATCH, is_input=True), *made))


def curve(dataflow: Dataflow) -> list[int]:
    """Bytes at each op, all of the step's own order."""
    last = {n: i for i, op in enumerate(dataflow.ops) for n in op.touched}
    first = {n: i for i, op in reversed([*enumerate(dataflow.ops)]) for n in op.touched}
    return [
        sum(b.nbytes for b in dataflow.buffers if b.is_input or first[b.name] <= i <= last[b.name])
        for i in range(len(dataflow.ops))
    ]


def test_what_a_kernel_makes_for_itself_is_held_as_far_as_it_stands_for_others() -> None:
    """`mm` and `add` are there at once: where one is read `gelu` stands for the other."""
    assert held_bytes(step(CHAIN)) == {"gelu": NBYTES, "scaled": 0}


def test_wide_values_inside_of_a_kernel_take_no_more_than_it_reads() -> None:
    """As a loss in float32 of logits in bfloat16."""
    dataflow = step(CHAIN, wide=("gelu", "scaled"))
    found = holding(dataflow, held_bytes(dataflow))
    assert max(curve(dataflow)) == 5 * NBYTES
    assert max(curve(found)) == 3 * NBYTES  # x, mm and add


def test_what_is_read_behind_another_kernel_is_held() -> None:
    shape = {**CHAIN, "late": (OpKind.POINTWISE, ("mm2", "gelu"))}
    assert "gelu" not in held_bytes(step(shape))


def test_what_a_layer_hands_on_is_held() -> None:
    """A segment of compiled code ends there."""
    dataflow = step(CHAIN)
    layers = ("h.0", "h.0", "h.0", "h.1", "h.1")
    ops = (replace(op, module=m) for op, m in zip(dataflow.ops, layers, strict=True))
    assert held_bytes(replace(dataflow, ops=tuple(ops))) == {"gelu": NBYTES}


def test_random_numbers_and_updates_are_held() -> None:
    """A random op is a kernel of its own; an update may run on the host, which has no such code."""
    dataflow = step(CHAIN)
    drawn = tuple(
        replace(op, reads=(*op.reads, "state"), writes=(*op.writes, "state"))
        if op.name == "scaled"
        else op
        for op in dataflow.ops
    )
    state = Buffer("state", 16, Role.RNG, is_input=True, is_output=True)
    assert not held_bytes(replace(dataflow, ops=drawn, buffers=(*dataflow.buffers, state)))
    updates = tuple(replace(op, phase=Phase.OPTIMIZER) for op in dataflow.ops)
    assert not held_bytes(replace(dataflow, ops=updates))


def test_the_forward_is_whole() -> None:
    """What is made again may read any of it in the backward, which is no matter of one kernel."""
    dataflow = step(CHAIN)
    forward = tuple(replace(op, phase=Phase.FORWARD) for op in dataflow.ops)
    assert not held_bytes(replace(dataflow, ops=forward))


KINDS = st.sampled_from([OpKind.POINTWISE, OpKind.NORM, OpKind.REDUCTION, OpKind.PRODUCT])


@st.composite
def steps(draw: st.DrawFn) -> Dataflow:
    shape: dict[str, tuple[OpKind, tuple[str, ...]]] = {}
    for number in range(draw(st.integers(1, 12))):
        known = ["x", *shape]
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        shape[f"v{number}"] = draw(KINDS), tuple(reads)
    return step(shape, wide=tuple(n for n in shape if draw(st.booleans())))


@given(steps())
def test_no_value_takes_more_than_it_has_and_none_twice_as_little(dataflow: Dataflow) -> None:
    """What crosses the border of a kernel is whole, and what is held once is held again."""
    held = held_bytes(dataflow)
    buffer = dataflow.buffer
    assert all(0 <= nbytes <= buffer[name].nbytes for name, nbytes in held.items())
    products = [op for op in dataflow.ops if op.kind is OpKind.PRODUCT]
    assert held.keys().isdisjoint(name for op in products for name in op.touched)
    found = holding(dataflow, held)
    assert holding(found, held_bytes(found)) == found


@given(steps())
def test_at_each_product_there_is_as_much_as_op_by_op(dataflow: Dataflow) -> None:
    """Only inside of kernels a plan counts less."""
    found = holding(dataflow, held_bytes(dataflow))
    for op, before, now in zip(dataflow.ops, curve(dataflow), curve(found), strict=True):
        assert now <= before
        if op.kind is OpKind.PRODUCT:
            assert now == before
