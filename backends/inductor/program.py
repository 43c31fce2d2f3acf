"""The segmented program: compiled segments and the tasks between them, one after the other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.eager.calls import Call, Write
from cotrain_compile.backends.eager.program import EagerProgram
from cotrain_compile.backends.inductor.compile_graph import Code
from cotrain_compile.backends.inductor.lower import LoweredStep
from cotrain_compile.backends.inductor.segments import Segment
from cotrain_compile.dataflow import PERSISTENT_ROLES
from cotrain_compile.errors import LoweringError
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.allocations import is_profiled, most_allocated
from cotrain_compile.runtime.device import Device


class SegmentedProgram(EagerProgram):
    """Runs a lowered step; what is no segment runs as in an `EagerProgram`.

    A segment gets the only reference to an input that nobody needs afterwards, so that it frees it
    at its last use.
    """

    def __init__(
        self,
        lowered: LoweredStep,
        device: Device,
        before_write: Callable[[], None],
        before_exchange: Callable[[fx.Node], None],
    ) -> None:
        self._segments = lowered.segmented.segments
        self._code = lowered.code
        self._of_call: dict[fx.Node, tuple[Segment, Code]] = {}  # looked up once
        self._inside_bytes: dict[fx.Node, int] = {}  # most bytes a segment takes while it runs
        self._is_recording = False
        step = lowered.segmented.step
        calls = step.module.graph.find_nodes(op="call_module")
        for call in calls:
            name = str(call.target)
            self._of_call[call] = self._segments[name], self._code[name]
        written = {call: self._written_by(call, step.input_of_node) for call in calls}
        super().__init__(step, device, before_write, written, before_exchange)

    def _written_by(self, call: fx.Node, inputs: Any) -> list[Write]:
        written = self._segments[str(call.target)].written
        items = [inputs.get(call.args[position].name) for position in written]  # type: ignore[union-attr]
        return [
            Write(i.name, i.role) for i in items if i is not None and i.role in PERSISTENT_ROLES
        ]

    def _name(self, call: Call) -> str:
        is_segment = call.node.op == "call_module"
        return self._segments[str(call.node.target)].name if is_segment else super()._name(call)

    def run_step(self, inputs: Sequence[Any], *, dry_run: bool = False) -> Any:
        """As of `EagerProgram`; a dry run puts back what segments have written."""
        unknown = not self._inside_bytes and not self._device.sees_all_memory
        self._is_recording = unknown and not is_profiled()
        self._recorded: dict[fx.Node, int] = {}
        outputs = super().run_step(inputs, dry_run=dry_run)
        self._inside_bytes |= self._recorded
        return outputs

    def run_call(self, call: Call) -> Any:
        node = call.node
        if node.op == "call_module":
            if not self._is_dry_run:
                self._run_segment(call)
                return None
            self._refuse_other_tensors(call)
            written: Any = [node.args[p] for p in self._segments[str(node.target)].written]
            with _put_back([self.env[place] for place in written if place.op == "placeholder"]):
                self._run_segment(call)
            return None
        # The end of what was allocated while nothing was recorded goes unnoticed later.
        if self._is_recording:
            return self._record(call, super().run_call)
        if node in self._inside_bytes:
            self._count_inside(call)
        return super().run_call(call)

    def _refuse_other_tensors(self, call: Call) -> None:
        """Compiled code reads memory as the trace says it is, whatever is there."""
        segment = self._segments[str(call.node.target)]
        for source, traced in zip(call.node.args, segment.inputs, strict=True):
            value = self.env[source]  # type: ignore[index]
            told, found = _as_read(traced, value), _as_read(value, traced)
            if told != found:
                raise LoweringError(
                    f"{source} is {found}, but its op told the trace {told}, for which "
                    f"segment {segment.name!r} was compiled: it would read the memory wrongly. "
                    "Correct what is registered as the op's fake kernel, or run the step with "
                    'lowering="eager"',
                    segment=segment.name,
                )

    def _run_segment(self, call: Call) -> None:
        self._note_writes(call)
        segment, _ = self._of_call[call.node]
        try:
            if self._is_recording:
                results = self._record(call, self._call)
            else:
                self._count_inside(call)
                results = self._call(call)
            self.ended = len(self.written)
            if self._counts:
                self._device.meter.track(results, Tier.DEVICE, segment.name)
        except Exception as error:
            if segment.stack_trace:
                error.add_note(f"in {segment.name}, which begins with\n{segment.stack_trace}")
            raise
        env = self.env
        for item, index in call.items:
            env[item] = results[index]

    def _call(self, call: Call) -> Sequence[Any]:
        env, (_, code) = self.env, self._of_call[call.node]
        arguments = [env[node] for node in call.node.args]  # type: ignore[index]
        for node in call.done_with:
            env[node] = None
        return code(arguments)

    def _record(self, call: Call, run: Callable[[Call], Any]) -> Any:
        """What `run(call)` returns. Its allocations, the same in every step, are counted."""
        meter = self._device.meter
        before_bytes = meter.used_bytes[Tier.DEVICE]
        result, inside_bytes = most_allocated(lambda: run(call))
        if call.carry is None:  # a task's copies are counted one by one, on their tiers
            self._recorded[call.node] = inside_bytes
            freed_bytes = before_bytes - meter.used_bytes[Tier.DEVICE]
            meter.add_for_a_moment(inside_bytes + freed_bytes, Tier.DEVICE, self._name(call))
        return result

    def _count_inside(self, call: Call) -> None:
        if inside_bytes := self._inside_bytes.get(call.node, 0):
            self._device.meter.add_for_a_moment(inside_bytes, Tier.DEVICE, self._name(call))

    def most_in_calls(self) -> list[tuple[tuple[str, ...], int]]:
        """The ops of each segment of the last dry run, or op on its own, and the most bytes then.

        Nothing where the device has not been metered call by call.
        """
        if self._device.sees_all_memory:
            return []
        most = [0] * len(self._calls)
        # What has died is noticed one by one at the next change: only where it rises is a sample
        # what there was.
        for (_, before), (at_s, used_bytes) in pairwise(self._device.meter.curve[Tier.DEVICE]):
            call = bisect_left(self._marks, at_s) - 1
            if used_bytes > before and 0 <= call < len(most):
                most[call] = max(most[call], used_bytes)
        ops = [self._ops_of(call) for call in self._calls]
        return [(names, nbytes) for names, nbytes in zip(ops, most, strict=True) if names]

    def _ops_of(self, call: Call) -> tuple[str, ...]:
        if call.node.op == "call_module":
            return self._segments[str(call.node.target)].ops
        return (call.node.name,) if call.carry is None else ()


@contextmanager
def _put_back(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give `tensors` their values back in the end, from copies on the host."""
    before = [tensor.to("cpu", copy=True) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


def _as_read(tensor: torch.Tensor, other: torch.Tensor) -> str:
    """What compiled code takes for granted of `tensor`, as text.

    Strides count where there is something to step over. A scalar on the host is read by the host
    wherever its `other` was traced: the seeds of some kernels of attention are such.
    """
    steps = tuple(s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    is_host_scalar = tensor.dim() == other.dim() == 0 and "cpu" in (
        tensor.device.type,
        other.device.type,
    )
    where = "" if is_host_scalar else f" on {tensor.device.type}"
    told = f"{tensor.dtype}{where} of shape {tuple(tensor.shape)}"
    return f"{told} and strides {steps}" if tensor.numel() else told
