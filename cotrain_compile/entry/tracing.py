"""Tracing: the graph or the `Dataflow` of a step that is only looked at, with nothing allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cotrain_compile.capture.offline.absent_card import absent_card, card_for
from cotrain_compile.capture.offline.card_attention import assumed
from cotrain_compile.capture.offline.forked import in_a_copy
from cotrain_compile.capture.offline.offline import (
    KnownValues,
    building,
    offline,
    skip_initialisation,
)
from cotrain_compile.capture.offline.only_trace import only_traced
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.distribute.pretend import pretended
from cotrain_compile.entry.compile_step import cotrain
from cotrain_compile.errors import CaptureError
from cotrain_compile.extract.extract import extract
from cotrain_compile.files import from_json, to_json
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Machine
from cotrain_compile.support.collector import collector_off
from cotrain_compile.support.phases import tell_phase

Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


@collector_off()
def trace(
    build: Build,
    *,
    dynamic: bool = False,
    device: str | None = None,
    machine: str | Machine | None = None,
    checkpoints: str = "respect",
    ranks: int = 1,
) -> Dataflow:
    """The `Dataflow` of a step of any size, without allocating it or running it.

    `build()` returns the step function and its example arguments. It runs under fake tensors, so a
    model of any size can be built in it, on any machine; `torch.nn.init` draws no values there, and
    only values of small tensors that are made of constants can be read.
    With `dynamic`, sizes of the arguments (batch, sequence length) are symbols: see
    `analysis.symbolic`.

    With `device="cuda"` the step is traced as on a card, also where there is none: `build()` makes
    tensors there if it names no device. `machine`, a card's preset or file, says as on which
    one. Without a card here this happens in a copy of the process, and needs a C++ compiler.

    `checkpoints` is "respect" or "dissolve", as the option of that name. With `ranks` it is that
    of the first of so many ranks, whose `build()` wraps its model in `DistributedDataParallel`.

    Raises `CaptureError` as compiling does, and `OptionError` where this machine lacks something.
    """
    on_card = card_for(device, machine)
    graph = partial(trace_graph, build, dynamic=dynamic, checkpoints=checkpoints)

    def traced(device: str | None) -> Dataflow:
        with pretended(ranks) if ranks > 1 else nullcontext():
            return extract(graph(device=device))

    if on_card is None:
        return traced(None)
    if torch.cuda.is_available():
        return traced("cuda")

    def absent() -> str:
        with absent_card(*on_card):
            found = traced("cuda")
            return to_json(replace(found, notes=(*found.notes, *assumed(found))))

    return from_json(in_a_copy(absent), Dataflow)


def trace_graph(
    build: Build,
    *,
    dynamic: bool = False,
    device: str | None = None,
    checkpoints: str = "respect",
) -> StepGraph:
    """As `trace`, the step graph itself. A card has to be there for `device="cuda"`."""
    on_device = {} if device is None else {"device": device}
    options: dict[str, Any] = {"checkpoints": checkpoints, **on_device}
    with offline():
        tell_phase("building the model")
        on = torch.device(device) if device else nullcontext()
        with building(), KnownValues() as known, skip_initialisation(known.forget), on:
            step, arguments = build()
        if dynamic:
            _let_sizes_vary(arguments)
        compiled = torch.compile(
            step, backend=cotrain, dynamic=None if dynamic else False, options=options
        )
        traced = only_traced(partial(compiled, *arguments))
    if traced is None:
        raise CaptureError("build() returned a step that torch.compile did not trace")
    return traced.step


def _let_sizes_vary(arguments: tuple[Any, ...]) -> None:
    """Make every dimension of the tensors in `arguments` a symbol, where the step allows it."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor):
            for dimension in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
