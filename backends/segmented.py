"""The segmented program: compiled segments and the tasks between them, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.eager import EagerProgram, Write
from cotrain_compile.backends.lower import LoweredStep
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.allocations import is_profiled, most_allocated
from cotrain_compile.runtime.device import Device


class SegmentedProgram(EagerProgram):
    """Runs a lowered step; what is no segment runs as in an `EagerProgram`.

    A segment gets the only reference to an input that nobody needs afterwards, so that it frees it
    at its last use.
    """

    def __init__(
        self, lowered: LoweredStep, device: Device, before_update: Callable[[], None]
    ) -> None:
        super().__init__(lowered.segmented.step, device, before_update)
        self._segments = lowered.segmented.segments
        self._code = lowered.code
        self._inside_bytes: dict[fx.Node, int] = {}  # most bytes a segment takes while it runs
        self._is_recording = False
        step = lowered.segmented.step
        for call in step.module.graph.find_nodes(op="call_module"):
            self._writes[call] = self._written_by(call, step.input_of_node)

    def _written_by(self, call: fx.Node, inputs: Any) -> list[Write]:
        written = self._segments[str(call.target)].written
        items = [inputs.get(call.args[position].name) for position in written]  # type: ignore[union-attr]
        roles = (Role.PARAM, Role.OPTIMIZER_STATE, Role.BUFFER)
        return [Write(i.name, i.role) for i in items if i is not None and i.role in roles]

    def run_step(self, inputs: Sequence[Any], *, rehearse: bool = False) -> Any:
        """As of `EagerProgram`; a rehearsal puts back what segments have written."""
        unknown = not self._inside_bytes and not self._device.sees_all_memory
        self._is_recording = unknown and not is_profiled()
        self._recorded: dict[fx.Node, int] = {}
        outputs = super().run_step(inputs, rehearse=rehearse)
        self._inside_bytes |= self._recorded
        return outputs

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module":
            if not self._rehearses:
                return self._run_segment(n)
            written: Any = [n.args[p] for p in self._segments[str(n.target)].written]
            with _put_back([self.env[node] for node in written if node.op == "placeholder"]):
                return self._run_segment(n)
        # The end of what was allocated while nothing was recorded goes unnoticed later.
        return self._record(n, super().run_node) if self._is_recording else super().run_node(n)

    def _run_segment(self, call: fx.Node) -> Any:
        self._note_writes(call)
        segment = self._segments[str(call.target)]
        try:
            if self._is_recording:
                results = self._record(call, self._call)
            else:
                inside_bytes = self._inside_bytes.get(call, 0)
                self._device.meter.add_for_a_moment(inside_bytes, Tier.DEVICE, segment.name)
                results = self._call(call)
            self._device.meter.track(results, Tier.DEVICE, segment.name)
        except Exception as error:
            if segment.stack_trace:
                error.add_note(f"in {segment.name}, which begins with\n{segment.stack_trace}")
            raise
        self._note_end(segment.name)
        return self._without_unused(call, results)

    def _call(self, call: fx.Node) -> list[Any]:
        arguments = [self.env[node] for node in call.args]  # type: ignore[index]
        for node in self.user_to_last_uses.get(call, ()):
            self.env[node] = None
        return list(self._code[str(call.target)](arguments))

    def _record(self, node: fx.Node, run: Callable[[fx.Node], Any]) -> Any:
        """What `run(node)` returns. Its allocations, the same in every step, are counted."""
        meter = self._device.meter
        before_bytes = meter.used_bytes[Tier.DEVICE]
        result, inside_bytes = most_allocated(lambda: run(node))
        if node.op == "call_module":
            self._recorded[node] = inside_bytes
            freed_bytes = before_bytes - meter.used_bytes[Tier.DEVICE]
            meter.add_for_a_moment(inside_bytes + freed_bytes, Tier.DEVICE, node.name)
        return result


@contextmanager
def _put_back(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give `tensors` their values back in the end, from copies on the host."""
    before = [tensor.to("cpu", copy=True) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
