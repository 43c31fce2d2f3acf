"""Folding: in which box of a picture an op or a task is. Foldings of a step, the finest first.

A reader takes in about twenty boxes. At level "layer" a picture is folded until it has no more:
layers that differ by a number become one, then the optimizer and the tasks of each kind, then what
is within a module, one depth after the other. A layer that is opened has its own modules as boxes,
or at level "op" its ops, between its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cotrain_compile.dataflow import Phase
from cotrain_compile.machine import Tier

Level = Literal["model", "layer", "op"]

# Of the module of a layer, so many parts are kept when more has to be folded.
_DEPTHS = (3, 2, 1)
_PASSES = (Phase.FORWARD.value, Phase.BACKWARD.value)


@dataclass(frozen=True)
class Work:
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
Fold = Callable[[Work], str | None]


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
    def each(work: Work) -> str:
        return f"{work.group} {work.layer}"

    def alike(work: Work) -> str:
        return f"{work.group} {of_series.get(work.layer, work.layer)}"

    def passes(work: Work, depth: int | None = None) -> str:
        if work.group not in _PASSES:
            return work.group
        folded = of_series.get(work.layer, work.layer)
        return f"{work.group} {'.'.join(folded.split('.')[:depth])}"

    shallow = (partial(passes, depth=depth) for depth in _DEPTHS)
    return each, alike, passes, *shallow, lambda work: work.group


def _around(level: Level, opened: str) -> tuple[Fold, ...]:
    """Foldings of what is in a layer; of all else there are the neighbours, without their tasks."""

    def elsewhere(work: Work, of_layer: bool = True) -> str | None:
        if work.tier is not Tier.DEVICE:
            return None
        return f"{work.group} {work.layer}" if of_layer else f"{work.group} elsewhere"

    def each(work: Work) -> str | None:
        return work.name if work.layer == opened else elsewhere(work)

    def modules(work: Work, depth: int | None, of_layer: bool) -> str | None:
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
