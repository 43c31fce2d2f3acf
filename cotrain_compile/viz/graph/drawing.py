"""Drawing: a picture of a step as text, as DOT, or, where Graphviz is installed, as SVG."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from cotrain_compile.errors import OptionError
from cotrain_compile.files import write_whole
from cotrain_compile.machine import Tier
from cotrain_compile.support.units import format_bytes
from cotrain_compile.viz.graph.picture import Arrow, Box, BoxKind, Picture
from cotrain_compile.viz.kinds import COLOURS

_FILL: Mapping[str, str] = {
    "forward": COLOURS["forward"],
    "backward": COLOURS["backward"],
    "optimizer": COLOURS["optimizer"],
    "offload": COLOURS["gradient"],
    "prefetch": COLOURS["weight"],
    "host": COLOURS["update on the host"],
}
# Groups whose colour white stands out from more than black does.
_DARK = {"backward", "host", "offload"}
_STYLE: Mapping[BoxKind, str] = {
    BoxKind.DATA: 'color="#80808080"',
    BoxKind.ISSUE: 'color="#D55E00", style=dashed',
    # What waits for a copy stands where its data says, not below the copy.
    BoxKind.WAIT: 'color="#009E73", style=bold, constraint=false',
    BoxKind.THEN: 'color="#E69F00"',
}
# Curves go round boxes, straight lines through their titles; but with hundreds of boxes curves and
# a longer search take minutes, lines and a short one seconds.
_CURVES = ("-Gsplines=true", "-Granksep=0.25", "-Gnodesep=0.2")
_QUICKLY = ("-Gnslimit=0.5", "-Gnslimit1=0.5", "-Gmclimit=0.05", "-Gsplines=line")
MOST_BOXES_WITH_CURVES = 60
_LEGEND: Mapping[BoxKind, str] = {
    BoxKind.DATA: "grey arrow: reads, with the bytes read",
    BoxKind.ISSUE: "dashed arrow: starts a task",
    BoxKind.WAIT: "bold arrow: is waited for",
    BoxKind.THEN: "orange arrow: follows a task",
}
SUFFIXES = (".txt", ".dot", ".svg")


def write_picture(picture: Picture, path: Path) -> None:
    """Write `picture` in the format of the suffix of `path`: .txt, .dot or .svg.

    Raises `OptionError` for another suffix, and for .svg where Graphviz is missing or fails.
    """
    match path.suffix:
        case ".txt":
            write_whole(path, as_text(picture) + "\n")
        case ".dot":
            write_whole(path, as_dot(picture))
        case ".svg":
            write_whole(path, as_svg(picture))
        case _:
            raise OptionError(f"{path}: a graph is written as {', '.join(SUFFIXES)}")


def as_text(picture: Picture) -> str:
    """One line for each box, with the boxes that it feeds."""
    fed: dict[str, list[Arrow]] = {}
    for arrow in picture.arrows:
        fed.setdefault(arrow.source, []).append(arrow)
    lines = []
    for box in picture.boxes:
        lines.append(f"{box.name}  {_words(box)}")
        lines += [
            f"    {arrow.kind.value:5} -> {arrow.target}{_size(arrow)}"
            for arrow in fed.get(box.name, ())
        ]
    return "\n".join(lines)


def as_dot(picture: Picture) -> str:
    """Graphviz' language: a box coloured by phase or task, what the host does rounded."""
    return "\n".join(_dot_lines(picture)) + "\n"


def as_svg(picture: Picture) -> str:
    """Laid out by Graphviz' `dot`; raises `OptionError` where it is missing or fails."""
    dot = shutil.which("dot")
    if dot is None:
        raise OptionError(
            "an SVG of a graph needs Graphviz' dot, which is not installed: install graphviz, or "
            "write a .dot file and lay it out elsewhere"
        )
    layout = _CURVES if len(picture.boxes) <= MOST_BOXES_WITH_CURVES else _QUICKLY
    command = [dot, "-Tsvg", *layout]
    run = subprocess.run(command, input=as_dot(picture), capture_output=True, text=True)
    if run.returncode:
        raise OptionError(f"dot could not draw the graph: {run.stderr.strip()}; write .dot instead")
    return run.stdout


def _dot_lines(picture: Picture) -> Iterator[str]:
    yield "digraph step {"
    yield '  node [shape=box, style=filled, fontname="sans-serif", fontsize=11];'
    yield '  edge [fontname="sans-serif", fontsize=9];'
    yield f'  graph [fontname="sans-serif", fontsize=10, labeljust=l, label="{_legend(picture)}"];'
    for box in picture.boxes:
        style = '"filled,rounded"' if box.tier is Tier.HOST else "filled"
        ink = ', fontcolor="white"' if box.group in _DARK else ""
        label = _quoted("\n".join(_title(box)))
        fill = _FILL[box.group]
        yield f'  {_quoted(box.name)} [label={label}, style={style}, fillcolor="{fill}"{ink}];'
    for arrow in picture.arrows:
        label = f", label={_quoted(_size(arrow).strip())}" if arrow.nbytes else ""
        ends = f"{_quoted(arrow.source)} -> {_quoted(arrow.target)}"
        yield f"  {ends} [{_STYLE[arrow.kind]}{label}];"
    yield "}"


def _legend(picture: Picture) -> str:
    """What the arrows in `picture` mean, and its round boxes where it has some."""
    kinds = {arrow.kind for arrow in picture.arrows}
    lines = [words for kind, words in _LEGEND.items() if kind in kinds]
    if any(box.tier is Tier.HOST for box in picture.boxes):
        lines.append("round box: runs on the host or copies between device and host")
    return "".join(f"{line}\\l" for line in lines)  # \l: each line begins at the left


def _title(box: Box) -> Iterator[str]:
    """What is in a box, on two lines or three."""
    yield box.name
    what = "task" if box.tier is Tier.HOST else "op"
    of_layers = f" of {len(box.layers)} layers" if len(box.layers) > 1 else ""
    yield f"{box.count} {what}{'s' if box.count > 1 else ''}{of_layers}"
    if box.nbytes:
        yield format_bytes(box.nbytes)


def _words(box: Box) -> str:
    what = "task" if box.tier is Tier.HOST else "op"
    size = f", {format_bytes(box.nbytes)}" if box.nbytes else ""
    return f"({box.group}, {box.count} {what}{'s' if box.count > 1 else ''}{size})"


def _size(arrow: Arrow) -> str:
    return f"  {format_bytes(arrow.nbytes)}" if arrow.nbytes else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
