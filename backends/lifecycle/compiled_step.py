"""CompiledStep: the callable that torch.compile runs, with its plan and what it measured."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from cotrain_compile.analysis.throughput import Throughput, throughput
from cotrain_compile.backends.eager.lock_step import PlannedPeak
from cotrain_compile.backends.eager.program import RANKS_DIFFER, EagerProgram, Measurement
from cotrain_compile.backends.inductor.lower import LoweredStep
from cotrain_compile.backends.inductor.program import SegmentedProgram
from cotrain_compile.backends.lifecycle.deferred import (
    GO_ON,
    DeferredWork,
    few,
    read_by_deferred,
    wait_for_deferred,
)
from cotrain_compile.backends.lifecycle.notebook import facts_of, html_table
from cotrain_compile.backends.lifecycle.one_home import (
    memory_of,
    refuse_given_in,
    refuse_two_homes,
)
from cotrain_compile.backends.lifecycle.workspace import beyond_plan
from cotrain_compile.dataflow import PERSISTENT_ROLES, Role
from cotrain_compile.distribute.agree import ALONE, Together
from cotrain_compile.errors import ExchangeFailed, StepFailed
from cotrain_compile.graph import StepGraph, returned_values
from cotrain_compile.graph.random_ops import generators_in
from cotrain_compile.machine import Tier
from cotrain_compile.placement.explain.explain import PlannedStep
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan
from cotrain_compile.plan.timeline import STEP_BEGINS, Timeline
from cotrain_compile.runtime.allocations import unprofiled
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.emulated import in_dry_run
from cotrain_compile.runtime.host.speculation import Gate
from cotrain_compile.runtime.ops import running_on
from cotrain_compile.runtime.process.signals import HeldSignals
from cotrain_compile.runtime.task_nodes import Offload, Prefetch, view_of


class CompiledStep(PlannedStep):
    """One compiled training step.

    `graph` is the placed step graph of its `plan`, `predicted` the simulator's timeline and
    `measured` that of the last step (None before the first). `lowered` has the segments that
    Inductor compiled, None where ATen's kernels run one by one. `dry_run_device_bytes` is the
    peak of the device in the last dry run (None before it): no step takes more. `last_step_s` is
    what the last step took, from its call to its return (None before the first), `last_run_s` when
    it ended, `has_changed_something` whether it had changed a tensor of the user's when it failed.
    `step_ended` is called with the step's peak bytes by tier after each one, when all is
    in order again.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        graph: StepGraph,
        device: Device,
        lowered: LoweredStep | None = None,
        together: Together = ALONE,
    ) -> None:
        super().__init__(problem, plan)
        self.graph = graph
        self.steps = 0
        self.dry_run_device_bytes: int | None = None
        self.step_ended: Callable[[Mapping[Tier, int]], None] = _ignore
        self.last_run_s = 0.0
        self.last_step_s: float | None = None
        self.has_changed_something = False
        self._device = device
        self._signals = HeldSignals()
        self._is_running = threading.Lock()
        self.deferred = DeferredWork(device)
        self.lowered = lowered
        self._together = together
        asks = together.exchange_begins
        if lowered is None:
            # On a card list ops are kernels of their own, of which nobody promises the same bits.
            room = PlannedPeak(problem, plan) if device.compute_device.type == "cpu" else None
            self._program = EagerProgram(
                graph, device, self._signals.hold, before_exchange=asks, room=room
            )
        else:
            self._program = SegmentedProgram(lowered, device, self._signals.hold, asks)
        self._last: Measurement | None = None
        self._carries = bool(plan.deferred)
        self._constants = [
            getattr(graph.module, str(node.target)) for node in graph.nodes if node.op == "get_attr"
        ]
        self._copied_inputs = read_by_deferred(graph, plan)
        self._draws = bool(generators_in(graph.module.graph))
        self._gradients_on_host = [
            position
            for position, value in enumerate(returned_values(graph))
            if isinstance(value, fx.Node) and isinstance(view_of(value), Offload)
        ]
        tiers = [plan.placement.homes.get(item.name, Tier.DEVICE) for item in graph.inputs]
        is_homed = [item.role in PERSISTENT_ROLES for item in graph.inputs]
        self._homed = [(p, tier) for p, tier in enumerate(tiers) if is_homed[p]]
        self._given = [(p, tier) for p, tier in enumerate(tiers) if not is_homed[p]]
        written = {name for op in problem.dataflow.ops for name in op.writes}
        self._written = [p for p, _ in self._homed if graph.inputs[p].name in written]
        views = map(view_of, graph.nodes)
        fetched = {view.source.name for view in views if isinstance(view, Prefetch)}
        self._fetched = {item.name for item in graph.inputs if item.node in fetched}
        self._written_memory: Mapping[int, str] = {}  # where these are, with their names
        self._at: list[int] = []  # positions of the tensors among the homed
        self._left_at: list[int] = []  # where these were when they were last at home
        self._is_remembered = False

    @property
    def measured(self) -> Timeline | None:
        """What the last step did that came to its end; None before the first."""
        return self._last.timeline if self._last is not None else None

    @property
    def guesses(self) -> Gate | None:
        """How often the guesses of its updates were wrong, and whether it guesses in the next step.

        None where the plan has no updates on guesses.
        """
        return self._device.gate

    @property
    def is_metered(self) -> bool:
        """Whether what the device holds is counted op by op: every run then has the same peak."""
        return not self._device.sees_all_memory

    @property
    def measured_reserved_bytes(self) -> int | None:
        """The most that was reserved on the card in the last step; None without a card."""
        return self._device.reserved_bytes

    def throughput(self, tokens: float) -> Throughput:
        """Tokens per second, flops per second and MFU of a step that trains on `tokens` tokens.

        Of the last step, and of the plan before the first. Raises ValueError where `tokens` is not
        above 0.
        """
        step_s = self.last_step_s or self.predicted.makespan_s
        return throughput(self.problem.dataflow, self.problem.machine, step_s, tokens)

    def __repr__(self) -> str:
        told = "; ".join(f"{name}: {value}" for name, value in facts_of(self.plan))
        return f"<CompiledStep {told}>"

    def _repr_html_(self) -> str:
        """In a notebook: what the plan is, as a table."""
        return html_table(facts_of(self.plan))

    def __call__(self, inputs: list[Any]) -> Any:
        """Run one step on the tensors of the graph's inputs; called by torch.compile.

        Raises `StepFailed` when a step before failed while it updated and nothing has been loaded
        since, when another thread is at it, and when this one fails while it updates; else what
        went wrong, with a note that nothing was changed.
        """
        with self._alone():
            began_s = time.perf_counter()
            outputs = self._run(inputs)
            self.last_step_s = time.perf_counter() - began_s
            return outputs

    def _run(self, inputs: list[Any]) -> Any:
        self.has_changed_something = False
        self._device.refuse_if_unusable()
        wait_for_deferred(but=self.deferred)
        self._refuse_partial(inputs)
        inputs = self._with_own_values(inputs)
        device = self._device
        if self._have_moved(inputs):
            self.bring_home(inputs)
        given = ((self.graph.inputs[p].name, inputs[p]) for p, _ in self._given)
        refuse_given_in(self._written_memory, given)
        if self._together.checks_replicas:
            self.deferred.wait()
        self._together.step_begins(inputs)
        with record_function(STEP_BEGINS):
            device.start_step()
        self._program.begin_step()
        try:
            self._count_inputs(inputs)
            with running_on(device):
                outputs = self._program.run_step(inputs)
            device.finish_step()
        except BaseException as error:
            self._signals.hold()
            device.drain()
            device.take_back()
            self._program.forget()
            program = self._program
            left_partial = self.deferred.note_failure(
                program.written, self._named(inputs), program.ended
            )
            self.has_changed_something = bool(left_partial or program.written)
            self._release_signals_quietly()
            if isinstance(error, ExchangeFailed):
                left = left_partial or self._nothing_changed().rstrip(".")
                kind = StepFailed if left_partial else ExchangeFailed
                raise kind(f"{str(error).rstrip('.')}. {left}. {RANKS_DIFFER}") from error
            if left_partial and isinstance(error, Exception):
                raise StepFailed(f"{str(error).rstrip('.')}. {left_partial}") from error
            error.add_note(left_partial or self._nothing_changed())
            raise
        finally:
            self.last_run_s = time.monotonic()
        for position in self._gradients_on_host:
            device.is_at_home(outputs[position])
        self.steps += 1
        if self._carries:
            self.deferred.step_returns(self._program.written, self._named(inputs))
        self._last = Measurement(self._program, device, self._together.rank)
        self._together.step_ended()
        try:
            self._signals.release()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("The step was finished first: parameters and states are consistent.")
            raise
        self.step_ended(self._last.peak_bytes)
        return outputs

    def random_states(self) -> Sequence[tuple[int | None, torch.Tensor]]:
        """The states of the generators that the step draws from: a card's number, None: the CPU."""
        if not self._draws:
            return ()
        cards = [(n, torch.cuda.get_rng_state(n)) for n in self._device.random_state_devices()]
        return [(None, torch.get_rng_state()), *cards]

    def dry_run(self, inputs: Sequence[Any], *, again: bool = False) -> None:
        """Run the step without writing anything: what it takes in memory, it takes now.

        Done `again`, what the last dry run has left on the device counts, and what it took for a
        while does not. Random number state is put back. Raises what goes wrong, with all tensors as
        they were.
        """
        with self._alone():
            unprofiled(partial(self._dry_run, inputs, again=again))

    def measure_peak(self, inputs: Sequence[Any]) -> None:
        """A dry run to the end whatever the device's budget is: `peak_bytes` is of the whole step.

        For a step that the meter has refused: an allocator of a card cannot go on.
        """
        with self._alone(), self._device.meter.without_limit(Tier.DEVICE):
            unprofiled(partial(self._dry_run, inputs))

    def beyond_plan(self) -> Mapping[str, int]:
        """By op, the bytes that the last dry run took on the device beyond the plan.

        Nothing where the device was not metered op by op, as on a card.
        """
        if not isinstance(self._program, SegmentedProgram):
            return {}
        return beyond_plan(self.problem, self.plan, self._program.most_in_calls())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._is_running.acquire(blocking=False):
            raise StepFailed(
                "this step is at work in another thread, and this call has changed nothing; let "
                "one thread call it, or compile a step with a model of its own for each"
            )
        try:
            yield
        finally:
            self._is_running.release()

    def _dry_run(self, inputs: Sequence[Any], *, again: bool = False) -> None:
        device = self._device
        device.refuse_if_unusable()
        self.bring_home(inputs)
        device.start_step(again=again)
        try:
            self._count_inputs(inputs)
            # Only its type: `devices` says which accelerators there are.
            with torch.random.fork_rng(device.random_state_devices(), device_type="cuda"):
                with in_dry_run(device):
                    self._program.run_step(inputs, dry_run=True)
                device.finish_step()
            self.dry_run_device_bytes = device.peak_bytes()[Tier.DEVICE]
        finally:
            device.drain()
            device.forget()
            self._program.forget()

    def bring_home(self, inputs: Sequence[Any]) -> None:
        """Move the step's parameters, states and buffers to where the plan has their homes."""
        tensors = [(p, tier) for p, tier in self._homed if isinstance(inputs[p], torch.Tensor)]
        named = [(self.graph.inputs[p].name, inputs[p], tier) for p, tier in tensors]
        refuse_two_homes(named, self._fetched, {self.graph.inputs[p].name for p in self._written})
        self._device.bring_home([(inputs[position], tier) for position, tier in tensors])
        self._at = [position for position, _ in tensors]
        self._left_at = self._addresses(inputs)
        self._written_memory = memory_of(
            (self.graph.inputs[p].name, inputs[p]) for p in self._written
        )
        self._is_remembered = False

    def rest_on(self, tier: Tier, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let `tensors` of the step rest on `tier` until its next call; those that moved."""
        with self._alone():
            wait_for_deferred()
            return self._device.rest_on(tier, tensors)

    def _have_moved(self, inputs: Sequence[Any]) -> bool:
        """Whether a persistent tensor is elsewhere than where the last step found it at home.

        To ask each whether it is at home, and how large, takes milliseconds in a large model.
        """
        return self._left_at != self._addresses(inputs)

    def _addresses(self, inputs: Sequence[Any]) -> list[int]:
        tensors = [inputs[position] for position in self._at]
        return [self._device.memory_version, *map(torch.Tensor.data_ptr, tensors)]

    @property
    def rehearsed_device_bytes(self) -> int | None:
        """The name of `dry_run_device_bytes` before 0.2."""
        warnings.warn("it is dry_run_device_bytes now", DeprecationWarning, stacklevel=2)
        return self.dry_run_device_bytes

    @property
    def allowed_bytes(self) -> int:
        """What the step may take on the device: its budget and what no plan counts."""
        return self.plan.budgets[Tier.DEVICE] + self._device.slack_bytes

    @property
    def peak_bytes(self) -> Mapping[Tier, int]:
        """The most bytes on each tier in the last step or dry run, also where it failed."""
        return self._device.peak_bytes()

    def _count_inputs(self, inputs: Sequence[Any]) -> None:
        meter = self._device.meter
        if not (self._is_remembered and meter.recall()):
            homed = [(p, t) for p, t in self._homed if isinstance(inputs[p], torch.Tensor)]
            for position, tier in homed:
                meter.track(inputs[position], tier, self.graph.inputs[position].name)
            meter.remember(inputs[position] for position, _ in homed)
            self._is_remembered = True
        for position, tier in self._given:
            value, item = inputs[position], self.graph.inputs[position]
            if item.role is Role.BATCH and isinstance(value, torch.Tensor):
                meter.track_batch(value, item.name)
            else:
                meter.track(value, tier, item.name)
        for constant in self._constants:
            if isinstance(constant, torch.Tensor):
                meter.track(constant, Tier.DEVICE, "a constant")
        self._device.inputs_are_counted()

    def _with_own_values(self, inputs: Sequence[Any]) -> list[Any]:
        """`inputs` with copies of what the user may change while a deferred update reads it."""
        own = list(inputs)
        for position in self._copied_inputs:
            if isinstance(own[position], torch.Tensor):
                own[position] = own[position].clone()
        return own

    def _refuse_partial(self, inputs: Sequence[Any]) -> None:
        left = (
            self.deferred.partial.names(self._named(inputs)) if self.deferred.partial.left else []
        )
        if left:
            raise StepFailed(
                f"an earlier step failed while it updated, and {len(left)} tensors are still as it "
                f"left them ({few(left)}); {GO_ON}"
            )

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return {item.name: value for item, value in zip(self.graph.inputs, inputs, strict=True)}

    def _nothing_changed(self) -> str:
        statistics = [write.name for write in self._program.written]
        but = f"; its forward has updated {few(statistics)}" if statistics else ""
        return f"No parameter or optimizer state was changed by this step{but}."

    def _release_signals_quietly(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # the error being raised ends the step anyway
            self._signals.release()


def _ignore(peak_bytes: Mapping[Tier, int]) -> None:
    """Nobody wants to know."""
