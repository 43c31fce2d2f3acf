"""Items of a tuple stand right behind what makes it, in their order."""

from __future__ import annotations

import operator

import torch
from torch import fx

from cotrain_compile.capture.aten.prepare import take_items_at_once

aten = torch.ops.aten


def test_items_that_are_taken_late_are_moved_to_their_op_and_others_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pieces = graph.call_function(aten.split.Tensor, (x, 2))
    first = graph.call_function(operator.getitem, (pieces, 0))
    other = graph.call_function(aten.neg.default, (first,))
    late = graph.call_function(operator.getitem, (pieces, 2))
    later = graph.call_function(operator.getitem, (pieces, 1))
    graph.output((other, late, later))
    take_items_at_once(graph)
    graph.lint()
    assert list(graph.nodes)[:-1] == [x, pieces, first, late, later, other]
    take_items_at_once(graph)
    assert list(graph.nodes)[:-1] == [x, pieces, first, late, later, other]
