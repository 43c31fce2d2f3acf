"""Rows: a step as its kinds of layers from input to output, with what a plan does to each as marks.

A Dataflow and a Plan in, rows out. Layers that differ by their number and hold as many ops and
bytes are one row with a count. A mark says what happens to a row, to how many of its layers and to
how many bytes; no arrow has to cross the picture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.placement.placed import as_placed
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Lane, Plan, UpdateMode
from cotrain_compile.viz.graph.picture import series
from cotrain_compile.viz.kinds import copied_kinds
from cotrain_compile.viz.names import Layers, layers


class Sign(StrEnum):
    """What a plan does to a layer."""

    FETCHED = "weights fetched from the host"
    AWAY = "activations offloaded and prefetched"
    AGAIN = "made again for the backward"
    PARTS = "runs in parts"
    ON_HOST = "updated on the host"
    STREAMED = "optimizer states streamed"


@dataclass(frozen=True)
class Mark:
    """A sign on so many `layers` of a row; `nbytes` of it, or in so many `parts`, else 0."""

    sign: Sign
    layers: int
    nbytes: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Row:
    """`count` layers that are alike: ops, seconds by phase (0 without a plan), bytes, marks."""

    name: str
    count: int
    ops: Mapping[Phase, int]
    seconds: Mapping[Phase, float]
    param_bytes: int
    marks: tuple[Mark, ...] = ()


def rows(dataflow: Dataflow, plan: Plan | None = None) -> tuple[Row, ...]:
    """The rows of a step in the order of its forward, with the marks of `plan`."""
    facts = _Facts(dataflow, plan)
    members: dict[tuple[object, ...], list[str]] = {}
    of_series = series(facts.order)
    for layer in facts.order:
        alike = (facts.ops[layer][Phase.FORWARD], facts.param_bytes[layer])
        members.setdefault((of_series.get(layer, layer), *alike), []).append(layer)
    return tuple(_row(facts, own, of_series) for own in members.values())


def _row(facts: _Facts, own: list[str], of_series: Mapping[str, str]) -> Row:
    name = of_series.get(own[0], own[0]) if len(own) > 1 else own[0]
    return Row(
        name=name,
        count=len(own),
        ops={phase: sum(facts.ops[layer][phase] for layer in own) for phase in Phase},
        seconds={phase: sum(facts.seconds[layer][phase] for layer in own) for phase in Phase},
        param_bytes=sum(facts.param_bytes[layer] for layer in own),
        marks=tuple(_marks(facts, own)),
    )


def _marks(facts: _Facts, own: list[str]) -> Iterator[Mark]:
    for sign in Sign:
        marked = [layer for layer in own if facts.marked[sign][layer]]
        if not marked:
            continue
        amount = [facts.marked[sign][layer] for layer in marked]
        if sign is Sign.PARTS:
            yield Mark(sign, len(marked), parts=max(amount))
        else:
            yield Mark(sign, len(marked), nbytes=sum(amount))


@dataclass
class _Facts:
    """What is known of each layer: its ops and their seconds, its parameters, what is marked."""

    dataflow: Dataflow
    plan: Plan | None
    ops: defaultdict[str, Counter[Phase]] = field(init=False)
    seconds: defaultdict[str, defaultdict[Phase, float]] = field(init=False)
    param_bytes: Counter[str] = field(init=False)
    marked: dict[Sign, Counter[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.ops, self.param_bytes = defaultdict(Counter), Counter()
        self.seconds = defaultdict(lambda: defaultdict(float))
        self.marked = {sign: Counter() for sign in Sign}
        known = layers(self.dataflow)
        for op in self.dataflow.ops:
            self.ops[known.of_op[op.name]][op.phase] += 1
        for buffer in self.dataflow.buffers:
            if buffer.role is Role.PARAM:
                self.param_bytes[known.of_buffer[buffer.name]] += buffer.nbytes
        self.order = tuple(self.ops)
        if self.plan is not None:
            self._time(self.plan)
            self._mark(known, self.plan)

    def _time(self, plan: Plan) -> None:
        run = as_placed(self.dataflow, plan.placement)
        of_op, phase = layers(run).of_op, {op.name: op.phase for op in run.ops}
        for span in plan.predicted.lane(Lane.DEVICE):
            if span.name in phase:
                self.seconds[of_op[span.name]][phase[span.name]] += span.end_s - span.start_s

    def _mark(self, known: Layers, plan: Plan) -> None:
        placement, kinds = plan.placement, copied_kinds(plan)
        of_task = known.of_tasks(plan)
        for task in plan.transfers:
            kind, is_fetch = kinds[task.buffer], task.direction == "prefetch"
            sign = {"weight": Sign.FETCHED, "activation": Sign.AWAY}.get(kind)
            if sign is not None and is_fetch:
                self.marked[sign][of_task[task.name]] += task.nbytes
        parts = split_regions(self.dataflow, placement.splits)
        made = layers(parts).of_buffer
        for name in placement.recomputed:
            if name in parts.buffer:
                self.marked[Sign.AGAIN][made.get(name, "")] += parts.buffer[name].nbytes
        for region in self.dataflow.regions:
            if count := placement.splits.get(region.name):
                for layer in {known.of_op[op.name] for op in region.ops}:
                    self.marked[Sign.PARTS][layer] = count
        for param, mode in placement.updates.items():
            self._mark_update(known.of_buffer[param], param, mode)

    def _mark_update(self, layer: str, param: str, mode: UpdateMode) -> None:
        group = self.dataflow.update[param]
        nbytes = sum(self.dataflow.buffer[name].nbytes for name in (param, *group.states))
        match mode:
            case UpdateMode.HOST | UpdateMode.HOST_STREAMED:
                self.marked[Sign.ON_HOST][layer] += nbytes
            case UpdateMode.STREAMED:
                self.marked[Sign.STREAMED][layer] += nbytes
            case UpdateMode.RESIDENT:
                pass
