"""Sums over ranks: values that are added up are summed over ranks once.

In: the ATen graph. Out: the same graph. Layers that are split and read the same input, as the three
in front of an attention, have a gradient of it each, which torch sums over the ranks before it adds
them. Megatron-LM sums once (Shoeybi et al., 2019), and so does its plan.
"""

from __future__ import annotations

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import read_instead
from cotrain_compile.graph.collectives import group_name_of, is_wait

aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def sum_once(graph: fx.Graph) -> None:
    """Sum over ranks what two sums would be added to.

    ```
    sum(a) + sum(b)  ->  sum(a + b)
    ```

    The same number up to rounding, at half the bytes on the wire.
    """
    for added in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if added.kwargs or not all(map(_is_read_once, added.args)):
            continue
        waits = [node for node in added.args if isinstance(node, fx.Node)]
        if _what_is_summed(waits[0]) == _what_is_summed(waits[1]) and waits[0] is not waits[1]:
            _sum_together(graph, added, waits)


def _is_read_once(wait: object) -> bool:
    """Whether `wait` ends a sum over ranks that nobody else reads."""
    if not (isinstance(wait, fx.Node) and is_wait(wait) and len(wait.users) == 1):
        return False
    of = wait.args[0]
    assert isinstance(of, fx.Node)
    return of.target is _ALL_REDUCE and of.args[1] == "sum" and len(of.users) == 1


def _what_is_summed(wait: fx.Node) -> tuple[object, ...]:
    """Equal for sums over one group of values of one shape and layout."""
    value = _reduced(wait).args[0].meta["val"]  # type: ignore[union-attr]
    return value.dtype, value.shape, value.stride(), group_name_of(_reduced(wait))


def _reduced(wait: fx.Node) -> fx.Node:
    reduced = wait.args[0]
    assert isinstance(reduced, fx.Node)
    return reduced


def _sum_together(graph: fx.Graph, added: fx.Node, waits: list[fx.Node]) -> None:
    last = _reduced(waits[1])
    with graph.inserting_before(added):
        first = graph.call_function(
            aten.add.Tensor, tuple(_reduced(wait).args[0] for wait in waits)
        )
        again = graph.call_function(_ALL_REDUCE, (first, *last.args[1:]))
        whole = graph.call_function(_WAIT, (again,))
    for node, of in ((first, added), (again, last), (whole, waits[1])):
        node.meta = dict(of.meta)
    for user in list(added.users):
        read_instead(user, added, whole)
    left = [added, *waits, *map(_reduced, waits)]
    for node in left:
        graph.erase_node(node)
