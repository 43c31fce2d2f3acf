"""A bound op computes what its node does in an interpreter, however its arguments are held."""

from __future__ import annotations

import torch
from torch import fx

from cotrain_compile.runtime.bound_ops import bound

aten = torch.ops.aten


def test_a_bound_op_finds_nodes_and_constants_wherever_they_stand() -> None:
    graph, x = fx.Graph(), torch.arange(6.0).view(2, 3)
    a, b = graph.placeholder("a"), graph.placeholder("b")
    nodes = [
        graph.call_function(aten.mul.Tensor, (a, 0.5)),
        graph.call_function(aten.pow.Scalar, (0.9, a)),
        graph.call_function(aten.add.Tensor, (a, b), {"alpha": 3}),
        graph.call_function(aten.stack.default, ([a, b, a],), {"dim": 1}),
        graph.call_function(aten.index.Tensor, (a, [None, torch.tensor([0, 2])])),
        graph.call_function(aten.full.default, ([2, 2], 7.0), {"dtype": torch.bfloat16}),
        graph.call_function(torch.add, (), {"input": a, "other": b}),
        graph.call_function(max, (((a, b), (a,)),), {"key": len}),  # type: ignore[dict-item]
        graph.call_function(dict, ({"x": a, "y": 2},)),
    ]
    values = {a: x, b: x + 1}
    for node in nodes:
        target, given = node.target, values.__getitem__
        expected = target(*fx.map_arg(node.args, given), **fx.map_arg(node.kwargs, given))  # type: ignore[operator]
        torch.testing.assert_close(bound(node)(values), expected, rtol=0, atol=0)


def test_a_prim_runs_as_the_ops_it_stands_for() -> None:
    import torch._inductor.inductor_prims  # registers them

    graph = fx.Graph()
    a, c = graph.placeholder("a"), graph.placeholder("c")
    fma = getattr(torch.ops.prims, "fma", None)
    target = fma.default if fma is not None else torch.ops.prims.add.default
    node = graph.call_function(target, (a, 0.3, c) if fma is not None else (a, c))
    values = {a: torch.randn(64), c: torch.randn(64)}
    assert torch.equal(bound(node)(values), target(*fx.map_arg(node.args, values.__getitem__)))
