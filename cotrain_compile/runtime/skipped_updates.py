"""Skipped updates: the flag by which a host region keeps every old value, if it has one.

In: a region. Out: which of its inputs says that the loss scaler skips this step; a fused loop then
looks at it and does nothing (`docs/decisions/0014-gradient-scaling.md`).
"""

from __future__ import annotations

import torch
from torch import fx

from cotrain_compile.graph import writes


def skip_input(region: fx.GraphModule) -> int | None:
    """The position of the flag, None where some tensor is written whatever any input says."""
    flags = {_flag(destination, value) for _, destination, value in writes(region.graph)}
    flag = flags.pop() if len(flags) == 1 else None
    inputs = list(region.graph.find_nodes(op="placeholder"))
    return inputs.index(flag) if flag in inputs else None


def _flag(destination: fx.Node, value: fx.Node) -> fx.Node | None:
    """What decides between `destination` as it is and a new value, None where nothing does."""
    if value.target is not torch.ops.aten.where.self:
        return None
    flag, kept, _ = value.args
    return flag if kept is destination and isinstance(flag, fx.Node) else None
