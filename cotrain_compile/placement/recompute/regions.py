"""Regions: the stretches of the forward inside of which values are made again.

In: a Dataflow and its recomputable buffers. Out: the regions, each a run of forward ops, and which
buffers lie inside of one. What leaves a region, read by the forward elsewhere, is never made again:
the replay of a region starts from there, as that of a checkpoint does from its inputs.

Regions are the layers of the model, which are numbered modules (`transformer.h.3`), each with what
leads to it from the one before, where these hold most of what could be made again. Otherwise, as
for a model in functional code or one long `Sequential`, the forward is cut where few bytes cross.

Stretches of a chain of ops are cut so that in the end what leaves a stretch is kept, and while the
backward is in a stretch all of it:

    minimise   sum over stretches of   bytes leaving  +  bytes made^2 / bytes made by all

as for checkpoints in a chain (Chen et al., arXiv 1604.06174), but for the size of a stretch, which
is the mean over all bytes instead of the largest: a head with large logits, which no cut makes
smaller, leaves the layers something to gain. Found by dynamic programming over the last cut.

Rules: what users make again, layer by layer.

In: a Dataflow and its recomputable buffers. Out: which of its values are made again. They know
neither times nor budgets; a plan should be better. A layer is one of `regions_of`; what leaves it
is kept, as by a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.placement.remembered import once

Bytes = NDArray[np.float64]


@dataclass(frozen=True)
class Value:
    """What an op makes: that op, the last one that reads it, and its size."""

    maker: int
    last: int
    nbytes: int


def stretches(kept_bytes: Sequence[int], values: Sequence[Value]) -> list[range]:
    """The ops 0, 1, ... in stretches; op i makes `kept_bytes[i]` that the backward reads."""
    count = len(kept_bytes)
    made: Bytes = np.concatenate(([0.0], np.cumsum(kept_bytes, dtype=np.float64)))
    by_maker, by_last = _sizes(values, count)
    alive: Bytes = np.zeros(count)
    least: Bytes = np.zeros(count + 1)
    starts = [0] * (count + 1)  # by where a stretch ends, where it starts; first of equal ones
    for end in range(1, count + 1):
        alive[end - 1] += by_maker[end - 1]
        for maker, nbytes in by_last[end - 1]:
            alive[maker] -= nbytes
        leaving = np.cumsum(alive[:end][::-1])[::-1]  # of a stretch, by where it starts
        costs = least[:end] + leaving + (made[end] - made[:end]) ** 2 / max(made[-1], 1.0)
        starts[end] = int(costs.argmin())
        least[end] = costs.min()
    return _followed(starts)


def _sizes(values: Sequence[Value], count: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Bytes of what each op makes for others; by op, what it is the last to read."""
    by_maker = [0] * count
    by_last: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for value in values:
        if value.last > value.maker:
            by_maker[value.maker] += value.nbytes
            by_last[value.last].append((value.maker, value.nbytes))
    return by_maker, by_last


def _followed(starts: Sequence[int]) -> list[range]:
    """The stretches, from the last one back."""
    found, end = list[range](), len(starts) - 1
    while end > 0:
        found.append(range(starts[end], end))
        end = starts[end]
    return found[::-1]


# Modules are taken for regions where they hold at least this share of the recomputable bytes that
# the backward reads, and none holds more than this share alone: that would be no part of a step.
_ENOUGH, _TOO_MUCH = 0.5, 0.6
# Levels of numbered modules that are tried, from the outermost inwards.
_DEPTHS = 3


@dataclass(frozen=True)
class RecomputeRegion:
    """A run of the forward: its ops by position in the Dataflow, views left out."""

    name: str
    ops: tuple[int, ...]


def regions_of(dataflow: Dataflow, recomputable: Collection[str]) -> tuple[RecomputeRegion, ...]:
    """The regions of a step, in program order; none where there is nothing to make again."""
    saved = saved_bytes(dataflow, recomputable)
    total = sum(saved.values())
    if not total:
        return ()
    for depth in range(1, _DEPTHS + 1):
        regions = tuple(_with_leads(dataflow, _numbered(dataflow, depth)))
        held = [sum(saved.get(n, 0) for n in names) for names in _inside(dataflow, regions)]
        if sum(held) >= _ENOUGH * total and max(held) <= _TOO_MUCH * total:
            return regions
    return tuple(_between_cuts(dataflow, saved))


def inside(
    dataflow: Dataflow, regions: Sequence[RecomputeRegion], recomputable: Collection[str]
) -> tuple[frozenset[str], ...]:
    """The recomputable buffers of each region that do not leave it."""
    return tuple(names & frozenset(recomputable) for names in _inside(dataflow, regions))


def saved_bytes(dataflow: Dataflow, names: Collection[str]) -> Mapping[str, int]:
    """Of `names`, the bytes of those that are read after the forward that made them."""
    read = _read_later(dataflow).intersection(names)
    return {name: dataflow.buffer[name].nbytes for name in sorted(read)}


@once
def _read_later(dataflow: Dataflow) -> frozenset[str]:
    later = (op for op in dataflow.ops if op.phase is not Phase.FORWARD)
    return frozenset(name for op in later for name in op.reads)


def _inside(dataflow: Dataflow, regions: Sequence[RecomputeRegion]) -> list[frozenset[str]]:
    """What the ops of each region make and no forward op of elsewhere reads."""
    region_at = {position: i for i, region in enumerate(regions) for position in region.ops}
    made_in: dict[str, int] = {}
    leaving: set[str] = {buffer.name for buffer in dataflow.buffers if buffer.is_output}
    for position, op in _forward(dataflow):
        here = region_at.get(position, -1)
        leaving.update(name for name in op.reads if made_in.get(name, -1) != here)
        for name in op.writes:
            made_in.setdefault(name, here)
    found: list[set[str]] = [set() for _ in regions]
    for name, at in made_in.items():
        if at >= 0 and name not in leaving:
            found[at].add(name)
    return [frozenset(names) for names in found]


def _forward(dataflow: Dataflow) -> Iterator[tuple[int, Op]]:
    """Forward ops that do something, by position. A view is part of whatever reads it."""
    for position, op in enumerate(dataflow.ops):
        if op.phase is Phase.FORWARD and op.writes:
            yield position, op


def _numbered(dataflow: Dataflow, depth: int) -> Iterator[RecomputeRegion]:
    """Runs of ops of one numbered module, which is inside of `depth` - 1 others.

    What gathers the parameters of the next one begins between them, and ends none.

    A module that is called again later, as for the next micro-batch, is another region then.
    """
    name, ops = "", list[int]()
    exchanging = _exchanging(dataflow)
    for position, op in enumerate(dataflow.ops):
        here = _numbered_module(op.module, depth) if _does_something(op, exchanging) else ""
        ends = op.phase is Phase.BACKWARD or (here and here != name)
        if ends and ops:
            yield RecomputeRegion(name, tuple(ops))
            ops = []
        if here:
            name = here
            ops.append(position)
    if ops:
        yield RecomputeRegion(name, tuple(ops))


def _with_leads(
    dataflow: Dataflow, regions: Iterable[RecomputeRegion]
) -> Iterator[RecomputeRegion]:
    """`regions` with what leads to each from the one before: ops of no numbered module, as one that
    joins a skipped value to a U-Net's, and a module that is a single op, as what makes that larger.

    Otherwise these would be kept: they leave where they are made.
    """
    exchanging = _exchanging(dataflow)
    lead: RecomputeRegion | None = None  # a single op that may lead to the next region
    end: int | None = None
    for region in regions:
        way = range(region.ops[0] if end is None else end + 1, region.ops[0])
        is_first = end is None or any(dataflow.ops[at].phase is Phase.BACKWARD for at in way)
        between = (at for at in way if _does_something(dataflow.ops[at], exchanging))
        ops = region.ops if is_first else (*between, *region.ops)
        end = region.ops[-1]
        if lead is not None:
            if is_first or len(region.ops) == 1:
                yield lead
            else:
                ops = (*lead.ops, *ops)
            lead = None
        if len(region.ops) == 1:
            lead = RecomputeRegion(region.name, ops)
        else:
            yield RecomputeRegion(region.name, ops)
    if lead is not None:
        yield lead


def _does_something(op: Op, exchanging: Collection[str]) -> bool:
    return op.phase is Phase.FORWARD and bool(op.writes) and op.name not in exchanging


def _exchanging(dataflow: Dataflow) -> set[str]:
    """Exchanges, waits for them, and what is made for exchanges alone."""
    found = {op.name for op in dataflow.ops if op.collective is not None or op.awaits}
    if found:
        elsewhere = {n for op in dataflow.ops if op.name not in found for n in op.reads}
        given = {n for op in dataflow.ops if op.name in found for n in op.reads} - elsewhere
        found |= {op.name for op in dataflow.ops if given.intersection(op.writes)}
    return found


def _numbered_module(path: str, depth: int) -> str:
    """`path` up to its `depth`-th number, or up to its last where it has fewer; "" without any."""
    parts = path.split(".")
    ends = [position for position, part in enumerate(parts, 1) if part.isdigit()]
    return ".".join(parts[: ends[:depth][-1]]) if ends else ""


def _between_cuts(dataflow: Dataflow, saved: Mapping[str, int]) -> Iterator[RecomputeRegion]:
    """Stretches out of which few bytes go, of the forward before each backward."""
    for round_ in _rounds(dataflow):
        ops = [dataflow.ops[position] for position in round_]
        kept_bytes = [sum(saved.get(name, 0) for name in op.writes) for op in ops]
        for stretch in stretches(kept_bytes, _values(dataflow, ops)):
            name = f"{ops[stretch.start].name}..{ops[stretch.stop - 1].name}"
            yield RecomputeRegion(name, round_[stretch.start : stretch.stop])


def _rounds(dataflow: Dataflow) -> Iterator[tuple[int, ...]]:
    """Positions of the forward ops between two backwards, as of each micro-batch."""
    ops: list[int] = []
    for position, op in enumerate(dataflow.ops):
        if op.phase is Phase.BACKWARD and ops:
            yield tuple(ops)
            ops = []
        elif op.phase is Phase.FORWARD and op.writes:
            ops.append(position)
    if ops:
        yield tuple(ops)


def _values(dataflow: Dataflow, ops: Sequence[Op]) -> list[Value]:
    """What `ops` make for each other."""
    last = {name: number for number, op in enumerate(ops) for name in op.reads}
    return [
        Value(number, last[name], dataflow.buffer[name].nbytes)
        for number, op in enumerate(ops)
        for name in op.writes
        if dataflow.buffer[name].role is Role.TEMPORARY and name in last
    ]


def every_layer(dataflow: Dataflow, recomputable: Collection[str]) -> frozenset[str]:
    """Each layer is made again from what enters it (Chen et al., arXiv 1604.06174)."""
    return made_again(dataflow, regions_of(dataflow, recomputable), recomputable)


def every_other_layer(dataflow: Dataflow, recomputable: Collection[str]) -> frozenset[str]:
    """The first layer is made again, the next one is kept, and so on."""
    return made_again(dataflow, regions_of(dataflow, recomputable)[::2], recomputable)


def made_again(
    dataflow: Dataflow, regions: Sequence[RecomputeRegion], recomputable: Collection[str]
) -> frozenset[str]:
    """All inside of `regions` that the backward reads, and what of the rest that is made from."""
    found: set[str] = set()
    for region, free in zip(regions, inside(dataflow, regions, recomputable), strict=True):
        needed = set(saved_bytes(dataflow, free))
        for position in reversed(region.ops):
            op = dataflow.ops[position]
            if needed.intersection(op.writes):
                needed.update(free.intersection(op.reads))
        found |= needed
    return frozenset(found)
