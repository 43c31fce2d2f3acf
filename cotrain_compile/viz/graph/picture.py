"""Picture: a step folded into boxes with arrows between. A Dataflow and a Plan in, a value out.

At level "model" a box is a phase, at "layer" a layer in a phase, at "op" an op. One layer can be
opened: its ops are boxes, and of the rest there is only what touches them. With a plan, its tasks
are boxes too, folded as the ops are, and what the host runs is there and not on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, assert_never

from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.as_placed import as_placed
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer
from cotrain_compile.viz.layers import REST, layers

Level = Literal["model", "layer", "op"]


# When folded, arrows of no more than this are left out: scalars join every layer to every other.
SCALARS_BYTES = 1024


class Kind(StrEnum):
    """What an arrow says: a value is read, a task is started or waited for, one follows another."""

    DATA = "data"
    ISSUE = "issue"
    WAIT = "wait"
    THEN = "then"


@dataclass(frozen=True)
class Box:
    """`count` ops or tasks: `group` is a phase, "offload", "prefetch" or "host".

    `nbytes` is what tasks move; 0 for ops.
    """

    name: str
    layer: str
    group: str
    tier: Tier
    count: int
    nbytes: int = 0


@dataclass(frozen=True)
class Arrow:
    """From box to box; `nbytes` of different buffers for DATA, else 0."""

    source: str
    target: str
    kind: Kind
    nbytes: int = 0


@dataclass(frozen=True)
class Picture:
    """Boxes in the order of the step, tasks after the ops; arrows in no order."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def picture(
    dataflow: Dataflow, plan: Plan | None = None, *, level: Level = "layer", layer: str = ""
) -> Picture:
    """The picture of a step, placed by `plan` where there is one; `layer` is opened.

    Raises `OptionError` when the step has no such layer.
    """
    folded = _Folded(dataflow, plan, level, layer)
    arrows = tuple(folded.arrows())
    if not layer:
        return Picture(tuple(folded.boxes.values()), arrows)
    opened = {box.name for box in folded.boxes.values() if box.layer == layer}
    arrows = tuple(a for a in arrows if a.source in opened or a.target in opened)
    shown = opened | {name for a in arrows for name in (a.source, a.target)}
    return Picture(tuple(b for b in folded.boxes.values() if b.name in shown), arrows)


class _Folded:
    """Which box each op and task is in, and the boxes."""

    def __init__(self, dataflow: Dataflow, plan: Plan | None, level: Level, opened: str) -> None:
        run = as_placed(dataflow, plan.placement) if plan else dataflow
        self.dataflow, self.plan, self.level, self.opened = run, plan, level, opened
        self.layers = layers(run)
        if opened and opened not in set(self.layers.of_op.values()):
            known = ", ".join(dict.fromkeys(self.layers.of_op.values()))
            raise OptionError(f"the step has no layer {opened!r}; it has {known}")
        self.boxes: dict[str, Box] = {}
        self.box_of: dict[str, str] = {}
        regions = plan.host_regions if plan else ()
        self.region_of = {op: region.name for region in regions for op in region.ops}
        for op in run.ops:
            if op.name not in self.region_of:
                where = self.layers.of_op[op.name]
                self._fold(op.name, where, op.phase.value, Tier.DEVICE, 0)
        for task in plan.tasks if plan else ():
            self._fold_task(task, self.layers.of_tasks(plan) if plan else {})

    def _fold_task(self, task: Task, layer_of: Mapping[str, str]) -> None:
        layer = layer_of.get(task.name, REST)
        match task:
            case Transfer():
                self._fold(task.name, layer, task.direction, Tier.HOST, task.nbytes)
            case HostRegion():
                self._fold(task.name, layer, "host", Tier.HOST, 0)
            case _:
                assert_never(task)

    def _fold(self, name: str, layer: str, group: str, tier: Tier, nbytes: int) -> None:
        """Put an op or task into its box."""
        if self.level == "op" or layer == self.opened:
            box = name
        elif self.level == "model" and not self.opened:
            box, layer = group, ""
        else:
            box = f"{group} {layer}"
        before = self.boxes.get(box, Box(box, layer, group, tier, 0))
        self.boxes[box] = Box(box, layer, group, tier, before.count + 1, before.nbytes + nbytes)
        self.box_of[name] = box

    def arrows(self) -> Iterator[Arrow]:
        read: dict[tuple[str, str], set[str]] = {}
        for source, target, buffer in self._reads():
            if source != target:
                read.setdefault((source, target), set()).add(buffer)
        for (source, target), buffers in read.items():
            nbytes = sum(self.dataflow.buffer[name].nbytes for name in buffers)
            if self.level == "op" or nbytes > SCALARS_BYTES:
                yield Arrow(source, target, Kind.DATA, nbytes)
        yield from dict.fromkeys(a for a in self._of_tasks() if a.source != a.target)

    def _reads(self) -> Iterator[tuple[str, str, str]]:
        """Who made what each op reads: (box, box, buffer)."""
        maker: dict[str, str] = {}
        for op in self.dataflow.ops:
            box = self._box_of_op(op)
            for name in op.reads:
                if name in maker:
                    yield maker[name], box, name
            maker |= dict.fromkeys(op.writes, box)

    def _box_of_op(self, op: Op) -> str:
        return self.box_of[self.region_of.get(op.name, op.name)]

    def _of_tasks(self) -> Iterator[Arrow]:
        box = self.box_of
        for task in self.plan.tasks if self.plan else ():
            own = box[task.name]
            if task.issue_after is not None:
                yield Arrow(box[task.issue_after], own, Kind.ISSUE)
            if task.wait_before is not None:
                yield Arrow(own, box[task.wait_before], Kind.WAIT)
            for before in task.after:
                yield Arrow(box[before], own, Kind.THEN)
