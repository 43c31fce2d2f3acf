"""CompiledStep: the callable that torch.compile runs, with its plan and what it measured."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from cotrain_compile.backends.eager import EagerProgram
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import StepFailed
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.placement.engine import Periodic
from cotrain_compile.placement.explain import Explanation, explain
from cotrain_compile.placement.predict import predict_steady_state
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import STEP_BEGINS, Plan, Timeline
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.interrupts import HeldInterrupt
from cotrain_compile.runtime.ops import running_on

GO_ON = "load the last checkpoint before going on"


class CompiledStep:
    """One compiled training step.

    `problem` is what had to be decided, `plan` what was, `graph` the placed step graph, `predicted`
    the simulator's timeline and `measured` that of the last step (None before the first).
    """

    def __init__(
        self, problem: Problem, plan: Plan, graph: StepGraph, device: EmulatedDevice
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.graph = graph
        self.measured: Timeline | None = None
        self.steps = 0
        self.last_run_s = 0.0
        self._device = device
        self._interrupt = HeldInterrupt()
        self._torn = Torn({})
        self._program = EagerProgram(graph, device.meter, self._interrupt.hold)
        self._tiers = [plan.placement.homes.get(item.name, Tier.DEVICE) for item in graph.inputs]
        self._constants = [
            getattr(graph.module, str(node.target)) for node in graph.nodes if node.op == "get_attr"
        ]

    @property
    def predicted(self) -> Timeline:
        """The simulator's timeline of one step."""
        return self.plan.predicted

    def predict_steps(self, count: int = 8) -> Periodic:
        """The step repeated: predicted seconds of the first one, and from one to the next."""
        plan = self.plan
        return predict_steady_state(
            self.problem, plan.placement, plan.tasks, plan.moved, steps=count
        )

    def explain(self, param: str) -> Explanation:
        """Why a parameter is where it is, and what the step would take with it kept otherwise.

        Raises `PlanError` when the step has no such parameter.
        """
        return explain(self.problem, self.plan, param)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run one step on the tensors of the graph's inputs; called by torch.compile.

        Raises `StepFailed` when a step before failed while it updated and nothing has been loaded
        since, and when this one does; else what went wrong, with a note that nothing was changed.
        """
        self._refuse_torn(inputs)
        device = self._device
        with record_function(STEP_BEGINS):
            device.start_step()
        self._program.start_step(device.origin_s)
        try:
            self._count_inputs(inputs)
            with running_on(device):
                outputs = self._program.run_step(inputs)
        except BaseException as error:
            self._interrupt.hold()
            device.drain()
            torn = self._tear(inputs)
            self._release_interrupt_quietly()
            if torn and isinstance(error, Exception):
                raise StepFailed(f"{str(error).rstrip('.')}. {torn}") from error
            error.add_note(torn or self._nothing_changed())
            raise
        finally:
            self.last_run_s = time.monotonic()
        self.steps += 1
        self._measure()
        try:
            self._interrupt.release()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("The step was finished first: parameters and states are consistent.")
            raise
        return outputs

    def _count_inputs(self, inputs: Sequence[Any]) -> None:
        meter = self._device.meter
        for value, tier, item in zip(inputs, self._tiers, self.graph.inputs, strict=True):
            if item.role is Role.BATCH and isinstance(value, torch.Tensor):
                meter.track_batch(value, item.name)
            else:
                meter.track(value, tier, item.name)
        for constant in self._constants:
            if isinstance(constant, torch.Tensor):
                meter.track(constant, Tier.DEVICE, "a constant")

    def _measure(self) -> None:
        meter = self._device.meter
        self.measured = Timeline(
            source="measured",
            spans=(*self._program.spans, *self._device.spans()),
            peak_bytes=dict(meter.peak_bytes),
            memory={
                tier: tuple((seconds - self._device.origin_s, used) for seconds, used in curve)
                for tier, curve in meter.curve.items()
            },
        )

    def _tear(self, inputs: Sequence[Any]) -> str:
        """Note what the failed step has updated; say it in words, "" where it is nothing."""
        finished, broken_off = self._device.finished(), self._device.broken_off()
        updates = [write for write in self._program.written if write.is_update]
        ahead = [w.name for w in updates if w.task is None or w.task in finished]
        half = [w.name for w in updates if w.task in broken_off]
        named = self._named(inputs)
        self._torn = Torn({name: named[name] for name in (*ahead, *half)})
        if not (ahead or half):
            return ""
        said = []
        if ahead:
            said.append(f"{len(ahead)} tensors are one step ahead of the rest ({_few(ahead)})")
        if half:
            said.append(f"{len(half)} tensors may be half written ({_few(half)})")
        return f"The step failed while it updated: {' and '.join(said)}; {GO_ON}"

    def _refuse_torn(self, inputs: Sequence[Any]) -> None:
        torn = self._torn.names(self._named(inputs)) if self._torn.left else []
        if torn:
            raise StepFailed(
                f"an earlier step failed while it updated, and {len(torn)} tensors are still as it "
                f"left them ({_few(torn)}); {GO_ON}"
            )

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return {item.name: value for item, value in zip(self.graph.inputs, inputs, strict=True)}

    def _nothing_changed(self) -> str:
        statistics = [write.name for write in self._program.written]
        but = f"; its forward has updated {_few(statistics)}" if statistics else ""
        return f"No parameter or optimizer state was changed by this step{but}."

    def _release_interrupt_quietly(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # the error being raised ends the step anyway
            self._interrupt.release()


class Torn:
    """Tensors by name that a failed step has left apart from the rest, until they are loaded.

    A write to a tensor raises its version. So does AOTAutograd, by one, each time before it calls
    the step; what has risen further since the failure was written.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._calls = 0
        self.left = {
            name: (weakref.ref(tensor.untyped_storage()), tensor._version)
            for name, tensor in tensors.items()
        }

    def names(self, tensors: Mapping[str, Any]) -> list[str]:
        """Those that are in `tensors` as they were left; to be asked once in every call."""
        self._calls += 1
        return [
            name
            for name, (storage, version) in self.left.items()
            if tensors[name].untyped_storage() is storage()
            and tensors[name]._version <= version + self._calls
        ]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
