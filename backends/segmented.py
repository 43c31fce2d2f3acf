"""The segmented program: compiled segments and the tasks between them, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.eager import EagerProgram, Write
from cotrain_compile.backends.lower import LoweredStep
from cotrain_compile.dataflow import Role
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.allocations import is_profiled, most_allocated
from cotrain_compile.runtime.meter import Meter


class SegmentedProgram(EagerProgram):
    """Runs a lowered step; what is no segment runs as in an `EagerProgram`.

    A segment gets the only reference to an input that nobody needs afterwards, so that it frees it
    at its last use.
    """

    def __init__(
        self, lowered: LoweredStep, meter: Meter, before_update: Callable[[], None]
    ) -> None:
        super().__init__(lowered.segmented.step, meter, before_update)
        self._segments = lowered.segmented.segments
        self._code = lowered.code
        self._inside_bytes: dict[str, int] = {}  # by the name of the call's target
        step = lowered.segmented.step
        for call in step.module.graph.find_nodes(op="call_module"):
            self._writes[call] = self._written_by(call, step.input_of_node)

    def _written_by(self, call: fx.Node, inputs: Any) -> list[Write]:
        written = self._segments[str(call.target)].written
        items = [inputs.get(call.args[position].name) for position in written]  # type: ignore[union-attr]
        roles = (Role.PARAM, Role.OPTIMIZER_STATE, Role.BUFFER)
        return [Write(i.name, i.role) for i in items if i is not None and i.role in roles]

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_module":
            return super().run_node(n)
        self._note_writes(n)
        result = self._run_segment(n)
        self._note_end(self._segments[str(n.target)].name)
        return self._without_unused(n, result)

    def _run_segment(self, call: fx.Node) -> list[torch.Tensor]:
        segment = self._segments[str(call.target)]
        arguments = [self.env[node] for node in call.args]  # type: ignore[index]
        for node in self.user_to_last_uses.get(call, ()):
            self.env[node] = None
        try:
            results = self._metered(str(call.target), arguments)
            self._meter.track(results, Tier.DEVICE, segment.name)
        except Exception as error:
            if segment.stack_trace:
                error.add_note(f"in {segment.name}, which begins with\n{segment.stack_trace}")
            raise
        return results

    def _metered(self, name: str, arguments: list[Any]) -> list[torch.Tensor]:
        """The results of a segment. Its allocations, the same in every step, are recorded once."""
        where, code = self._segments[name].name, self._code[name]
        if name in self._inside_bytes:
            self._meter.add_for_a_moment(self._inside_bytes[name], Tier.DEVICE, where)
            return list(code(arguments))
        if is_profiled():
            return list(code(arguments))
        used_bytes = self._meter.used_bytes[Tier.DEVICE]
        results, inside_bytes = most_allocated(lambda: list(code(arguments)))
        self._inside_bytes[name] = inside_bytes
        freed_bytes = used_bytes - self._meter.used_bytes[Tier.DEVICE]
        self._meter.add_for_a_moment(inside_bytes + freed_bytes, Tier.DEVICE, where)
        return results
