"""As placed: the step that a placement leaves, as a Dataflow.

First its ops come in the order that the placement says, then some of them run again. The passes
`run_by_layer` and `recompute_values` do the same to the graph.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlanError
from cotrain_compile.placement.order.by_layer import by_layer
from cotrain_compile.placement.order.micro_batches import OrderIsKept
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.plan import Placement


def as_placed(dataflow: Dataflow, placement: Placement) -> Dataflow:
    """The step of `dataflow` under `placement`; raises as `in_packs`."""
    ordered = in_packs(dataflow, placement.layers_per_pack)
    return recomputed(ordered, placement.recomputed)


def in_packs(dataflow: Dataflow, layers_per_pack: int) -> Dataflow:
    """The step in packs of so many layers; `PlanError` where it has no such order."""
    try:
        return by_layer(dataflow, layers_per_pack)
    except OrderIsKept as reason:
        raise PlanError(
            f"the plan runs micro-batches in packs of {layers_per_pack} layers, which this step "
            f"does not allow: {reason}; make a new plan for it"
        ) from None
