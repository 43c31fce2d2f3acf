"""Divisions: which ops of a layer ranks share, where they exchange, and which weights are experts'.

norm -> q -> attention -> o, added to what entered; then experts behind a router.
"""

from __future__ import annotations

from cotrain_compile.cluster.sources.divisions import Split, figures_of, split_layer
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.machine.op_classes import OpKind

PARAMS = {"scale": 4, "wq": 1000, "wo": 1000, "router": 10, "up": 4000, "down": 4000}
VALUES = {"x": 100, "n": 100, "q": 200, "a": 200, "o": 100, "h": 100, "r": 8, "u": 300, "y": 50}
OPS = (
    ("norm", OpKind.NORM, "x scale", "n", "norm"),
    ("cast", OpKind.POINTWISE, "wq", "wq16", "q"),
    ("q", OpKind.PRODUCT, "n wq16", "q", "q"),
    ("attention", OpKind.ATTENTION, "q", "a", ""),
    ("o", OpKind.PRODUCT, "a wo", "o", "o"),
    ("add", OpKind.POINTWISE, "x o", "h", ""),
    ("route", OpKind.PRODUCT, "h router", "r", "mlp.router"),
    ("up", OpKind.BATCHED_PRODUCT, "h up", "u", "mlp"),
    ("down", OpKind.BATCHED_PRODUCT, "u down", "y", "mlp"),
)


def a_layer() -> tuple[Dataflow, list[Op]]:
    ops = [
        Op(name, name, Phase.FORWARD, tuple(r.split()), (w,), kind=kind, module=at)
        for name, kind, r, w, at in OPS
    ]
    sizes = {**VALUES, "wq16": 500}
    buffers = [Buffer(n, size, Role.PARAM, is_input=True) for n, size in PARAMS.items()]
    buffers += [Buffer(n, size, Role.TEMPORARY, is_input=n == "x") for n, size in sizes.items()]
    return Dataflow("layer", tuple(ops), tuple(buffers)), ops


def split() -> tuple[Split, Dataflow, list[Op]]:
    step, ops = a_layer()
    return split_layer(step, ops, list(PARAMS)), step, ops


def test_a_product_by_columns_is_followed_by_one_by_rows() -> None:
    found, _, _ = split()
    assert found.divided == {"q", "a", "u"}
    assert found.summed == ["o", "y"]  # where ranks exchange


def test_norms_and_routers_are_whole_on_every_rank() -> None:
    found, _, _ = split()
    assert found.params == {"wq", "wo", "up", "down"}
    assert "r" not in found.divided


def test_weights_of_batched_products_are_experts_that_read_what_is_dispatched() -> None:
    found, _, _ = split()
    assert found.expert_params == {"up", "down"}
    assert found.dispatched == {"h"}


def test_modules_of_experts_are_counted() -> None:
    step, ops = a_layer()
    named = [
        Op(f"w{i}", "mm", Phase.FORWARD, ("h", "wo"), ("u",), kind=OpKind.PRODUCT, module=module)
        for i, module in enumerate(("mlp.experts.0.w1", "mlp.experts.1.w1"))
    ]
    found = split_layer(step, named, ["wo"])
    assert found.numbers == {"0", "1"}
    assert found.expert_params == {"wo"}
    assert not split_layer(step, ops[:6], ["wq", "wo"]).expert_params


def test_figures_are_at_the_sizes_of_the_step() -> None:
    found, step, ops = split()
    figures = figures_of(found, step, ops, ["n", "q", "a"], {op.name: 1.0 for op in ops})
    # Five products, one attention; norm, cast and addition are on every rank.
    assert (figures["shared_s"], figures["all_s"]) == (6.0, 9.0)
    assert figures["kept_divided"] == 400
    assert (figures["summed"], figures["dispatched"]) == (150, 100)
