"""Graph: a step, or a placed one, as a picture of boxes and arrows."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cotrain_compile import files
from cotrain_compile.cli.outputs import refuse_outputs
from cotrain_compile.cli.parameters import StepFile
from cotrain_compile.cli.reading import read_step
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.viz.graph.drawing import as_text, write_picture
from cotrain_compile.viz.graph.picture import MOST_BOXES, picture


class Level(StrEnum):
    """How far a step is folded."""

    MODEL = "model"
    LAYER = "layer"
    OP = "op"


def graph(
    file: StepFile,
    plan: Annotated[
        Path | None, typer.Option(help="Draw the step as this plan.json places it.")
    ] = None,
    level: Annotated[
        Level, typer.Option(help="Whether a box is a phase of the model, a layer or an op.")
    ] = Level.LAYER,
    layer: Annotated[
        str, typer.Option(help="Open this layer, as model.layers.3; at level op, show all its ops.")
    ] = "",
    boxes: Annotated[
        int, typer.Option(min=1, help="Fold layers until there are at most so many boxes.")
    ] = MOST_BOXES,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The .txt, .dot or .svg to write; default: print it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a step: ops folded by layer, with offloads, prefetches and waits of a plan."""
    keep_stdout_for(as_json, output)
    refuse_outputs({"--output": output}, (file, plan))
    placed = load_plan(plan) if plan else None
    dataflow = read_step(placed, plan, file) if placed and plan else files.load(file, Dataflow)
    drawn = picture(dataflow, placed, level=level.value, layer=layer, most_boxes=boxes)
    if as_json:
        print_json(drawn)
    elif output is None:
        console.print(as_text(drawn))
    if output is not None:
        write_picture(drawn, output)
        console.print(f"wrote {output}: {len(drawn.boxes)} boxes, {len(drawn.arrows)} arrows")
