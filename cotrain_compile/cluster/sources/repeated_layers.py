"""Repeated layers: the profile of a deep model, from that of a shallow one with equal layers.

In: a chain whose layers between the first and the last numbered one (`model.layers.0`, ...) are
equal in all but their names. Out: the same with as many numbered layers as are asked for. The first
and the last keep what is theirs, as what they read or what the loss gives them. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.cluster.model.profiles import Layer, LayerProfile, chain
from cotrain_compile.errors import OptionError

_NUMBERED = re.compile(r"(.*)\.(\d+)")


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
    other = next((layer for layer in inner if _figures(layer) != _figures(inner[0])), None)
    if other:
        raise OptionError(
            f"{profile.name}: layer {other.name} is not as {inner[0].name}; trace the whole model"
        )
    if count < 3:
        raise OptionError(f"{count} layers are fewer than a first, an inner and a last one")
    (path,) = paths
    repeated = [first, *[inner[0]] * (count - 2), last]
    named = [replace(layer, name=f"{path}.{i}") for i, layer in enumerate(repeated)]
    layers = _joined([*profile.layers[:begin], *named, *profile.layers[end:]])
    assumed = f"Of {count} layers {end - begin} were traced; the inner ones are equal."
    return replace(profile, layers=layers, assumed=(*profile.assumed, assumed))


def _figures(layer: Layer) -> Layer:
    """The layer without its names."""
    reads = tuple(replace(read, source="") for read in layer.reads)
    return replace(layer, name="any", reads=reads)


def _joined(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    tables = [layer.reads[0].nbytes for layer in layers]
    reads = chain(tables, [layer.name for layer in layers])
    return tuple(replace(layer, reads=read) for layer, read in zip(layers, reads, strict=True))
