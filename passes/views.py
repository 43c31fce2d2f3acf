"""Views: which value shows whose memory, by the storages of the traced values.

A copy of a buffer on the other tier has the traced value of the original, so the storage of a value
says which buffer it shows, wherever it is.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from cotrain_compile.graph.op_calls import PIECE
from cotrain_compile.runtime.ops import TASKS

COPY = torch.ops.aten.copy_.default
ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_WRITES = (COPY, ADD_IN_PLACE)
# In the `meta` of what a part is given: its rows of a value, as a view, where groups of rows end as
# seen from its first, or room for what parts collect. No segment makes it beside the ops of a part.
GIVEN = "given to a part"


def storage(node: fx.Node) -> object:
    """Equal for values that share memory; the node itself for what has none, or several."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):  # nearly always
        return value.untyped_storage()._cdata
    parts = value if isinstance(value, list | tuple) else []
    keys = {part.untyped_storage()._cdata for part in parts if isinstance(part, torch.Tensor)}
    return keys.pop() if len(keys) == 1 else node


def viewed(node: fx.Node) -> fx.Node | None:
    """The value whose memory `node` shows, None for what made its own: an op, a task, an input."""
    if node.target in TASKS:
        return None
    shown = storage(node)
    for source in node.all_input_nodes:
        if storage(source) == shown and not _makes_several(source):
            return source
    return None


def is_write(node: fx.Node) -> bool:
    """Whether `node` writes into its first argument, whose memory it shows."""
    return node.target in _WRITES


def base_of(node: fx.Node) -> fx.Node:
    """What made the memory that `node` shows."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def written_by(write: fx.Node) -> fx.Node:
    """The tensor that an in-place write leaves its value in."""
    destination = write.args[0]
    assert isinstance(destination, fx.Node)
    return destination


def available_before(place: fx.Node, value: fx.Node) -> fx.Node:
    """`value`, or where it comes later than `place`, the same made again right before `place`.

    Only what costs nothing is made again: views, pieces, items of a tuple, constants and numbers of
    Python's, such as a count of steps and what follows from it.
    """
    if value < place:
        return value
    assert _is_free(value), f"{value} is needed before {place}, which runs earlier"
    with place.graph.inserting_before(place):
        return place.graph.node_copy(value, lambda node: available_before(place, node))


def _is_free(value: fx.Node) -> bool:
    is_number = isinstance(value.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)
    is_item = value.op == "get_attr" or value.target in (operator.getitem, PIECE)
    return is_number or is_item or viewed(value) is not None


def _makes_several(node: fx.Node) -> bool:
    """Whether `node` is an op with several results, each with memory of its own."""
    return isinstance(node.meta.get("val"), list | tuple) and viewed(node) is None
