"""Weights first: the gradient of a weight before that of what the layer has read.

In: the ATen graph. Out: the same ops in another order.

```
dx = mm(dy, w); dw = mm(dy_t, x)  ->  dw = mm(dy_t, x); dx = mm(dy, w)
```

Autograd makes `dx` first, so that `x`, which only `dw` needs any more, is there beside it: three
values as large as those inside an MLP, and what else there is, at one op. Behind `dw` it is gone.
Only where that frees more than `dw` takes, and never across anything but what reads `dy`, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from cotrain_compile.capture.nodes.phases import phases
from cotrain_compile.capture.nodes.storages import is_view, storage_key
from cotrain_compile.dataflow import Phase


def make_weight_gradients_first(graph: fx.Graph) -> None:
    """Move each product that is a weight's gradient before the product beside it."""
    phase = phases(graph)
    last = {storage_key(read): node for node in graph.nodes for read in node.all_input_nodes}
    for given in graph.find_nodes(op="placeholder"):  # nobody frees it
        last.pop(storage_key(given), None)
    for late in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        early = _beside(late)
        if early is None or not all(phase[n.name] is Phase.BACKWARD for n in (early, late)):
            continue
        if _leaves_the_backward(late, phase) and _frees(late, early, last) > _nbytes(late):
            views = set(_views_read(late))
            for node in (*(n for n in _between(early, late) if n in views), late):
                early.prepend(node)


def _beside(late: fx.Node) -> fx.Node | None:
    """The product right before `late`, but for views, that reads something it reads, too."""
    early = late.prev
    while early.op == "call_function" and is_view(early):
        early = early.prev
    reads = _storages_read(late)
    is_beside = early.target is late.target and not reads.isdisjoint(_storages_read(early))
    return early if is_beside and storage_key(early) not in reads else None


def _between(early: fx.Node, late: fx.Node) -> Sequence[fx.Node]:
    found = []
    node = early.next
    while node is not late:
        found.append(node)
        node = node.next
    return found


def _views_read(node: fx.Node) -> Sequence[fx.Node]:
    """The views that `node` reads, and those that they are views of."""
    found = list(node.all_input_nodes)
    for read in found:
        if is_view(read):
            found += read.all_input_nodes
    return found


def _leaves_the_backward(node: fx.Node, phase: Mapping[str, Phase]) -> bool:
    """Whether nothing but views, and a copy of another type, is made of it in the backward."""
    for user in node.users:
        inside = user.op == "call_function" and phase[user.name] is Phase.BACKWARD
        passes_on = is_view(user) or user.target is torch.ops.aten._to_copy.default
        if inside and not (passes_on and _leaves_the_backward(user, phase)):
            return False
    return True


def _frees(late: fx.Node, early: fx.Node, last: Mapping[object, fx.Node]) -> int:
    """Bytes of what `late` reads and nothing else needs any more, `early` least of all."""
    only = {key for key in _storages_read(late) if last.get(key) is late}
    only -= _storages_read(early)
    read = {storage_key(node): node for node in late.all_input_nodes}
    return sum(_nbytes(read[key]) for key in only)


def _storages_read(node: fx.Node) -> set[object]:
    return {storage_key(read) for read in node.all_input_nodes}


def _nbytes(node: fx.Node) -> int:
    """Bytes of its storage; 0 where they depend on a dynamic size."""
    nbytes = node.meta["val"].untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else 0
