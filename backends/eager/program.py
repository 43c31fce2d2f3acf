"""The eager lowering: ATen's own kernels, one node after the other. The reference for exactness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.eager.calls import Call, Write, calls_of
from cotrain_compile.backends.eager.exchanges import exchange_failed
from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.collectives import stand_in
from cotrain_compile.graph import StepGraph, returned_values
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane, Span, exchange_of
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.network import ThrottledNetwork
from cotrain_compile.runtime.ops import Runtime, current_runtime


def _alone(node: fx.Node) -> None:
    """Before an exchange, where no other rank has to be met."""


class EagerProgram:
    """Runs a placed graph and notes when each op ran.

    A value is freed after its last use, at once where it has none. `before_update` is called before
    each node that writes a parameter or state, or starts what does, `before_exchange` before each
    that begins an exchange between ranks, where the step is no rehearsal; `written` has the writes
    of these and of all nodes before, whether or not they came to their end. `env` has the values at
    hand. `fx.Interpreter` does the same, at twice the cost of a small op for every op.
    """

    def __init__(
        self,
        placed: StepGraph,
        device: Device,
        before_update: Callable[[], None],
        more_writes: Mapping[fx.Node, Sequence[Write]] | None = None,
        before_exchange: Callable[[fx.Node], None] = _alone,
    ) -> None:
        graph = placed.module.graph
        self.written: list[Write] = []
        self.env: dict[fx.Node, Any] = {}
        self._constants = {
            node: attrgetter(str(node.target))(placed.module)
            for node in graph.find_nodes(op="get_attr")
        }
        self._inputs = list(graph.find_nodes(op="placeholder"))
        self._calls = calls_of(placed, more_writes or {})
        # They cost nothing, and no dataflow knows them: they are no part of a profile.
        self._views_of_passes = {
            node for node in graph.nodes if node.name not in placed.phases and is_view(node)
        }
        self._outputs: Any = list(returned_values(placed))
        self._marks: list[Any] = []
        # When a throttled network began an exchange and had brought it, by the op that begins it.
        self._brought: dict[fx.Node, tuple[float, float]] = {}
        self._device = device
        self._rehearses = False
        self._runtime: Runtime = device
        self._counts = device.counts_device
        self._before_update = before_update
        self._before_exchange = before_exchange

    def timing(self) -> Callable[[], list[Span]]:
        """What tells when each op of the last step ran, where the device times them."""
        calls, marks, seconds = self._calls, self._marks, self._device.clock()
        untold, brought = self._views_of_passes, self._brought

        # An op's span begins where the node before it ended: what it takes to get from one op to
        # the next is part of the step's time.
        def spans() -> list[Span]:
            on_device = [
                Span(Lane.DEVICE, self._name(call), seconds(start), seconds(end))
                for call, start, end in zip(calls, marks, marks[1:], strict=False)
                if end is not None and call.carry is None and call.node not in untold
            ]
            return [*on_device, *_exchanges(calls, marks[1:], brought, seconds)]

        return spans

    def begin_step(self) -> None:
        """From here on nothing has been written."""
        self.written = []

    def run_step(self, inputs: Sequence[Any], *, rehearse: bool = False) -> Any:
        """Run the step once on `inputs`, in the order of its placeholders.

        `rehearse` leaves out the nodes that write into an input, and asks no other rank. What a
        step that failed leaves behind stays alive until `forget`.
        """
        self.begin_step()
        self._rehearses = rehearse
        values = self.env = {**self._constants, **dict(zip(self._inputs, inputs, strict=True))}
        self._runtime = current_runtime()
        mark, run_call = self._device.mark, self.run_call
        marks = self._marks = [mark()]
        self._brought = {}
        is_timed = marks[0] is not None
        # `torch.no_grad` is Python: a Ctrl-C in its own lines would leave the mode as it is here.
        was_on = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            for call in self._calls:
                values[call.node] = run_call(call)
                if is_timed:
                    marks.append(mark())
                for value in call.done_with:
                    del values[value]
        finally:
            torch._C._set_grad_enabled(was_on)
        # A gradient is often a view of what the graph computed. Kept in `p.grad` as a view, its
        # base would be one more input of the next step.
        outputs = [
            value.detach() if isinstance(value, torch.Tensor) else value
            for value in fx.node.map_arg(self._outputs, values.__getitem__)
        ]
        self.forget()
        return outputs

    def forget(self) -> None:
        """Free what a step that failed has left; nothing may still read it."""
        self.env.clear()  # the frames of an error know it too

    def run_call(self, call: Call) -> Any:
        """The value of one node: what later nodes need of it."""
        if self._rehearses and call.overwrites_input:
            return self.env[call.node.args[0]]  # type: ignore[index]
        if call.writes:
            self._note_writes(call)
        if call.carry is not None:
            return call.carry(self._runtime, self.env.__getitem__)
        if call.exchanges and not self._rehearses:
            self._before_exchange(call.node)
        result = self._run_op(call)
        if self._device.network is not None and not self._rehearses:
            self._take_its_time(call, self._device.network)
        if call.takes is not None:  # items of a tuple go one by one
            source, index = call.takes
            self.env[source][index] = None
        if call.last_readers:
            return [item if i in call.last_readers else None for i, item in enumerate(result)]
        return result

    def _note_writes(self, call: Call) -> None:
        if not self._rehearses:
            if call.updates:
                self._before_update()
            self.written += call.writes

    def _run_op(self, call: Call) -> Any:
        try:
            result = self._carry_out(call.node)
            if call.is_new and self._counts:
                self._device.meter.track(result, Tier.DEVICE, call.node.name)
        except Exception as error:
            told = exchange_failed(call.node, error)
            if told is not None:
                raise told from error
            if call.node.stack_trace:
                error.add_note(f"in {call.node.name}, which comes from\n{call.node.stack_trace}")
            raise
        if not call.may_be_spare:
            return result
        own = _without_spare_storage(result, call.traced_bytes)
        if own is not result and self._counts:
            self._device.meter.track(own, Tier.DEVICE, call.node.name)
        return own

    def _carry_out(self, node: fx.Node) -> Any:
        value, target = self.env.__getitem__, node.target
        if self._rehearses:
            target = stand_in(node) or target
        arguments: Any = fx.node.map_arg(node.args, value)
        keywords: Any = fx.node.map_arg(node.kwargs, value) if node.kwargs else {}
        return target(*arguments, **keywords)  # type: ignore[operator]

    def _take_its_time(self, call: Call, network: ThrottledNetwork) -> None:
        if call.exchanges:
            network.begin(call.node.name)
        elif call.awaits is not None:
            self._brought[call.awaits] = network.wait(call.awaits.name)

    def _name(self, call: Call) -> str:
        """What the span of a call is called."""
        return call.node.name


def _exchanges(
    calls: Sequence[Call],
    ends: Sequence[Any],
    brought: Mapping[fx.Node, tuple[float, float]],
    seconds: Callable[[Any], float],
) -> Iterator[Span]:
    """When each exchange was under way: until it was `brought`, where that is known.

    Else until the step had waited for it. They take turns.
    """
    awaited = {c.awaits: end for c, end in zip(calls, ends, strict=False) if c.awaits is not None}
    free_s = 0.0
    for call, end in zip(calls, ends, strict=False):
        began, done = brought.get(call.node, (end, awaited.get(call.node)))
        if call.exchanges and began is not None and done is not None:
            start_s = max(free_s, seconds(began))
            free_s = max(start_s, seconds(done))
            yield Span(Lane.NETWORK, exchange_of(call.node.name), start_s, free_s)


def _without_spare_storage(result: Any, traced_bytes: int) -> Any:
    """`result`, moved to a storage of its own size where the op left it in one larger than traced.

    Some kernels return a reduced value in the storage of what they reduced (`mse_loss` on the CPU):
    a scalar would keep megabytes alive that no plan knows of. Its strides stay, also with gaps
    between elements: they are those that the ops behind it were traced with.
    """
    if not isinstance(result, torch.Tensor):
        return result
    found_bytes = result.untyped_storage().nbytes()
    if found_bytes <= result.nbytes or found_bytes <= traced_bytes:
        return result
    own = torch.empty_strided(
        result.shape, result.stride(), dtype=result.dtype, device=result.device
    )
    return own.copy_(result) if own.untyped_storage().nbytes() < found_bytes else result
