"""Means over ranks: where they belong in a step.

In: the ATen graph. Out: the same graph, where a gradient that is added up over micro-batches is
reduced once.
"""

from __future__ import annotations

import torch
from torch import fx

from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION
from cotrain_compile.capture.nodes.storages import read_instead
from cotrain_compile.graph.collectives import group_name_of, is_wait

aten = torch.ops.aten


def takes_mean(node: fx.Node) -> bool:
    """Whether `node` is part of what takes the mean of a gradient."""
    return (node.meta.get("custom") or {}).get(PHASE_ANNOTATION) == "mean"


def take_means_once(graph: fx.Graph) -> None:
    """Drop each mean that is only added to a gradient of which the mean is taken again.

    ```
    mean(mean(a) + b)  ->  mean(a + b)
    ```

    The reducer of eager does the left side where micro-batches are not in `no_sync()`: the same
    number up to rounding, at twice the bytes on the wire.
    """
    dropped = False
    for wait in reversed(list(graph.nodes)):
        source = _source_of_mean(wait)
        if source is None or len(wait.users) != 1:
            continue
        (added,) = wait.users
        if added.target is not aten.add.Tensor or added.kwargs or not added.users:
            continue
        again = [_mean_of(user) for user in added.users]
        if all(found is not None and _group(found) == _group(wait) for found in again):
            read_instead(added, wait, source)
            dropped = True
    if dropped:
        graph.eliminate_dead_code(lambda node: node.op != "call_function" or _has_effect(node))


def _source_of_mean(wait: fx.Node) -> fx.Node | None:
    """The gradient of which `wait` gives the mean; None for any other node."""
    if not (is_wait(wait) and takes_mean(wait)):
        return None
    reduced = wait.args[0]
    assert isinstance(reduced, fx.Node)
    part = reduced.args[0]
    while isinstance(part, fx.Node) and part.target is aten.clone.default:
        part = part.args[0]
    is_part = isinstance(part, fx.Node) and part.target is aten.mul.Tensor and takes_mean(part)
    source = part.args[0] if is_part else None  # type: ignore[union-attr]
    return source if isinstance(source, fx.Node) else None


def _mean_of(part: fx.Node) -> fx.Node | None:
    """The wait for the mean of what `part` divides; None where it belongs to no mean."""
    found = part if takes_mean(part) and part.target is aten.mul.Tensor else None
    while found is not None and not is_wait(found):
        users = list(found.users)
        found = users[0] if len(users) == 1 else None
    return found


def _group(wait: fx.Node) -> str:
    reduced = wait.args[0]
    assert isinstance(reduced, fx.Node)
    return group_name_of(reduced)


def _has_effect(node: fx.Node) -> bool:
    """Collectives count as effects to torch; those of a mean that nobody reads have none."""
    return node.is_impure() and not takes_mean(node)
