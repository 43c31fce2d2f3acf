"""Rows: a step as its kinds of layers from input to output, with what a plan does to each as marks.

A Dataflow and a Plan in, rows out. Layers that differ by their number and hold as many ops and
bytes are one row with a count. A mark says what happens to a row, to how many of its layers and to
how many bytes; no arrow has to cross the picture.

Drawn rows: the rows of a step as text for a terminal, or as an SVG that needs no Graphviz.

Time goes down the forward, then up the backward; updates are beside it. What a plan does to a row
is a mark below it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from pathlib import Path

from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.errors import OptionError
from cotrain_compile.files import write_whole
from cotrain_compile.placement.placed import as_placed
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Lane, Plan, UpdateMode
from cotrain_compile.support.units import format_bytes, format_seconds
from cotrain_compile.viz.graph.picture import series
from cotrain_compile.viz.kinds import COLOURS, copied_kinds
from cotrain_compile.viz.names import Layers, layers


class Sign(StrEnum):
    """What a plan does to a layer."""

    FETCHED = "weights fetched from the host"
    OFFLOADED = "activations offloaded and prefetched"
    AGAIN = "recomputed for the backward"
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
class LayerRow:
    """`count` layers that are alike: ops, seconds by phase (0 without a plan), bytes, marks."""

    name: str
    count: int
    ops: Mapping[Phase, int]
    seconds: Mapping[Phase, float]
    param_bytes: int
    marks: tuple[Mark, ...] = ()


def rows(dataflow: Dataflow, plan: Plan | None = None) -> tuple[LayerRow, ...]:
    """The rows of a step in the order of its forward, with the marks of `plan`."""
    facts = _Facts(dataflow, plan)
    members: dict[tuple[object, ...], list[str]] = {}
    of_series = series(facts.order)
    for layer in facts.order:
        alike = (facts.ops[layer][Phase.FORWARD], facts.param_bytes[layer])
        members.setdefault((of_series.get(layer, layer), *alike), []).append(layer)
    return tuple(_row(facts, own, of_series) for own in members.values())


def _row(facts: _Facts, own: list[str], of_series: Mapping[str, str]) -> LayerRow:
    name = of_series.get(own[0], own[0]) if len(own) > 1 else own[0]
    return LayerRow(
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
            sign = {"weight": Sign.FETCHED, "activation": Sign.OFFLOADED}.get(kind)
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


_GLYPHS: Mapping[Sign, str] = {
    Sign.FETCHED: "↑",
    Sign.OFFLOADED: "↕",
    Sign.AGAIN: "↻",
    Sign.PARTS: "÷",
    Sign.ON_HOST: "⌂",
    Sign.STREAMED: "⇅",
}
_INK: Mapping[Sign, str] = {
    Sign.FETCHED: COLOURS["weight"],
    Sign.OFFLOADED: COLOURS["activation"],
    Sign.AGAIN: COLOURS["recomputed"],
    Sign.PARTS: COLOURS["work on the device"],
    Sign.ON_HOST: COLOURS["update on the host"],
    Sign.STREAMED: COLOURS["optimizer state"],
}
_ARROWS: Mapping[Phase, str] = {Phase.FORWARD: "↓", Phase.BACKWARD: "↑", Phase.OPTIMIZER: ""}
_HEADINGS = ("layers", "parameters", *(phase.value for phase in Phase))


def rows_text(rows: Sequence[LayerRow]) -> str:
    """A line for each row, with its marks on the line below, and what they mean at the end."""
    table = [_HEADINGS, *(tuple(_cells(row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells, row in zip(table, (None, *rows), strict=True):
        first, *rest = (c.ljust(w) if not n else c.rjust(w) for n, (c, w) in _sized(cells, widths))
        lines.append("  ".join((first, *rest)).rstrip())
        if row is not None and row.marks:
            lines.append(
                "    " + "   ".join(f"{_GLYPHS[m.sign]} {_words(m, row)}" for m in row.marks)
            )
    return "\n".join([*lines, *_legend(rows)])


def write_rows(rows: Sequence[LayerRow], path: Path) -> None:
    """Write the rows in the format of the suffix of `path`: .txt or .svg.

    Raises `OptionError` for another suffix.
    """
    match path.suffix:
        case ".txt":
            write_whole(path, rows_text(rows) + "\n")
        case ".svg":
            write_whole(path, rows_svg(rows))
        case _:
            raise OptionError(f"{path}: kinds of layers are written as .txt or .svg")


def _sized(cells: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(cells, widths, strict=True))


def _cells(row: LayerRow) -> Iterator[str]:
    yield _title(row)
    yield format_bytes(row.param_bytes) if row.param_bytes else ""
    for phase in Phase:
        yield f"{_ARROWS[phase]} {_amount(row, phase)}".strip() if row.ops[phase] else ""


def _title(row: LayerRow) -> str:
    return f"{row.name} ×{row.count}" if row.count > 1 else row.name


def _amount(row: LayerRow, phase: Phase) -> str:
    seconds = row.seconds[phase]
    return (
        format_seconds(seconds) if seconds else f"{row.ops[phase]} op{'s' * (row.ops[phase] > 1)}"
    )


def _words(mark: Mark, row: LayerRow) -> str:
    """How much, and in how many of the row's layers where not in all."""
    told = f"{mark.parts} parts" if mark.parts else format_bytes(mark.nbytes)
    return told if mark.layers == row.count else f"{told} in {mark.layers} of {row.count}"


def _legend(rows: Sequence[LayerRow]) -> Iterator[str]:
    used = {mark.sign for row in rows for mark in row.marks}
    for sign in Sign:
        if sign in used:
            yield f"{_GLYPHS[sign]} {sign.value}"


_WIDTH, _LEFT, _ROW, _MARKS = 940, 20, 30, 24
_COLUMNS: Mapping[Phase, int] = {Phase.FORWARD: 440, Phase.BACKWARD: 610, Phase.OPTIMIZER: 780}
_BOX = 140
_STYLE = """
.rows { max-width: 100%; height: auto; }
.rows text { font: 13px system-ui, sans-serif; fill: #1c2024; }
.rows .quiet { fill: #5d6670; } .rows .in { fill: #ffffff; }
.rows .box { fill: #ffffff; stroke: #c5ccd2; } .rows .paper { fill: #fbfbfa; }
@media screen and (prefers-color-scheme: dark) {
  .rows text { fill: #e8eaec; } .rows .quiet { fill: #9aa4ae; } .rows .in { fill: #ffffff; }
  .rows .box { fill: #1c2024; stroke: #454d55; } .rows .paper { fill: #14171a; }
}
"""


def rows_svg(rows: Sequence[LayerRow]) -> str:
    """The rows as a picture, light or dark as the reader's system is."""
    y, parts = 44.0, list[str]()
    for phase, x in _COLUMNS.items():
        arrow = f" {_ARROWS[phase]}".rstrip()
        parts.append(_text(x + _BOX / 2, 28, f"{phase.value}{arrow}", "quiet", "middle"))
    for row in rows:
        parts += _row_svg(row, y)
        y += _ROW + 14 + (_MARKS if row.marks else 0)
    for sign_line in _legend(rows):
        parts.append(_text(_LEFT, y + 14, sign_line, "quiet"))
        y += 20
    height = y + 16
    return "\n".join(
        [
            f'<svg class="rows" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" role="img" '
            f'viewBox="0 0 {_WIDTH} {height:.0f}" aria-label="The layers of a step">',
            f"<style>{_STYLE}</style>",
            '<rect class="paper" width="100%" height="100%"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _row_svg(row: LayerRow, y: float) -> Iterator[str]:
    height = _ROW + (_MARKS if row.marks else 0)
    yield f'<rect class="box" x="8" y="{y}" width="{_WIDTH - 16}" height="{height + 6}" rx="8"/>'
    yield _text(_LEFT, y + 21, _title(row))
    if row.param_bytes:
        yield _text(
            _COLUMNS[Phase.FORWARD] - 16, y + 21, format_bytes(row.param_bytes), "quiet", "end"
        )
    for phase, left in _COLUMNS.items():
        if row.ops[phase]:
            yield _rect(left, y + 5, (_BOX, _ROW - 6), COLOURS[phase.value], 5)
            yield _text(left + _BOX / 2, y + 21, _amount(row, phase), "in", "middle")
    x = float(_LEFT)
    for mark in row.marks:
        words = f"{_GLYPHS[mark.sign]} {_words(mark, row)}"
        yield _rect(x, y + _ROW + 9, (10, 10), _INK[mark.sign], 2)
        yield _text(x + 16, y + _ROW + 18, words)
        x += 40 + 7.4 * len(words)


def _rect(x: float, y: float, size: tuple[int, int], fill: str, radius: int) -> str:
    width, height = size
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}"/>'


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{named} text-anchor="{anchor}">{escape(words)}</text>'
