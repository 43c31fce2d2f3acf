"""A host region traced on a card runs on tensors of the host: its constants are made there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cotrain_compile.passes.outline_host_regions import _subgraph

aten = torch.ops.aten


def test_constants_made_on_the_card_are_made_on_the_host_in_a_region() -> None:
    """As Adafactor's step: a constant of the trace, one that the region replays, and a cast."""
    cuda, graph = torch.device("cuda", 0), fx.Graph()
    param, gradient = graph.placeholder("param"), graph.placeholder("gradient")
    kept: dict[str, Any] = {"dtype": torch.float32, "device": cuda, "pin_memory": False}
    replayed = graph.call_function(aten.full.default, ([], 2.0), kept)
    made = graph.call_function(aten.scalar_tensor.default, (3.0,), kept)
    wide = graph.call_function(aten._to_copy.default, (gradient,), {"dtype": torch.float32})
    scaled = graph.call_function(aten.mul.Tensor, (wide, replayed))
    moved = graph.call_function(aten._to_copy.default, (scaled,), {"device": cuda})
    more = graph.call_function(aten.add.Tensor, (moved, made))
    write = graph.call_function(aten.copy_.default, (param, more))
    graph.output(())
    root = fx.GraphModule({}, graph)

    region = _subgraph(root, [made, wide, scaled, moved, more, write], [param, gradient])

    on_host = torch.zeros(4)
    region(on_host, torch.full((4,), 0.5, dtype=torch.bfloat16))
    assert on_host.tolist() == [4.0] * 4
    assert replayed.kwargs["device"] == cuda  # the graph it comes from is as it was
