"""Stage away: what of each stage rests on the host of its device, as little as makes it fit.

In: a cut that fits where all that may be away is. Out: of each stage a `StageAway`, which fits, its
peak, and what hosts have too little for that. No torch.

Away may be the optimizer states of a stage's first layers: the host updates these, their gradients
go there behind the last backward and parameters come back. And what micro-batches in flight keep
from forward to backward: on the device are then that of the one at work, of the one whose forward
was before, which leaves, and of the one whose backward is next, which comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from cotrain_compile.cluster.pipeline_devices import PipelineDevices
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.stages import LayerPeaks, StageProblem, Stages

# Micro-batches whose kept values are on a device where others are away.
HELD = 3


@dataclass(frozen=True)
class StageAway:
    """The states of the first so many layers of a stage; whether what is kept is away."""

    states: int = 0
    kept: bool = False


# What may be away of all stages, by the least of it first.
NOTHING, KEPT, STATES = StageAway(), StageAway(kept=True), StageAway(states=1)
BOTH = StageAway(states=1, kept=True)


def relieved(problem: StageProblem, profile: LayerProfile, may: StageAway) -> StageProblem:
    """The problem of stages of which all that may be away is away."""
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


class Placed(NamedTuple):
    """A cut with the peaks of its stages, what is away of each, how much that is on all hosts, and
    what hosts have too little."""

    stages: Stages
    away: tuple[StageAway, ...]
    host_bytes: int
    missing_bytes: int


def placed(
    problem: StageProblem,
    profile: LayerProfile,
    devices: PipelineDevices,
    stages: Stages,
    may: StageAway,
) -> Placed:
    """As little as fits is away; `problem` is the one in which nothing is."""
    aways: list[StageAway] = []
    peaks: list[int] = []
    on_host: list[int] = []
    for device, (first, last) in enumerate(pairwise(stages.bounds)):
        away, peak = _least(problem, profile, first, last, device, may)
        aways.append(away)
        peaks.append(peak)
        updated = profile.layers[first : first + away.states]
        own = sum(each.param_bytes + each.grad_bytes + each.state_bytes for each in updated)
        if away.kept:
            own += problem.on_device(device) * sum(problem.layers.kept_bytes[first:last])
        on_host.append(own)
    missing = devices.missing_on_hosts(on_host) if any(on_host) else 0
    return Placed(replace(stages, peak_bytes=tuple(peaks)), tuple(aways), sum(on_host), missing)


def _least(
    problem: StageProblem, profile: LayerProfile, first: int, last: int, device: int, may: StageAway
) -> tuple[StageAway, int]:
    """The first of all ways that fits, and its peak; the last one fits."""
    held = replace(problem, held=HELD)
    away, peak = NOTHING, 0
    for away in _ways(last - first, may):
        own = held if away.kept else problem
        gone = sum(layer.state_bytes for layer in profile.layers[first : first + away.states])
        peak = own.peak_bytes(first, last, device) - gone
        if peak <= problem.capacity_bytes[device]:
            break
    return away, peak


def _ways(layers: int, may: StageAway) -> Iterator[StageAway]:
    yield NOTHING
    if may.kept:
        yield KEPT
    for states in range(1, layers + 1) if may.states else ():
        yield StageAway(states)
    for states in range(1, layers + 1) if may.states and may.kept else ():
        yield StageAway(states, kept=True)
