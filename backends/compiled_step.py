"""CompiledStep: the callable that torch.compile runs, with its plan and what it measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from cotrain_compile.backends.eager import EagerProgram
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CotrainError, StepFailed
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.placement.engine import Periodic
from cotrain_compile.placement.predict import predict_steady_state
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.interrupts import HeldInterrupt
from cotrain_compile.runtime.ops import running_on


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
        return predict_steady_state(self.problem, plan.placement, plan.tasks, steps=count)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run one step on the tensors of the graph's inputs; called by torch.compile."""
        device = self._device
        device.start_step()
        try:
            self._count_inputs(inputs)
            with running_on(device):
                outputs = self._program.run_step(inputs, device.origin_s)
        except BaseException as error:
            device.drain()
            self._release_interrupt_quietly()
            if (explained := self._explained(error)) is error:
                raise
            raise explained from error
        finally:
            self.last_run_s = time.monotonic()
        self.steps += 1
        self._measure()
        self._interrupt.release()
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

    def _explained(self, error: BaseException) -> BaseException:
        """The error with the state it leaves the user's tensors in."""
        finished = self._device.finished()
        written = self._program.written
        ahead = [name for name in written if not name.startswith("update.") or name in finished]
        if not isinstance(error, Exception):
            return error
        if not ahead:
            if isinstance(error, CotrainError):
                error.add_note("No parameter or optimizer state was changed by this step.")
            return error
        names = ", ".join(name.removeprefix("update.") for name in ahead[:5])
        return StepFailed(
            f"{error}. The step failed while it updated: {len(ahead)} tensors or parameters are "
            f"one step ahead of the rest ({names}{', ...' if len(ahead) > 5 else ''}); load the "
            "last checkpoint before going on"
        )

    def _release_interrupt_quietly(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # the error being raised ends the step anyway
            self._interrupt.release()
