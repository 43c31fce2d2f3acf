"""Phases: which part of the step each node of the ATen graph belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from cotrain_compile.dataflow import Phase
from cotrain_compile.graph import writes

# Key of the node annotation (carried by torch from Dynamo's graph to ATen's) that says which part
# of the step made a node: "backward" (accumulation of gradients), "function" (the backward of a
# `torch.autograd.Function` of the user's), "mean" (of gradients over ranks) or "optimizer".
PHASE_ANNOTATION = "cotrain_phase"
# The op of Dynamo's that runs a `torch.autograd.Function`: its graphs are the first arguments.
_APPLY = "autograd_function_apply"


def phases(graph: fx.Graph) -> Mapping[str, Phase]:
    """The phase of every call in `graph`, by node name.

    Autograd marks the nodes of a backward and our annotations mark those of an optimizer step and
    of gradient accumulation. What is left belongs to the optimizer if only the optimizer uses it
    (a clipped gradient, a constant that torch made of a hyper-parameter), or if it depends on a
    gradient and only the step's outputs use it (a gradient norm); all else is forward. A write into
    an input belongs where its value does.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = {node: phase for node in calls if (phase := _marked(node)) is not None}
    after_backward = _descendants(calls, found)
    for node in reversed(calls):
        if node in found:
            continue
        users = {found.get(user) for user in node.users if user.op != "output"}
        reported = not users and node in after_backward
        found[node] = Phase.OPTIMIZER if users == {Phase.OPTIMIZER} or reported else Phase.FORWARD
    for node, _, value in writes(graph):
        found[node] = found.get(value, Phase.FORWARD)
    return {node.name: found[node] for node in calls}


def mark_written_backwards(module: fx.GraphModule) -> None:
    """Annotate the backward that a `torch.autograd.Function` of the user's has, in Dynamo's graph.

    Dynamo keeps it as a graph of its own, whose nodes keep what they are annotated with when
    autograd runs them: nothing of the backward that they run in.
    """
    for graph_module in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") != _APPLY or len(node.args) < 2:
                continue
            body = getattr(graph_module, str(getattr(node.args[1], "target", "")), None)
            inner = list(body.modules()) if isinstance(body, fx.GraphModule) else []
            nodes = (n for m in inner if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
            for own in nodes:
                own.meta["custom"] = {
                    PHASE_ANNOTATION: "function",
                    **(own.meta.get("custom") or {}),
                }


def _marked(node: fx.Node) -> Phase | None:
    annotation = (node.meta.get("custom") or {}).get(PHASE_ANNOTATION)
    if annotation == "optimizer":
        return Phase.OPTIMIZER
    if annotation in ("backward", "function", "mean") or node.meta.get("autograd_backward"):
        return Phase.BACKWARD
    return None


def _descendants(calls: list[fx.Node], marked: Mapping[fx.Node, Phase]) -> set[fx.Node]:
    """Nodes that depend on a backward node."""
    found: set[fx.Node] = set()
    for node in calls:
        if marked.get(node) is Phase.BACKWARD or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
