"""Hosted stages: what of the stages of a cut rests on their hosts, as little as makes them fit.

In: a `StageProblem`, the profile of its layers, the devices with their hosts. Out: `HostedCut`s.

On hosts may be the optimizer states of a stage's first layers: the host updates these, their
gradients go there behind the last backward and parameters come back. And what micro-batches in
flight keep from forward to backward: on the device are then that of the one at work, of the one
whose forward was before, which leaves, and of the one whose backward is next, which comes. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.pipeline.cuts import (
    LayerPeaks,
    PipelineDevices,
    StageProblem,
    Stages,
    cut_by_time,
    cut_stages,
)
from cotrain_compile.cluster.steps.rank_memory import ON_DEVICE, Residence

# Micro-batches whose kept values are on a device where others are offloaded.
HELD = 3


# What may be offloaded of all stages, by the least of it first.
KEPT, STATES, BOTH = Residence(kept=1), Residence(states=1), Residence(states=1, kept=1)


def relieved(problem: StageProblem, profile: LayerProfile, may: Residence) -> StageProblem:
    """The problem of stages of which all that may be offloaded is."""
    layers = problem.layers
    if may.states:
        gone = [layer.state_bytes for layer in profile.layers]
        layers = LayerPeaks(
            layers.names,
            tuple(peak - own for peak, own in zip(layers.isolated_bytes, gone, strict=True)),
            tuple(grow - own for grow, own in zip(layers.added_bytes, gone, strict=True)),
            layers.kept_bytes,
            layers.working_bytes,
        )
    return replace(problem, layers=layers, held=HELD if may.kept else 0)


class HostedCut(NamedTuple):
    """A cut with the peaks of its stages, what of each rests on its host, how much that is on all
    hosts, and what these have too little."""

    stages: Stages
    residence: tuple[Residence, ...]
    host_bytes: int
    missing_bytes: int


def hosted(
    problem: StageProblem,
    profile: LayerProfile,
    devices: PipelineDevices,
    stages: Stages,
    may: Residence,
    *,
    in_parts: bool = False,
) -> HostedCut:
    """As little as fits is offloaded; `problem` is the one in which nothing is.

    Of layers `in_parts` a rank updates what is among its states alone.
    """
    residences: list[Residence] = []
    peaks: list[int] = []
    on_host: list[int] = []
    for device, (first, last) in enumerate(pairwise(stages.bounds)):
        residence, peak = _least(problem, profile, first, last, device, may)
        residences.append(residence)
        peaks.append(peak)
        updated = profile.layers[first : first + residence.states]
        own = sum(
            each.state_bytes + (0 if in_parts else each.param_bytes + each.grad_bytes)
            for each in updated
        )
        if residence.kept:
            own += problem.on_device(device) * sum(problem.layers.kept_bytes[first:last])
        on_host.append(own)
    missing = devices.missing_on_hosts(on_host) if any(on_host) else 0
    return HostedCut(
        replace(stages, peak_bytes=tuple(peaks)), tuple(residences), sum(on_host), missing
    )


def _least(
    problem: StageProblem, profile: LayerProfile, first: int, last: int, device: int, may: Residence
) -> tuple[Residence, int]:
    """The first of all ways that fits, and its peak; the last one fits."""
    held = replace(problem, held=HELD)
    residence, peak = ON_DEVICE, 0
    for residence in _ways(last - first, may):
        own = held if residence.kept else problem
        gone = sum(layer.state_bytes for layer in profile.layers[first : first + residence.states])
        peak = own.peak_bytes(first, last, device) - gone
        if peak <= problem.capacity_bytes[device]:
            break
    return residence, peak


def _ways(layers: int, may: Residence) -> Iterator[Residence]:
    yield ON_DEVICE
    if may.kept:
        yield Residence(kept=layers)
    for kept in (0, layers) if may.kept else (0,):
        for states in range(1, layers + 1) if may.states else ():
            yield Residence(states, kept=kept)


def fitting_cuts(
    problem: StageProblem,
    profile: LayerProfile,
    devices: PipelineDevices,
    both_s: Sequence[Sequence[float]],
    *,
    in_parts: bool = False,
) -> Iterator[HostedCut]:
    """Cuts that fit, with what rests on hosts: nothing, or one thing, or both where that does not
    do. `both_s` are the seconds of all layers on each device."""
    found: dict[HostedCut, None] = {}
    for may_be in ((ON_DEVICE,), (KEPT, STATES), (BOTH,)) if devices.hosts else ((ON_DEVICE,),):
        for may in may_be:
            problem_of_rest = relieved(problem, profile, may)
            balanced = cut_by_time(problem_of_rest, both_s)
            if balanced is not None:
                for stages in dict.fromkeys((balanced, cut_stages(problem_of_rest))):
                    cut = hosted(problem, profile, devices, stages, may, in_parts=in_parts)
                    found |= {} if cut.missing_bytes else {cut: None}
        if found:
            break
    yield from found
