"""The eager lowering: ATen's own kernels, in the order of the graph but for small updates.

The reference for exactness. An error of a process group is said in the words of the user's step
(`exchange_failed`).

Measured: what a finished step has left to measure it by, made a `Timeline` when somebody asks.

Making one takes as long as a small op for every op of the step. What is kept for it holds numbers
and names, and no tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from cotrain_compile.backends.eager.calls import AlikeOps, Call, Write, calls_of
from cotrain_compile.backends.eager.lock_step import PlannedPeak, in_lock_step
from cotrain_compile.capture.nodes.storages import is_view
from cotrain_compile.distribute.meet import first_line
from cotrain_compile.errors import CotrainError, ExchangeFailed
from cotrain_compile.graph import StepGraph, returned_values
from cotrain_compile.graph.collectives import is_collective, is_wait, kind_of, stand_in
from cotrain_compile.graph.user_lines import user_line
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Lane
from cotrain_compile.plan.timeline import Span, Timeline, exchange_of
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.network import ThrottledNetwork
from cotrain_compile.runtime.ops import Runtime, current_runtime
from cotrain_compile.support.collector import with_room


def _alone(node: fx.Node) -> None:
    """Before an exchange, where no other rank has to be met."""


class EagerProgram:
    """Runs a placed graph and notes when each op ran.

    A value is freed after its last use, at once where it has none. `before_write` is called before
    each node that writes a parameter, state or buffer, or starts what does, `before_exchange`
    before each that begins an exchange between ranks, where the step is no dry run; `written` has
    the writes of these and of all nodes before, the first `ended` of them of nodes that came to
    their end. `env` has the values at hand. Where the `room` that the plan leaves is known, small
    updates run in lock step. `fx.Interpreter` does the same at three times the cost.
    """

    def __init__(
        self,
        placed: StepGraph,
        device: Device,
        before_write: Callable[[], None],
        more_writes: Mapping[fx.Node, Sequence[Write]] | None = None,
        before_exchange: Callable[[fx.Node], None] = _alone,
        room: PlannedPeak | None = None,
    ) -> None:
        graph = placed.module.graph
        self.written: list[Write] = []
        self.ended = 0
        self.env: dict[fx.Node, Any] = {}
        self._constants = {
            node: attrgetter(str(node.target))(placed.module)
            for node in graph.find_nodes(op="get_attr")
        }
        self._inputs = list(graph.find_nodes(op="placeholder"))
        self._calls = calls_of(placed, more_writes or {})
        if room is not None:
            self._calls = in_lock_step(self._calls, room)
        # They cost nothing, and no dataflow knows them: they are no part of a profile.
        self._views_of_passes = {
            node for node in graph.nodes if node.name not in placed.phases and is_view(node)
        }
        self._outputs: Any = list(returned_values(placed))
        self._marks: list[Any] = []
        # When a throttled network began an exchange and had brought it, by the op that begins it.
        self._brought: dict[fx.Node, tuple[float, float]] = {}
        self._device, self._meter = device, device.meter
        self._is_dry_run = False
        self._runtime: Runtime = device
        self._counts = device.counts_device
        self._before_write = before_write
        self._before_exchange = before_exchange

    def timing(self) -> Callable[[], list[Span]]:
        """What tells when each op of the last step ran, where the device times them."""
        calls, marks, seconds = self._calls, self._marks, self._device.clock()
        untold, brought = self._views_of_passes, self._brought

        # An op's span begins where the node before it ended: what it takes to get from one op to
        # the next is part of the step's time.
        def spans() -> list[Span]:
            on_device = [
                span
                for call, start, end in zip(calls, marks, marks[1:], strict=False)
                if end is not None and call.carry is None and call.node not in untold
                for span in self._spans(call, seconds(start), seconds(end))
            ]
            return [*on_device, *_exchanges(calls, marks[1:], brought, seconds)]

        return spans

    def _spans(self, call: Call, start_s: float, end_s: float) -> Iterator[Span]:
        """When it ran; ops in lock step share its time evenly."""
        if not call.rows:
            yield Span(Lane.DEVICE, self._name(call), start_s, end_s)
            return
        each_s = (end_s - start_s) / len(call.nodes)
        for number, node in enumerate(call.nodes):
            began_s = start_s + number * each_s
            yield Span(Lane.DEVICE, node.name, began_s, began_s + each_s)

    def begin_step(self) -> None:
        """From here on nothing has been written."""
        self.written, self.ended = [], 0

    @with_room
    def run_step(self, inputs: Sequence[Any], *, dry_run: bool = False) -> Any:
        """Run the step once on `inputs`, in the order of its placeholders.

        `dry_run` leaves out the nodes that write into an input, and asks no other rank. What a
        step that failed leaves behind stays alive until `forget`.
        """
        self.begin_step()
        self._is_dry_run = dry_run
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
        if call.is_plain:
            return self._run_op(call)
        if call.rows:
            return self._run_rows(call.rows)
        if self._is_dry_run and call.overwrites_input:
            return self.env[call.node.args[0]]  # type: ignore[index]
        if call.writes:
            self._note_writes(call)
        if call.carry is not None:
            result = call.carry(self._runtime, self.env.__getitem__)
            self.ended = len(self.written)
            if call.together:
                self.env.update(zip(call.together, result, strict=True))
                return result[-1]
            return result
        if call.exchanges and not self._is_dry_run:
            self._before_exchange(call.node)
        result = self._run_op(call)
        self.ended = len(self.written)
        if self._device.network is not None and not self._is_dry_run:
            self._take_its_time(call, self._device.network)
        if call.takes is not None:  # items of a tuple go one by one
            source, index = call.takes
            self.env[source][index] = None
        if call.last_readers:
            return [item if i in call.last_readers else None for i, item in enumerate(result)]
        return result

    def _run_rows(self, rows: Sequence[AlikeOps]) -> Any:
        """The result of their last node. What is made in rows is counted by its bytes."""
        env, made, nbytes = self.env, list[Any](), list[int]()
        for row in rows:
            try:
                given = [column(env, made) for column in row.columns]
                if row.copies and self._is_dry_run and row.overwrites_input:
                    results = given[0]
                else:
                    if row.writes:
                        self._note_writes(row)
                    results = row.compute(*given)
                    self.ended = len(self.written)
                nbytes.append(0 if row.copies else sum(value.nbytes for value in results))
                self._count_more(nbytes[-1], row.nodes[0].name)
            except Exception as error:
                error.add_note(f"in {row.nodes[0].name} and ops of other updates that are alike")
                made.clear()  # the frames of the error know it
                given, results = [], ()
                raise
            made.append(results)
            env.update((node, results[place]) for place, node in row.kept)
            last, given, results = results[-1], [], ()
            for done in row.done_with:
                made[done] = None
                self._count_more(-nbytes[done], row.nodes[0].name)
        return last

    def _count_more(self, nbytes: int, where: str) -> None:
        if self._counts and nbytes:
            self._meter.hold(nbytes, Tier.DEVICE, where)

    def _note_writes(self, call: Call | AlikeOps) -> None:
        if call.writes and not self._is_dry_run:
            self._before_write()
            self.written += call.writes

    def _run_op(self, call: Call) -> Any:
        try:
            result = call.compute(self.env) if call.is_plain else self._carry_out(call)
            return self._counted(call, result) if call.is_new else result
        except Exception as error:
            told = exchange_failed(call.node, error)
            if told is not None:
                raise told from error
            if call.node.stack_trace:
                error.add_note(f"in {call.node.name}, which comes from\n{call.node.stack_trace}")
            raise

    def _carry_out(self, call: Call) -> Any:
        instead = stand_in(call.node) if call.exchanges and self._is_dry_run else None
        if instead is None:
            return call.compute(self.env)
        given: Any = fx.node.map_arg(call.node.args, self.env.__getitem__)
        return instead(*given)

    def _counted(self, call: Call, result: Any) -> Any:
        """`result`, counted by the meter and in a storage of its own size."""
        if not isinstance(result, torch.Tensor):
            if self._counts:
                self._meter.track(result, Tier.DEVICE, call.node.name)
            return result
        storage = result.untyped_storage()
        found_bytes = storage.nbytes()
        if self._counts:
            self._meter.count(storage, Tier.DEVICE, call.node.name, found_bytes)
        if call.may_be_spare and found_bytes > call.traced_bytes and found_bytes > result.nbytes:
            result = _without_spare_storage(result)
            if self._counts:
                self._meter.track(result, Tier.DEVICE, call.node.name)
        return result

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


def _without_spare_storage(result: torch.Tensor) -> torch.Tensor:
    """`result`, moved to a storage of its own size where that is smaller.

    Some kernels return a reduced value in the storage of what they reduced (`mse_loss` on the CPU):
    a scalar would keep megabytes alive that no plan knows of. Its strides stay, also with gaps
    between elements: they are those that the ops behind it were traced with.
    """
    own = torch.empty_strided(
        result.shape, result.stride(), dtype=result.dtype, device=result.device
    )
    is_smaller = own.untyped_storage().nbytes() < result.untyped_storage().nbytes()
    return own.copy_(result) if is_smaller else result


GO_ON = (
    "Another rank has failed or died, hangs, or takes longer than the timeout of the process "
    "group: look at the first error of the other ranks"
)
RANKS_DIFFER = (
    "Other ranks may have updated theirs, so that parameters may differ between ranks: start all "
    "ranks again from a checkpoint"
)


def exchange_failed(node: fx.Node, error: Exception) -> ExchangeFailed | None:
    """The error to raise where `node` lets ranks exchange data; None for all other nodes."""
    if isinstance(error, CotrainError) or not (is_collective(node) or is_wait(node)):
        return None
    begun = node.all_input_nodes[0] if is_wait(node) else node
    kind = kind_of(begun) or "exchange"
    line = user_line(begun.stack_trace) or user_line(node.stack_trace) or f"op {begun.name}"
    return ExchangeFailed(
        f"{line}: the {kind} that this line needs ({begun.name}) came to no end: "
        f"{first_line(error)}. {GO_ON}"
    )


class Measurement:
    """The step that `program` has just ended on `device`, as `rank` of several."""

    def __init__(self, program: EagerProgram, device: Device, rank: int | None = None) -> None:
        self._rank = rank
        self._began_at = time.time() - (time.perf_counter() - device.origin_s)
        self.peak_bytes = device.peak_bytes()
        self._op_spans, self._task_spans = program.timing(), device.timing()
        self._origin_s = device.origin_s
        # Copied: what the user frees between two steps is no part of the first one.
        self._curve = {
            tier: samples.copy()
            for tier, samples in device.meter.curve.items()
            if device.counts_device or tier is Tier.HOST
        }

    @cached_property
    def timeline(self) -> Timeline:
        """What the step did."""
        return Timeline(
            source="measured",
            spans=(*self._op_spans(), *self._task_spans()),
            peak_bytes=self.peak_bytes,
            memory={
                tier: tuple((at_s - self._origin_s, used_bytes) for at_s, used_bytes in samples)
                for tier, samples in self._curve.items()
            },
            rank=self._rank,
            began_at=self._began_at,
        )
