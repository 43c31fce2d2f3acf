"""The eager lowering: ATen's own kernels, one node after the other. The reference for exactness."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from cotrain_compile.dataflow import Role
from cotrain_compile.extract import UNDECLARED_VIEWS
from cotrain_compile.graph import StepGraph, returns_argument_memory, writes
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane, Span
from cotrain_compile.runtime.meter import Meter
from cotrain_compile.runtime.ops import cotrain, host_region

_TASKS = (cotrain.offload, cotrain.prefetch_into, cotrain.wait, host_region)


class EagerProgram(fx.Interpreter):
    """Runs a placed graph and notes when each op ran.

    `before_first_update` is called before the first node that writes a parameter or state.
    """

    def __init__(
        self, placed: StepGraph, meter: Meter, before_first_update: Callable[[], None]
    ) -> None:
        super().__init__(placed.module)
        self.written: list[str] = []
        self.spans: list[Span] = []
        self._meter = meter
        self._before_first_update = before_first_update
        self._writes = _persistent_writes(placed)

    def run_step(self, inputs: Sequence[Any], origin_s: float) -> Any:
        """Run the step once on `inputs`, in the order of its placeholders."""
        self.written, self.spans, self._origin_s = [], [], origin_s
        self._previous_end_s = time.perf_counter() - origin_s
        with torch.no_grad():
            outputs = self.run(*inputs)
        # A gradient is often a view of what the graph computed. Kept in `p.grad` as a view, its
        # base would be one more input of the next step.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def run_node(self, n: fx.Node) -> Any:
        updates = n in self._writes
        if updates and not self.written:
            self._before_first_update()
        result = super().run_node(n)
        if n.op == "call_function":
            is_op = n.target not in _TASKS
            if is_op:
                self._meter.track(result, Tier.DEVICE, n.name)
                result = _without_spare_storage(n, result)
            if updates:
                self.written.append(self._writes[n])
            # An op's span begins where the node before it ended: what it takes to get from one op
            # to the next is part of the step's time.
            ended = time.perf_counter() - self._origin_s
            if is_op:
                self.spans.append(Span(Lane.DEVICE, n.name, self._previous_end_s, ended))
            self._previous_end_s = ended
        return result


def _without_spare_storage(node: fx.Node, result: Any) -> Any:
    """`result`, moved to a storage of its own size where the op left it in a larger one.

    Some kernels return a reduced value in the storage of what they reduced (`mse_loss` on the CPU):
    a scalar would keep megabytes alive that no plan knows of.
    """
    if not isinstance(result, torch.Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return result
    spare = result.untyped_storage().nbytes() > result.nbytes
    if not spare or node.target in UNDECLARED_VIEWS:
        return result
    return result if returns_argument_memory(node) else result.clone()


def _persistent_writes(placed: StepGraph) -> dict[fx.Node, str]:
    """The nodes that write a parameter or state, with its name or the task of its region."""
    found: dict[fx.Node, str] = {}
    for node, destination, _ in writes(placed.module.graph):
        item = placed.input_of_node.get(destination.name)
        if item is not None and item.role in (Role.PARAM, Role.OPTIMIZER_STATE):
            found[node] = item.name
    for node in placed.module.graph.find_nodes(op="call_function", target=host_region):
        found[node] = str(node.args[1])
    return found
