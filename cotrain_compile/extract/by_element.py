"""By element: does an update work on each element of its parameter by itself?

In: the nodes of an update, as the graph has them. Out: the nodes that work on all elements, none
where one mixes elements (a norm, as LAMB's; a product, as Muon's), shows them in another order, or
works on memory with gaps. What is left works on single numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from cotrain_compile.graph import StepGraph

aten = torch.ops.aten

# With fewer, a buffer of single numbers could not be told from one of elements by its bytes.
FEWEST_ELEMENTS = 4096
# By name: torch registers its prims when they are first imported.
_ALSO_BY_ELEMENT = (
    "aten.copy_.default",
    "aten._to_copy.default",
    "aten.clone.default",
    "prims.fma.default",
)


def elements_of(step: StepGraph, members: Sequence[fx.Node], param: fx.Node) -> int:
    """How many elements an update may be divided into; 0 where it has to go as a whole."""
    count = param.meta["val"].numel()
    if not isinstance(count, int) or count < FEWEST_ELEMENTS:
        return 0
    return count if by_element(step, members, param) else 0


def by_element(step: StepGraph, members: Sequence[fx.Node], param: fx.Node) -> list[fx.Node]:
    """Those of `members`, the nodes of an update, that work on all elements of `param`, in order.

    None where not all of them do so by themselves, or others use what they make.
    """
    inside, shape = set(members), param.meta["val"].shape
    written = {node.args[0] for node in members if node.target is aten.copy_.default}
    found = []
    for node in members:
        values = [value for value in (node, *node.all_input_nodes) if _is_tensor(value)]
        full = [value for value in values if value.meta["val"].numel() > 1]
        if not full:
            continue
        of_numbers = [v for v in node.all_input_nodes if v not in full and v in written]
        alike = all(_is_dense(v.meta["val"]) and v.meta["val"].shape == shape for v in full)
        if not (alike and node in full and _is_by_element(node)) or of_numbers:
            return []
        if not inside.issuperset(node.users):
            return []
        found.append(node)
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether it is all of its memory, one element after the other."""
    nbytes = value.numel() * value.itemsize
    return value.is_contiguous() and value.untyped_storage().nbytes() == nbytes


def _is_by_element(node: fx.Node) -> bool:
    if str(node.target) in _ALSO_BY_ELEMENT:
        return len({v.meta["val"].device for v in (node, *node.all_input_nodes)}) == 1
    tags: Collection[torch.Tag] = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
