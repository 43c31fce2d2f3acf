"""Profile files: layer profiles from JSON, our own or as Harmony and DeepPool publish them.

In: a file. Out: a `LayerProfile`, or a `FormatError` that names the place. Both published formats
describe a chain. Harmony's has, for each number of samples, a list with a figure for every layer;
its backward includes the forward that runs again, which is taken off here. DeepPool's has for each
layer milliseconds by number of samples, forward and backward in one: see `TOGETHER`. No torch.

Repeated layers: the profile of a deep model, from that of a shallow one with equal layers.

In: a chain whose layers between the first and the last numbered one (`model.layers.0`, ...) are
equal in all but their names, or nearly so. Out: the same with as many numbered layers as are asked
for. The first and the last keep what is theirs, as what they read or what the loss gives them.
Where inner layers differ a little, as experts do that gather other shapes, each of those repeated
has the largest of every figure. No torch.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import inf
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cotrain_compile.cluster.model.profiles import BySamples, Layer, LayerProfile, chain, per_sample
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.files import from_json, parsed, read_text

# A backward makes two products where the forward made one.
FORWARD_OF_TOGETHER = 1 / 3
TOGETHER = (
    "Forward and backward are measured in one: a third of it is taken as forward, two thirds as "
    "backward."
)
NO_UPDATES = "Updates were not measured and are taken to need no time; states: none."
NO_PEAKS = "Peaks were not measured."

_Bytes = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0)]


class _Foreign(BaseModel):
    """A file that others write: what is not named here is not read."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Harmony(_Foreign):
    model: str
    source: str
    layers: Annotated[int, Field(ge=1)]
    param_bytes: list[_Bytes]
    buffer_bytes: list[_Bytes]
    optstate_bytes: list[_Bytes]
    upd_cpu_s: list[_Seconds]
    fwd_s: dict[str, list[_Seconds]]
    bwd_incl_recompute_s: dict[str, list[_Seconds]]
    fwd_mem: dict[str, list[_Bytes]]
    bwd_mem: dict[str, list[_Bytes]]
    input_act_bytes: dict[str, list[_Bytes]]


class _DeepPoolLayer(_Foreign):
    op: Annotated[str, Field(min_length=1)]
    param_bytes: _Bytes
    input_bytes_per_sample: _Bytes
    forward_backward_ms: dict[str, _Seconds]


class _DeepPool(_Foreign):
    model: str
    source: str
    layers: Annotated[list[_DeepPoolLayer], Field(min_length=1)]


def read_profile(path: str | os.PathLike[str]) -> LayerProfile:
    """The profile in `path`, in whichever of the three formats it is.

    Raises FormatError where it is in none of them or contradicts itself, OSError where it cannot
    be read.
    """
    text = read_text(path, "layer profile")
    return parse_profile(text, str(path))


def parse_profile(text: str, where: str) -> LayerProfile:
    """The profile in `text`; `where` names it in a FormatError."""
    try:
        match _format_of(text, where):
            case "harmony":
                return _from_harmony(_Harmony.model_validate_json(text), where)
            case "deeppool":
                return _from_deeppool(_DeepPool.model_validate_json(text), where)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise FormatError(
            f"{where}: {place}: {first['msg']}; correct it or make the file again"
        ) from None
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: {error}; correct it or make the file again") from None
    return from_json(text, LayerProfile, where)


def _format_of(text: str, where: str) -> str:
    """By what only that format has at its top; "" is our own, whose reader says what is wrong."""
    document = parsed(text, where)
    if not isinstance(document, dict) or "kind" in document:
        return ""
    if "fwd_s" in document:
        return "harmony"
    return "deeppool" if isinstance(document.get("layers"), list) else ""


def _from_harmony(data: _Harmony, where: str) -> LayerProfile:
    count = data.layers
    for name in ("param_bytes", "buffer_bytes", "optstate_bytes", "upd_cpu_s"):
        _refuse_length(where, name, getattr(data, name), count)
    forward = _tables(where, "fwd_s", data.fwd_s, count)
    backward = _tables(where, "bwd_incl_recompute_s", data.bwd_incl_recompute_s, count)
    forward_peak = _tables(where, "fwd_mem", data.fwd_mem, count)
    backward_peak = _tables(where, "bwd_mem", data.bwd_mem, count)
    names = [f"layer{i}" for i in range(count)]
    reads = chain(_tables(where, "input_act_bytes", data.input_act_bytes, count), names)
    return LayerProfile(
        name=data.model,
        layers=tuple(
            Layer(
                name=names[i],
                op="layer",
                reads=reads[i],
                forward_s=forward[i],
                backward_s=_without(backward[i], forward[i], f"{where}: layer {i}"),
                param_bytes=data.param_bytes[i],
                grad_bytes=data.param_bytes[i],
                state_bytes=data.optstate_bytes[i],
                buffer_bytes=data.buffer_bytes[i],
                host_update_s=data.upd_cpu_s[i],
                forward_peak_bytes=_beside(forward_peak[i], reads[i][0].nbytes),
                backward_peak_bytes=_beside(backward_peak[i], reads[i][0].nbytes),
            )
            for i in range(count)
        ),
        source=data.source,
    )


def _without(whole: BySamples, part: BySamples, where: str) -> BySamples:
    """The backward alone, at the numbers of samples at which it was measured with a forward."""
    left = [y - part.at(x) for x, y in zip(whole.samples, whole.figures, strict=True)]
    if min(left) < 0:
        raise FormatError(
            f"{where}: bwd_incl_recompute_s is less than fwd_s at "
            f"{whole.samples[left.index(min(left))]} samples, and it includes that; measure again"
        )
    return BySamples(whole.samples, tuple(left))


def _beside(peak: BySamples, read: BySamples) -> BySamples:
    """A measured peak, which has what the layer reads in it, without that."""
    left = [max(0.0, y - read.at(x)) for x, y in zip(peak.samples, peak.figures, strict=True)]
    return BySamples(peak.samples, tuple(left))


def _tables(
    where: str, name: str, by_samples: Mapping[str, Sequence[float]], count: int
) -> list[BySamples]:
    """Of every layer the figures by number of samples."""
    for samples, figures in by_samples.items():
        _refuse_length(where, f"{name}.{samples}", figures, count)
    return [
        _table(where, name, {samples: figures[i] for samples, figures in by_samples.items()})
        for i in range(count)
    ]


def _table(where: str, name: str, figures: Mapping[str, float]) -> BySamples:
    if not figures or not all(key.isdecimal() and int(key) > 0 for key in figures):
        raise FormatError(
            f"{where}: {name} is by numbers of samples, of which it has {list(figures)}; give at "
            "least one, each a whole number above 0"
        )
    known = sorted((int(key), figure) for key, figure in figures.items())
    return BySamples(tuple(x for x, _ in known), tuple(float(y) for _, y in known))


def _refuse_length(where: str, name: str, figures: Sequence[float], count: int) -> None:
    if len(figures) != count:
        raise FormatError(
            f"{where}: {name} has {len(figures)} figures for {count} layers; make the file again"
        )


def _from_deeppool(data: _DeepPool, where: str) -> LayerProfile:
    seen: Counter[str] = Counter()
    names = []
    for layer in data.layers:
        names.append(f"{layer.op}{seen[layer.op]}")
        seen[layer.op] += 1
    reads = chain([per_sample(layer.input_bytes_per_sample) for layer in data.layers], names)
    layers = []
    for name, read, layer in zip(names, reads, data.layers, strict=True):
        together = _table(where, f"forward_backward_ms of {name}", layer.forward_backward_ms)
        layers.append(
            Layer(
                name=name,
                op=layer.op,
                reads=read,
                forward_s=_times(together, FORWARD_OF_TOGETHER / 1e3),
                backward_s=_times(together, (1 - FORWARD_OF_TOGETHER) / 1e3),
                param_bytes=layer.param_bytes,
                grad_bytes=layer.param_bytes,
            )
        )
    assumed = (TOGETHER, NO_UPDATES, NO_PEAKS)
    return LayerProfile(data.model, tuple(layers), data.source, assumed)


def _times(table: BySamples, factor: float) -> BySamples:
    return BySamples(table.samples, tuple(figure * factor for figure in table.figures))


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
