"""Repeated layers: the profile of a deep model, from that of a shallow one with equal layers.

In: a chain whose layers between the first and the last numbered one (`model.layers.0`, ...) are
equal in all but their names, or nearly so. Out: the same with as many numbered layers as are asked
for. The first and the last keep what is theirs, as what they read or what the loss gives them.
Where inner layers differ a little, as experts do that gather other shapes, each of those repeated
has the largest of every figure. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from typing import Any

from cotrain_compile.cluster.model.profiles import BySamples, Layer, LayerProfile, chain
from cotrain_compile.errors import OptionError

_NUMBERED = re.compile(r"(.*)\.(\d+)")
# How far figures of inner layers may be apart, of the larger one.
_NEARLY = 0.01


def with_layers(profile: LayerProfile, count: int) -> LayerProfile:
    """`profile` with `count` numbered layers, of which it has four or more itself.

    Raises:
        OptionError: it is no chain with numbered layers in a row, there are too few of them to see
            that the inner ones are equal, or they are not; or fewer than three are asked for.
    """
    found = [_NUMBERED.fullmatch(layer.name) for layer in profile.layers]
    numbered = [i for i, match in enumerate(found) if match]
    paths = {match[1] for match in found if match}
    begin, end = (numbered[0], numbered[-1] + 1) if numbered else (0, 0)
    if not profile.is_chain or len(paths) != 1 or len(numbered) != end - begin or end - begin < 4:
        raise OptionError(
            f"{profile.name} is no chain with four or more layers numbered in a row, so nobody "
            "sees which of them to repeat; trace it with four"
        )
    first, *inner, last = profile.layers[begin:end]
    apart = [_apart(inner[0], layer) for layer in inner]
    furthest = max(apart)
    if furthest > _NEARLY:
        other = inner[apart.index(furthest)].name
        raise OptionError(
            f"{profile.name}: layer {other} is not as {inner[0].name}; trace the whole model"
        )
    if count < 3:
        raise OptionError(f"{count} layers are fewer than a first, an inner and a last one")
    (path,) = paths
    repeated = [first, *[_largest(inner)] * (count - 2), last]
    named = [replace(layer, name=f"{path}.{i}") for i, layer in enumerate(repeated)]
    layers = _joined([*profile.layers[:begin], *named, *profile.layers[end:]])
    alike = (
        f"differ by up to {furthest:.2%}, and have the largest figures" if furthest else "are equal"
    )
    assumed = f"Of {count} layers {end - begin} were traced; the inner ones {alike}."
    return replace(profile, layers=layers, assumed=(*profile.assumed, assumed))


def _apart(one: Layer, other: Layer) -> float:
    """The largest difference of a figure, of the larger one; infinite where shapes differ."""
    most = 0.0
    for a, b in zip(_figures(one), _figures(other), strict=False):
        if a.samples != b.samples:
            return inf
        for x, y in zip(a.figures, b.figures, strict=True):
            most = max(most, abs(x - y) / max(x, y) if x != y else 0.0)
    return most if len(_figures(one)) == len(_figures(other)) else inf


def _figures(layer: Layer) -> list[BySamples]:
    """All figures of a layer, those of what it reads first; whole numbers are at one sample."""
    found = [read.nbytes for read in layer.reads]
    for name in _FIGURES:
        value = getattr(layer, name)
        if value is not None:
            found.append(value if isinstance(value, BySamples) else BySamples((1,), (value,)))
    return found


_NOT_FIGURES = ("name", "op", "reads", "tensor", "experts")
_FIGURES = [one.name for one in fields(Layer) if one.name not in _NOT_FIGURES]


def _largest(layers: Sequence[Layer]) -> Layer:
    """The first of `layers` with the largest of each figure."""
    figures: dict[str, Any] = {n: _most([getattr(one, n) for one in layers]) for n in _FIGURES}
    return replace(layers[0], **figures)


def _most(values: Sequence[BySamples | float | None]) -> BySamples | float | None:
    tables = [value for value in values if isinstance(value, BySamples)]
    if tables:
        rows = zip(*(table.figures for table in tables), strict=True)
        return replace(tables[0], figures=tuple(map(max, rows)))
    return max((value for value in values if isinstance(value, int | float)), default=None)


def _joined(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    tables = [layer.reads[0].nbytes for layer in layers]
    reads = chain(tables, [layer.name for layer in layers])
    return tuple(replace(layer, reads=read) for layer, read in zip(layers, reads, strict=True))
