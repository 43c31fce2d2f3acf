"""Sums over ranks: values that are added up are summed over ranks once.

In: the ATen graph. Out: the same graph. Layers that are split and read the same input, as the three
in front of an attention, have a gradient of it each, which torch sums over the ranks before it adds
them. Megatron-LM sums once (Shoeybi et al., 2019), and so does its plan. A gradient of a mesh of
replicas and shards is summed over replicas as a whole, and scattered over shards then; in the other
order replicas exchange a part of it alone.
"""

from __future__ import annotations

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import read_instead
from cotrain_compile.graph.collectives import group_name_of, is_wait

aten = torch.ops.aten
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SUMS = ("sum", "avg")


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


def scatter_before_sums(graph: fx.Graph) -> None:
    """Sum over one group the parts that are left when another one has scattered a value.

    ```
    scatter(sum(a))  ->  sum(scatter(a))
    ```

    The same number up to rounding; of n ranks that scatter, each sums an n-th of the bytes.
    """
    for scatter in list(graph.find_nodes(op="call_function", target=_SCATTER)):
        whole, ends = scatter.args[0], list(scatter.users)
        if not _is_read_once(whole, _SUMS) or scatter.args[1] not in _SUMS or len(ends) != 1:
            continue
        assert isinstance(whole, fx.Node)
        _sum_parts(graph, _reduced(whole), whole, scatter, ends[0])


def _sum_parts(
    graph: fx.Graph, reduced: fx.Node, whole: fx.Node, scatter: fx.Node, end: fx.Node
) -> None:
    """`end` waits for the sum of what is scattered, in place of what is scattered of the sum."""
    with graph.inserting_before(scatter):
        first = graph.call_function(_SCATTER, (reduced.args[0], *scatter.args[1:]))
        part = graph.call_function(_WAIT, (first,))
        total = graph.call_function(_ALL_REDUCE, (part, *reduced.args[1:]))
    for node in (first, part, total):
        node.meta = dict(scatter.meta)
    total.meta["val"] = torch.empty_like(scatter.meta["val"])  # fake, with its own storage
    end.meta["val"] = total.meta["val"]
    end.args = (total,)
    for node in (scatter, whole, reduced):
        graph.erase_node(node)


def _is_read_once(wait: object, kinds: tuple[str, ...] = ("sum",)) -> bool:
    """Whether `wait` ends a sum over ranks that nobody else reads."""
    if not (isinstance(wait, fx.Node) and is_wait(wait) and len(wait.users) == 1):
        return False
    of = wait.args[0]
    assert isinstance(of, fx.Node)
    return of.target is _ALL_REDUCE and of.args[1] in kinds and len(of.users) == 1


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
