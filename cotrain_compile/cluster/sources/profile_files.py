"""Profile files: layer profiles from JSON, our own or as Harmony and DeepPool publish them.

In: a file. Out: a `LayerProfile`, or a `FormatError` that names the place. Both published formats
describe a chain. Harmony's has, for each number of samples, a list with a figure for every layer;
its backward includes the forward that runs again, which is taken off here. DeepPool's has for each
layer milliseconds by number of samples, forward and backward in one: see `TOGETHER`. No torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cotrain_compile.cluster.model.profiles import (
    BySamples,
    Layer,
    LayerProfile,
    chain,
    per_sample,
)
from cotrain_compile.errors import FormatError
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
