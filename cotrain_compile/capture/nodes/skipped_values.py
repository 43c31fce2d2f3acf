"""Kept values: a step that a loss scaler skips keeps what it would have updated, without copies.

The trace copies each parameter and state, runs the optimizer, and takes the copy back where the
step is skipped. In a functional graph the copy is the old value itself, and the choice can be made
as soon as the new value exists: no two versions of all parameters are alive at once.
"""

from __future__ import annotations

import torch
from torch import fx

from cotrain_compile.capture.nodes.storages import read_instead

aten = torch.ops.aten

# Annotation of the nodes that choose between the old and the new value of a tensor.
KEPT_ANNOTATION = "cotrain_kept"


def keep_values_early(graph: fx.Graph) -> None:
    """Choose between old and new value right after the new one is made, and free the new one.

    Later ops of the optimizer then read the choice. Where the step is skipped they compute
    something else than eager would have, but all that they write is then dropped as well.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    wheres = graph.find_nodes(op="call_function", target=aten.where.self)
    choices = [node for node in wheres if KEPT_ANNOTATION in (node.meta.get("custom") or {})]
    for choice in choices:
        skip, old, new = choice.args
        if old.target is aten.clone.default:
            choice.replace_input_with(old, old.args[0])
        latest = max(skip, new, key=order.__getitem__)
        latest.append(choice)
        for user in list(new.users):
            if user is not choice and order[user] > order[latest]:
                read_instead(user, new, choice)
    if choices:
        graph.eliminate_dead_code()
