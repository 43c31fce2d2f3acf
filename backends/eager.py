"""The eager lowering: ATen's own kernels, one node after the other. The reference for exactness."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from cotrain_compile.dataflow import Role
from cotrain_compile.extract import UNDECLARED_VIEWS
from cotrain_compile.graph import StepGraph, returns_argument_memory, writes
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane, Span
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.ops import TASKS, cotrain, host_region, task_name

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Write:
    """A tensor of the user's is written: by `task`, or where that is None as the node runs."""

    name: str
    role: Role
    task: str | None = None

    @property
    def is_update(self) -> bool:
        """Whether it belongs to the update: running statistics are the forward's."""
        return self.role is not Role.BUFFER


class EagerProgram(fx.Interpreter):
    """Runs a placed graph and notes when each op ran.

    A value is freed after its last use, at once where it has none. `before_update` is called before
    each node that writes a parameter or state, or starts what does; `written` has the writes of
    these and of all nodes before, whether or not they came to their end.
    """

    def __init__(
        self, placed: StepGraph, device: Device, before_update: Callable[[], None]
    ) -> None:
        super().__init__(placed.module)
        self.extra_traceback = False  # `_run_op` says where, and leaves the message as it is
        self.written: list[Write] = []
        self._marks: list[tuple[str, Any, Any]] = []
        self._device = device
        self._rehearses = False
        self._before_update = before_update
        self._writes = _persistent_writes(placed)
        self._last_readers = _last_readers(placed.module.graph)

    @property
    def spans(self) -> list[Span]:
        """When each op of the last step ran, where the device times them."""
        seconds = self._device.seconds
        return [
            Span(Lane.DEVICE, name, seconds(start), seconds(end))
            for name, start, end in self._marks
            if end is not None
        ]

    def begin_step(self) -> None:
        """From here on nothing has been written."""
        self.written, self._marks = [], []

    def run_step(self, inputs: Sequence[Any], *, rehearse: bool = False) -> Any:
        """Run the step once on `inputs`, in the order of its placeholders.

        `rehearse` leaves out the nodes that write into an input. What a step that failed leaves
        behind stays alive until `forget`.
        """
        self.begin_step()
        self._rehearses = rehearse
        self._previous = self._device.mark()
        with torch.no_grad():
            outputs = self.run(*inputs)
        self.args_iter = iter(())  # the interpreter would keep the inputs until the next step
        # A gradient is often a view of what the graph computed. Kept in `p.grad` as a view, its
        # base would be one more input of the next step.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def forget(self) -> None:
        """Free what a step that failed has left; nothing may still read it."""
        self.env, self.args_iter = {}, iter(())

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if self._rehearses and n.target is COPY and n.args[0].op == "placeholder":  # type: ignore[union-attr]
            return self._without_unused(n, self.env[n.args[0]])  # type: ignore[index]
        self._note_writes(n)
        is_op = n.target not in TASKS
        result = self._run_op(n) if is_op else self._call_function(n)
        self._note_end(n.name if is_op else None)
        return self._without_unused(n, result)

    def _note_writes(self, node: fx.Node) -> None:
        writes = () if self._rehearses else self._writes.get(node, ())
        if any(write.is_update for write in writes):
            self._before_update()
        self.written += writes

    def _note_end(self, op: str | None) -> None:
        # An op's span begins where the node before it ended: what it takes to get from one op to
        # the next is part of the step's time.
        ended = self._device.mark()
        if op is not None:
            self._marks.append((op, self._previous, ended))
        self._previous = ended

    def _run_op(self, node: fx.Node) -> Any:
        try:
            result = self._call_function(node)
            self._device.meter.track(result, Tier.DEVICE, node.name)
        except Exception as error:
            if node.stack_trace:
                error.add_note(f"in {node.name}, which comes from\n{node.stack_trace}")
            raise
        return _without_spare_storage(node, result)

    def _call_function(self, node: fx.Node) -> Any:
        # What the interpreter does too, but for what tracing needs: that costs as much as a small
        # op, for every op of every step.
        value, target = self.env.__getitem__, node.target
        arguments: Any = fx.node.map_arg(node.args, value)
        keywords: Any = fx.node.map_arg(node.kwargs, value) if node.kwargs else {}
        return target(*arguments, **keywords)  # type: ignore[operator]

    def _without_unused(self, node: fx.Node, result: Any) -> Any:
        """What later nodes use of `result`; items of a tuple go one by one."""
        if node in self._last_readers:
            readers = self._last_readers[node]
            return [item if index in readers else None for index, item in enumerate(result)]
        if node.target is operator.getitem:
            source: Any
            source, index = node.args
            if self._last_readers.get(source, {}).get(index) is node:
                self.env[source][index] = None
        return result if node.users else None


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


def _last_readers(graph: fx.Graph) -> dict[Any, dict[Any, fx.Node]]:
    """For each node with several results, the last node that takes each result out."""
    found: dict[Any, dict[Any, fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        source, index = node.args
        if all(user.target is operator.getitem for user in source.users):
            found.setdefault(source, {})[index] = node
    return found


def _persistent_writes(placed: StepGraph) -> dict[fx.Node, list[Write]]:
    """What each node writes of the parameters, states and buffers that the user holds."""
    graph = placed.module.graph
    found: dict[fx.Node, list[Write]] = {}

    def note(node: fx.Node, destination: Any, task: str | None = None) -> None:
        item = placed.input_of_node.get(destination.name)
        if item is not None and item.role in (Role.PARAM, Role.OPTIMIZER_STATE, Role.BUFFER):
            found.setdefault(node, []).append(Write(item.name, item.role, task))

    for node, destination, _ in writes(graph):
        note(node, destination)
    for target in (cotrain.offload_into, cotrain.prefetch_into):
        for node in graph.find_nodes(op="call_function", target=target):
            note(node, node.args[0], task_name(node))
    for node in graph.find_nodes(op="call_function", target=host_region):
        called: Any = node.args[0]
        arguments: Any = node.args[3]
        region: Any = placed.module.get_submodule(str(called.target))
        given = dict(zip(region.graph.find_nodes(op="placeholder"), arguments, strict=True))
        for _, destination, _ in writes(region.graph):
            note(node, given[destination], task_name(node))
    return found
