"""Few inputs: what only layers and updates read that were left out is no input of what is lowered.

AOTAutograd does much for each input, read or not, and a step of many layers has most of its inputs
in those that are left out. Where a step is only traced, nothing calls what AOTAutograd gives; so
its graph has the others alone, and gets the rest back behind it.

Private torch API used: `PlainAOTInput`, `TracingContext.fw_metadata`, `FakeTensor`,
`no_dispatch`. Tried on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._mode_utils import no_dispatch

from cotrain_compile.capture.layers.blocks import UnlikeError
from cotrain_compile.capture.layers.shorten import put_into, with_graph


@dataclass(frozen=True)
class FewInputs:
    """A graph without some inputs: the `values` of the others, and where these were."""

    module: fx.GraphModule
    values: Sequence[Any]
    places: Sequence[int]
    known: Sequence[torch.Tensor]
    """What each of all inputs was in Dynamo's trace."""


def with_few_inputs(
    module: fx.GraphModule, values: Sequence[Any], owned: Sequence[bool]
) -> FewInputs:
    """Dynamo's `module` without the inputs that nothing reads; of those that are `owned`."""
    placeholders = module.graph.find_nodes(op="placeholder")
    left_out = {
        node for node, mine in zip(placeholders, owned, strict=True) if mine and not node.users
    }
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node not in left_out:
            new[node] = put_into(graph, node, node.args, node.kwargs, new.__getitem__)
    places = [i for i, node in enumerate(placeholders) if node not in left_out]
    known = [node.meta["example_value"] for node in placeholders]
    return FewInputs(with_graph(module, graph), [values[i] for i in places], places, known)


def put_inputs_back(module: fx.GraphModule, few: FewInputs) -> None:
    """Have all inputs in the ATen graph of the others, in place, as AOTAutograd has them.

    Raises `UnlikeError` where it has not one input for each.
    """
    graph, metadata = module.graph, TracingContext.get().fw_metadata
    there = graph.find_nodes(op="placeholder")
    if len(there) != len(few.places) or metadata is None:
        raise UnlikeError("AOTAutograd has put inputs together")
    at = dict(zip(few.places, there, strict=True))
    behind = there[-1].next
    # Those that were there are told apart by names that none of all has, until all are in turn.
    for node in there:
        node.name = f"_{node.name}"
    for place, value in enumerate(few.known):
        name = f"arg{place}_1"
        if place in at:
            node = at[place]
            behind.prepend(node)
        else:
            with graph.inserting_before(behind):
                node = graph.placeholder(name)
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)
            node.meta["val"] = _as_lowered(value)
        node.name = node.target = name
        node.meta["desc"] = PlainAOTInput(idx=place)
    told = dict(zip(few.places, metadata.input_info, strict=True))
    # Whether one that was left out is written is told with what writes it.
    metadata.input_info = [
        told.get(place, metadata.input_info[0]) for place in range(len(few.known))
    ]


def _as_lowered(value: torch.Tensor) -> torch.Tensor:
    """As `value`, in the trace that AOTAutograd makes, where nothing requires a gradient."""
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    storage = torch.UntypedStorage(int(value.untyped_storage().nbytes()), device="meta")
    with no_dispatch():
        bare = torch.empty(0, dtype=value.dtype, device="meta")
        bare.set_(storage, int(value.storage_offset()), tuple(value.shape), value.stride())
        return FakeTensor(fake_mode, bare, value.device)
