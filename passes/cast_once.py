"""Cast once: the copy that autocast makes of a parameter in low precision, made once in the step.

    %c = _to_copy(%w), %mm(%x, %c), ..., %c_1 = _to_copy(%w), %mm_1(%y, %c_1)
    ->   %c = _to_copy(%w), %mm(%x, %c), ..., %mm_1(%y, %c)

What the graph becomes is, as data, what `placement.casts` makes of the step.
"""

from __future__ import annotations

from cotrain_compile.capture.nodes.storages import read_instead
from cotrain_compile.dataflow import Role
from cotrain_compile.extract.updates import equal_casts
from cotrain_compile.graph import StepGraph
from cotrain_compile.plan import Plan


def cast_once(step: StepGraph, plan: Plan) -> StepGraph:
    """A step graph in which the parameters of all updates are cast once, if `plan` has it so."""
    if not plan.placement.casts_once:
        return step
    graph = step.module.graph
    place = {node: position for position, node in enumerate(graph.nodes)}
    for param in graph.find_nodes(op="placeholder"):
        item = step.input_of_node[param.name]
        if item.role is not Role.PARAM or item.name not in plan.placement.updates:
            continue
        first, *others = equal_casts(param, place) or [param]
        for cast in others:
            for user in tuple(cast.users):
                read_instead(user, cast, first)
            graph.erase_node(cast)
    step.module.recompile()
    return step
