"""Data-parallel peaks: what a device holds that has all layers, or a part of each.

In: a profile, its layers joined to units that are exchanged together, the samples of a
micro-batch. Out: bytes that are never passed, however long works take. No torch.

    rests      of N parts: (parameters + gradients + states) / N, and all buffers
    gathered   all parameters, or those of two neighbouring units
    scattered  gradients of two neighbouring units, whole
    kept       until the backward of a layer: by it and all layers before it
    working    of a layer: its peak beyond its parameters, gradients and what it keeps, and the
               gradients of all outputs that it makes or that wait for the layers before it

The largest sum over all layers is the peak. Nothing is gathered or scattered where N is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from cotrain_compile.cluster.profiles import BATCH, BySamples, Layer, LayerProfile

# What is exchanged at once at least, as DistributedDataParallel has it.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Unit:
    """Consecutive layers whose parameters are gathered, and gradients summed, at once."""

    name: str
    layers: tuple[Layer, ...]

    @cached_property
    def param_bytes(self) -> int:
        return sum(layer.param_bytes for layer in self.layers)

    @cached_property
    def grad_bytes(self) -> int:
        return sum(layer.grad_bytes for layer in self.layers)

    @cached_property
    def touched_bytes(self) -> int:
        """What an update reads and writes: parameters and states both, gradients are only read."""
        states = sum(layer.state_bytes for layer in self.layers)
        return 2 * (self.param_bytes + states) + self.grad_bytes

    def forward_s(self, samples: int) -> float:
        return sum(layer.forward_s.at(samples) for layer in self.layers)

    def backward_s(self, samples: int) -> float:
        return sum(layer.backward_s.at(samples) for layer in self.layers)


def units_of(profile: LayerProfile) -> tuple[Unit, ...]:
    """The layers in units of `BUCKET_BYTES` or more, from the back as gradients come."""
    units: list[Unit] = []
    held: list[Layer] = []
    for layer in reversed(profile.layers):
        held.insert(0, layer)
        if sum(each.param_bytes for each in held) >= BUCKET_BYTES:
            units.insert(0, Unit(held[0].name, tuple(held)))
            held = []
    if held:
        units.insert(0, Unit(held[0].name, tuple(held)))
    return tuple(units)


def knows_peaks(profile: LayerProfile) -> bool:
    """Whether a peak can be told: of each layer that of the backward, and what it keeps."""
    return all(layer.backward_peak_bytes and layer.kept_bytes for layer in profile.layers)


def running_again(profile: LayerProfile) -> LayerProfile:
    """Every layer keeps its input alone, and runs again before its backward.

    A peak is without what the layer reads, so that the input is counted beside it.
    """
    return replace(profile, layers=tuple(_running_again(layer) for layer in profile.layers))


def _running_again(layer: Layer) -> Layer:
    entering = layer.reads[0].nbytes
    for read in layer.reads[1:]:
        entering = _sum(entering, read.nbytes)
    peak = layer.backward_peak_bytes
    return replace(
        layer,
        backward_s=_sum(layer.backward_s, layer.forward_s),
        kept_bytes=entering,
        backward_peak_bytes=_sum(peak, entering) if peak else None,
    )


def _sum(one: BySamples, other: BySamples) -> BySamples:
    """Both together, at all numbers of samples at which either is known."""
    known = tuple(sorted({*one.samples, *other.samples}))
    return BySamples(known, tuple(one.at(n) + other.at(n) for n in known))


def peak_bytes(
    profile: LayerProfile, units: tuple[Unit, ...], samples: int, parts: int, *, again: bool
) -> int:
    """Of a device that rests with one of `parts`; `again`: parameters go between their uses."""
    layers = profile.layers
    split = sum(layer.param_bytes + layer.grad_bytes + layer.state_bytes for layer in layers)
    rests = ceil(split / parts) + sum(layer.buffer_bytes for layer in layers)
    whole = _whole_bytes(units, again=again) if parts > 1 else 0
    kept = accumulate(layer.kept(samples) for layer in layers)
    working = _working_bytes(profile, samples)
    return rests + whole + ceil(max(map(sum, zip(kept, working, strict=True))))


def _whole_bytes(units: tuple[Unit, ...], *, again: bool) -> int:
    """Gathered parameters, and gradients that are not yet scattered, at most.

    Behind the first unit's backward its forward of the next micro-batch may come.
    """
    params = [unit.param_bytes for unit in units]
    grads = [unit.grad_bytes for unit in units]
    pairs = [2 * params[0], *map(sum, pairwise(params))]
    scattered = max([grads[0], *map(sum, pairwise(grads))])
    return (max(pairs) if again else sum(params)) + scattered


def _working_bytes(profile: LayerProfile, samples: int) -> list[float]:
    """What the backward of each layer takes beside what rests and is kept, with gradients that
    wait."""
    out = _output_bytes(profile, samples)
    last = {
        name: max((profile.index[reader] for reader in readers), default=-1)
        for name, readers in profile.readers.items()
    }
    working = []
    for i, layer in enumerate(profile.layers):
        waiting = [out[j.name] for j in profile.layers[: i + 1] if last[j.name] >= i]
        held = layer.param_bytes + layer.buffer_bytes + layer.kept(samples)
        peak = layer.backward_peak(samples) - layer.grad_bytes
        if layer.forward_peak_bytes:
            peak = max(peak, layer.forward_peak(samples))
        working.append(max(0.0, peak - held) + sum(waiting))
    return working


def _output_bytes(profile: LayerProfile, samples: int) -> dict[str, float]:
    """What each layer gives to those that read it; the most of what they say."""
    out = dict.fromkeys((BATCH, *profile.index), 0.0)
    for layer in profile.layers:
        for read in layer.reads:
            out[read.source] = max(out[read.source], read.nbytes.at(samples))
    return out
