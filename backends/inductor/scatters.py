"""Scatters: what an op writes at places that a tensor names is not read in the same loop.

    %s = scatter(%zeros, -1, %index, %g)
    %a = add(%g, %s)
    %b = mul(%a, %mask)

Before torch 2.15 Inductor may make one loop of these three, in which the second reads what the
first has yet to write: wrong numbers, and no error. It does so where a loop over the index is as
long as one over the result. So a segment ends behind such an op; where one becomes such ops only as
Inductor lowers it, and reads them too, its segment is compiled without fusion. Tried on torch
2.11.0 and 2.13.0, which do it, and on 2.15.0, which does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
SCATTERS = (
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.index_put,
    aten._unsafe_index_put,
    aten._unsafe_masked_index_put_accumulate,
)
# Lowered to one of `SCATTERS`.
MADE_OF_SCATTERS = (
    aten.embedding_dense_backward,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.index_reduce,
    aten.unfold_backward,
)
ARE_FUSED = torch.__version__ < "2.15"
EACH_OP_ALONE = {"max_fusion_size": 1}


def ends_a_segment(op: fx.Node) -> bool:
    """Whether what reads the result of `op`, before it is lowered, goes into another segment.

    So on every torch, for equal segments: no loop may read that result anyway.
    """
    return _packet(op) in (*SCATTERS, *MADE_OF_SCATTERS)


def settings_for(graph: fx.Graph) -> dict[str, Any]:
    """Every op a loop of its own in a lowered graph that reads what it scatters, else nothing."""
    return EACH_OP_ALONE if ARE_FUSED and _reads_what_it_scatters(graph) else {}


def _reads_what_it_scatters(graph: fx.Graph) -> bool:
    return any(
        user.op != "output"
        for node in graph.nodes
        if _packet(node) in SCATTERS
        for user in node.users
    )


def _packet(op: fx.Node) -> object:
    return getattr(op.target, "overloadpacket", None)
