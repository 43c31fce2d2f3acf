"""Picture: a step folded into boxes with arrows between. A Dataflow and a Plan in, a value out.

At level "model" a box is a phase, at "layer" a layer in a phase, or several where there are many,
at "op" an op. One layer can be opened: its modules are boxes, at level "op" its ops, and of the
rest there is only what touches them. With a plan, its tasks are boxes too, folded as the ops are,
and what the host runs is there and not on the device.

A reader takes in about twenty boxes. At level "layer" a picture is folded until it has no more:
layers that differ by a number become one, then the optimizer and the tasks of each kind, then what
is within a module, one depth after the other (`foldings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal, assert_never

from cotrain_compile.dataflow import Dataflow, Phase
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.placed import as_placed
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer
from cotrain_compile.viz.names import REST, Layers, layers

Level = Literal["model", "layer", "op"]

# Of the module of a layer, so many parts are kept when more has to be folded.
_DEPTHS = (3, 2, 1)
_PASSES = (Phase.FORWARD.value, Phase.BACKWARD.value)


@dataclass(frozen=True)
class DrawnWork:
    """An op or a task: where it belongs, and `group`: a phase, "offload", "prefetch" or "host".

    `nbytes` is what a task moves; 0 for ops.
    """

    name: str
    module: str
    layer: str
    group: str
    tier: Tier
    nbytes: int = 0


# The box of a work; None where the picture leaves it out.
Fold = Callable[[DrawnWork], str | None]


def foldings(level: Level, opened: str, layers: Iterable[str]) -> tuple[Fold, ...]:
    """How to fold a step that has these `layers`, of which one may be `opened`."""
    if opened:
        return _around(level, opened)
    match level:
        case "op":
            return (lambda work: work.name,)
        case "model":
            return (lambda work: work.group,)
        case "layer":
            return _by_layer(series(layers))


def series(layers: Iterable[str]) -> Mapping[str, str]:
    """`net.0`, `net.1`, `net.2` -> `net.0-2`, for each of `layers` that ends in a number."""
    numbers: dict[str, list[int]] = {}
    for layer in layers:
        stem, _, last = layer.rpartition(".")
        if last.isdigit():
            numbers.setdefault(stem, []).append(int(last))
    return {
        f"{stem}.{number}": f"{stem}.{min(of_stem)}-{max(of_stem)}"
        for stem, of_stem in numbers.items()
        for number in of_stem
        if len(of_stem) > 1
    }


def _by_layer(of_series: Mapping[str, str]) -> tuple[Fold, ...]:
    def each(work: DrawnWork) -> str:
        return f"{work.group} {work.layer}"

    def alike(work: DrawnWork) -> str:
        return f"{work.group} {of_series.get(work.layer, work.layer)}"

    def passes(work: DrawnWork, depth: int | None = None) -> str:
        if work.group not in _PASSES:
            return work.group
        folded = of_series.get(work.layer, work.layer)
        return f"{work.group} {'.'.join(folded.split('.')[:depth])}"

    shallow = (partial(passes, depth=depth) for depth in _DEPTHS)
    return each, alike, passes, *shallow, lambda work: work.group


def _around(level: Level, opened: str) -> tuple[Fold, ...]:
    """Foldings of what is in a layer; of all else there are the neighbours, without their tasks."""

    def elsewhere(work: DrawnWork, of_layer: bool = True) -> str | None:
        if work.tier is not Tier.DEVICE:
            return None
        return f"{work.group} {work.layer}" if of_layer else f"{work.group} elsewhere"

    def each(work: DrawnWork) -> str | None:
        return work.name if work.layer == opened else elsewhere(work)

    def modules(work: DrawnWork, depth: int | None, of_layer: bool) -> str | None:
        if work.layer != opened:
            return elsewhere(work, of_layer)
        if work.group not in _PASSES:
            return f"{work.group} {opened}"
        return f"{work.group} {'.'.join(work.module.split('.')[:depth])}"

    if level == "op":
        return (each,)
    child, layer = (len(opened.split(".")) + more for more in (1, 0))
    shapes = ((None, True), (child, True), (child, False), (layer, False))
    return tuple(partial(modules, depth=depth, of_layer=of_layer) for depth, of_layer in shapes)


# What is read on one screen.
MOST_BOXES = 20
# When folded, arrows of no more than this are left out: scalars join every layer to every other.
SCALARS_BYTES = 1024


class BoxKind(StrEnum):
    """What an arrow says: a value is read, a task is started or waited for, one follows another."""

    DATA = "data"
    ISSUE = "issue"
    WAIT = "wait"
    THEN = "then"


@dataclass(frozen=True)
class Box:
    """`count` ops or tasks: `group` is a phase, "offload", "prefetch" or "host".

    `layers` are those that they are of. `nbytes` is what tasks move; 0 for ops.
    """

    name: str
    layers: tuple[str, ...]
    group: str
    tier: Tier
    count: int
    nbytes: int = 0


@dataclass(frozen=True)
class Arrow:
    """From box to box; `nbytes` of different buffers for DATA, else 0."""

    source: str
    target: str
    kind: BoxKind
    nbytes: int = 0


@dataclass(frozen=True)
class Picture:
    """Boxes in the order of the step, tasks after the ops; arrows in no order."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def picture(
    dataflow: Dataflow,
    plan: Plan | None = None,
    *,
    level: Level = "layer",
    layer: str = "",
    most_boxes: int = MOST_BOXES,
) -> Picture:
    """The picture of a step, placed by `plan` where there is one; `layer` is opened.

    At level "layer" it is folded until it has at most `most_boxes`, if it can be.
    Raises `OptionError` when the step has no such layer.
    """
    run = as_placed(dataflow, plan.placement) if plan else dataflow
    known = layers(run)
    if layer and layer not in set(known.of_op.values()):
        names = ", ".join(dict.fromkeys(known.of_op.values()))
        raise OptionError(f"the step has no layer {layer!r}; it has {names}")
    works = _works(run, known, plan)
    for fold in foldings(level, layer, dict.fromkeys(known.of_op.values())):
        drawn = _drawn(_Folded(run, plan, works, fold), layer)
        if len(drawn.boxes) <= most_boxes:
            break
    return drawn


def _drawn(folded: _Folded, layer: str) -> Picture:
    """All that was folded, or what there is of `layer` and touches it."""
    arrows = tuple(folded.arrows())
    if not layer:
        return Picture(tuple(folded.boxes.values()), arrows)
    opened = {box.name for box in folded.boxes.values() if box.layers == (layer,)}
    arrows = tuple(a for a in arrows if a.source in opened or a.target in opened)
    shown = opened | {name for a in arrows for name in (a.source, a.target)}
    return Picture(tuple(b for b in folded.boxes.values() if b.name in shown), arrows)


def _works(run: Dataflow, known: Layers, plan: Plan | None) -> tuple[DrawnWork, ...]:
    """The ops of the device in their order, then the tasks."""
    tasks = plan.tasks if plan else ()
    moved = {op for region in (plan.host_regions if plan else ()) for op in region.ops}
    layer_of = known.of_tasks(plan) if plan else {}
    ops = (
        DrawnWork(
            op.name,
            known.module_of_op[op.name],
            known.of_op[op.name],
            op.phase.value,
            Tier.DEVICE,
        )
        for op in run.ops
        if op.name not in moved
    )
    return *ops, *(_of_task(task, layer_of.get(task.name, REST)) for task in tasks)


def _of_task(task: Task, layer: str) -> DrawnWork:
    match task:
        case Transfer():
            return DrawnWork(task.name, layer, layer, task.direction, Tier.HOST, task.nbytes)
        case HostRegion():
            return DrawnWork(task.name, layer, layer, "host", Tier.HOST)
        case _:
            assert_never(task)


class _Folded:
    """Which box each op and task is in, and the boxes."""

    def __init__(
        self, run: Dataflow, plan: Plan | None, works: tuple[DrawnWork, ...], fold: Fold
    ) -> None:
        self.dataflow, self.plan = run, plan
        self.boxes: dict[str, Box] = {}
        self.box_of: dict[str, str] = {}
        regions = plan.host_regions if plan else ()
        self.region_of = {op: region.name for region in regions for op in region.ops}
        for work in works:
            if (box := fold(work)) is not None:
                self._fold(work, box)
        self.is_folded = any(box.count > 1 for box in self.boxes.values())

    def _fold(self, work: DrawnWork, name: str) -> None:
        """Put an op or task into its box."""
        empty = Box(name, (), work.group, work.tier, 0)
        before = self.boxes.get(name, empty)
        self.boxes[name] = replace(
            before,
            layers=tuple(dict.fromkeys((*before.layers, work.layer))),
            count=before.count + 1,
            nbytes=before.nbytes + work.nbytes,
        )
        self.box_of[work.name] = name

    def arrows(self) -> Iterator[Arrow]:
        read: dict[tuple[str, str], set[str]] = {}
        for source, target, buffer in self._reads():
            if source != target:
                read.setdefault((source, target), set()).add(buffer)
        for (source, target), buffers in read.items():
            nbytes = sum(self.dataflow.buffer[name].nbytes for name in buffers)
            if not self.is_folded or nbytes > SCALARS_BYTES:
                yield Arrow(source, target, BoxKind.DATA, nbytes)
        yield from dict.fromkeys(a for a in self._of_tasks() if a.source != a.target)

    def _reads(self) -> Iterator[tuple[str, str, str]]:
        """Who made what each op reads: (box, box, buffer)."""
        maker: dict[str, str] = {}
        for op in self.dataflow.ops:
            box = self.box_of.get(self.region_of.get(op.name, op.name))
            if box is None:
                continue
            for name in op.reads:
                if name in maker:
                    yield maker[name], box, name
            maker |= dict.fromkeys(op.writes, box)

    def _of_tasks(self) -> Iterator[Arrow]:
        for task in self.plan.tasks if self.plan else ():
            starts, ends = self._flows(task)
            if starts and task.issue_after is not None:
                yield from self._arrow(task.issue_after, task.name, BoxKind.ISSUE)
            if ends and task.wait_before is not None:
                yield from self._arrow(task.name, task.wait_before, BoxKind.WAIT)
            for before in task.after:
                yield from self._arrow(before, task.name, BoxKind.THEN)

    def _flows(self, task: Task) -> tuple[bool, bool]:
        """Whether the op after which `task` starts, and the one that waits for it, have arrows.

        Where boxes are folded, not where it says only when: a prefetch takes nothing from the op
        that starts it, and what waits for an offload takes nothing from that.
        """
        direction = task.direction if isinstance(task, Transfer) and self.is_folded else ""
        return direction != "prefetch", direction != "offload"

    def _arrow(self, source: str, target: str, kind: BoxKind) -> Iterator[Arrow]:
        """Between two that are both in the picture."""
        if source in self.box_of and target in self.box_of:
            yield Arrow(self.box_of[source], self.box_of[target], kind)
