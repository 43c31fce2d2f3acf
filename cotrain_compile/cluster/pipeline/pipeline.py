"""Pipeline: a chain of layers on devices one behind the other, and what a step takes.

In: a `LayerProfile` that is a chain, the devices in the order of the pipeline, the samples of a
step. Out: a `PipelinePlan`: where the model is cut, the size of a micro-batch, whether layers run
again for the backward, what of each stage rests on its host, and from these the step, and the peak
of each device. A device of another kind takes as many times as long as the profile says.

Something rests on hosts where else a size of micro-batches does not fit, as little as makes it fit
(`hosted`).

On hosts may be the optimizer states of a stage's first layers: the host updates these, their
gradients go there behind the last backward and parameters come back. And what micro-batches in
flight keep from forward to backward: on the device are then that of the one at work, of the one
whose forward was before, which leaves, and of the one whose backward is next, which comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import ceil
from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import Layer, LayerProfile
from cotrain_compile.cluster.pipeline.cuts import (
    LayerPeaks,
    PipelineDevices,
    PipelineOrder,
    StageProblem,
    Stages,
    cut_by_time,
    cut_stages,
)
from cotrain_compile.cluster.pipeline.step import Stage, StagesInOrder, pipeline_step
from cotrain_compile.cluster.steps.rank_memory import ON_DEVICE, Residence
from cotrain_compile.cluster.steps.stage_step import Does, StageStep, fastest
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.support.units import format_bytes

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
) -> HostedCut:
    """As little as fits is offloaded; `problem` is the one in which nothing is."""
    residences: list[Residence] = []
    peaks: list[int] = []
    on_host: list[int] = []
    for device, (first, last) in enumerate(pairwise(stages.bounds)):
        residence, peak = _least(problem, profile, first, last, device, may)
        residences.append(residence)
        peaks.append(peak)
        updated = profile.layers[first : first + residence.states]
        own = sum(each.param_bytes + each.grad_bytes + each.state_bytes for each in updated)
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


@dataclass(frozen=True)
class PipelinePlan:
    """A cut that fits, in micro-batches of a size; `stages` are what its layers are together.

    `residence` says what of each stage rests on its host, `host_bytes` how much that is of all.
    """

    profile: LayerProfile
    cut: Stages
    micro_batch: int
    recompute: bool
    stages: StagesInOrder
    residence: tuple[Residence, ...]
    host_bytes: int

    @property
    def micro_batches(self) -> int:
        return self.stages.micro_batches

    @cached_property
    def least_s(self) -> float:
        return self.stages.least_s()

    @cached_property
    def step(self) -> StageStep:
        return pipeline_step(self.stages)

    @property
    def hop_bytes(self) -> tuple[int, ...]:
        """What crosses each hop in a step, both ways together."""
        *sending, _ = self.stages.stages
        return tuple(round(2 * self.micro_batches * stage.sent_bytes) for stage in sending)

    @property
    def swapped_bytes(self) -> tuple[int, int]:
        """What all stages send to their hosts, and what comes back."""
        moved = self.step.moved_bytes
        return round(moved[Does.STORE]), round(moved[Does.FETCH])


def layer_peaks(profile: LayerProfile, samples: int, *, recompute: bool) -> LayerPeaks:
    """What the layers take on a device, in micro-batches of so many samples.

    A layer brings its parameters, buffers, gradients and states, and what it keeps: its input where
    it runs again for the backward, else what the profile says. While it runs it takes what the
    peak of either pass has beyond these, and the gradient of its output.

    Raises:
        OptionError: the layers are no chain, or peaks or what is kept were not measured.
    """
    if not profile.is_chain:
        raise OptionError(
            f"{profile.name} has branches, and stages are stretches of a chain; join the layers of "
            "a branch to one"
        )
    layers = profile.layers
    kept = [ceil(_kept(layer, samples, recompute)) for layer in layers]
    resting = [layer.resting_bytes + k for layer, k in zip(layers, kept, strict=True)]
    leaving = [layer.input_bytes(samples) for layer in layers[1:]] + [0.0]
    working = [
        ceil(_beyond(layer, samples, recompute) + out)
        for layer, out in zip(layers, leaving, strict=True)
    ]
    names = tuple(layer.name for layer in layers)
    return LayerPeaks(names, tuple(resting), tuple(resting), tuple(kept), tuple(working))


def _kept(layer: Layer, samples: int, recompute: bool) -> float:
    return layer.input_bytes(samples) if recompute else layer.kept(samples)


def _beyond(layer: Layer, samples: int, recompute: bool) -> float:
    """What both passes take beside what rests; a peak has all that is made, and no input."""
    held = layer.param_bytes + layer.buffer_bytes + (0.0 if recompute else layer.kept(samples))
    backward = layer.backward_peak(samples) - held - layer.grad_bytes
    forward = layer.forward_peak(samples) - held if layer.forward_peak_bytes else 0.0
    return max(0.0, backward, forward)


def plan_pipeline(
    profile: LayerProfile,
    rows: Sequence[PipelineDevices],
    order: PipelineOrder,
    samples: int,
    *,
    again_only: bool = False,
) -> PipelinePlan:
    """The fastest of all that fit: sizes of micro-batches that divide the samples, with and without
    running layers again, cut for the smallest peak and for the shortest slowest stage, over several
    rows of devices, the first of those that are as fast.

    With `again_only` layers run again for the backward in any case, as in stages that
    `cotrain_compile.pipeline` runs.

    Raises:
        OptionError: as `layer_peaks`, or there are no samples.
        PlacementError: nothing fits, not even micro-batches of one sample whose layers run again.
    """
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    best = fastest(plans_of(profile, rows, order, samples, again_only=again_only))
    if best is None:
        longest = max(rows, key=lambda row: len(row.machines))
        raise _nothing_fits(profile, longest, order, samples)
    return best


def _nothing_fits(
    profile: LayerProfile, devices: PipelineDevices, order: PipelineOrder, samples: int
) -> PlacementError:
    """What is missing where peaks are smallest: all on hosts that may be, layers that run again."""
    peaks = layer_peaks(profile, 1, recompute=True)
    problem = StageProblem(peaks, devices.capacity_bytes, order, samples)
    all_hosted = relieved(problem, profile, BOTH) if devices.hosts else problem
    stages = cut_stages(all_hosted)
    if not all_hosted.fits(stages):
        peaks_and_rooms = zip(stages.peak_bytes, devices.capacity_bytes, strict=True)
        missing = max(peak - room for peak, room in peaks_and_rooms)
        beside = ", optimizer states and kept values on hosts" if devices.hosts else ""
        return PlacementError(
            f"needs {format_bytes(missing)} more on the fullest device, one sample at a time, "
            f"layers that run again{beside}; take more or larger devices",
            shortfall_bytes=missing,
        )
    missing = hosted(problem, profile, devices, stages, BOTH).missing_bytes
    return PlacementError(
        f"needs {format_bytes(missing)} more on the fullest host, for optimizer states and kept "
        "values that its devices have no room for; take hosts with more memory, or more devices",
        shortfall_bytes=missing,
    )


def plans_of(
    profile: LayerProfile,
    rows: Sequence[PipelineDevices],
    order: PipelineOrder,
    samples: int,
    *,
    again_only: bool = False,
) -> Iterator[PipelinePlan]:
    """All that is tried and fits."""
    keeps = not again_only and all(layer.kept_bytes for layer in profile.layers)
    sizes = [each for each in range(1, samples + 1) if samples % each == 0]
    for devices, each, recompute in product(rows, sizes, [False, True] if keeps else [True]):
        yield from _plans(profile, devices, order, each, samples // each, recompute)


def _plans(
    profile: LayerProfile,
    devices: PipelineDevices,
    order: PipelineOrder,
    each: int,
    micro_batches: int,
    recompute: bool,
) -> Iterator[PipelinePlan]:
    problem = StageProblem(
        layer_peaks(profile, each, recompute=recompute),
        devices.capacity_bytes,
        order,
        micro_batches,
    )
    forward_s = [layer.forward_s.at(each) for layer in profile.layers]
    again_s = forward_s if recompute else [0.0] * len(forward_s)
    backward_s = [
        layer.backward_s.at(each) + again
        for layer, again in zip(profile.layers, again_s, strict=True)
    ]
    both_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    ranks = devices.ranks(profile)
    for cut in _cuts(problem, profile, devices, both_s, [rank.slowness for rank in ranks]):
        stages = []
        for (first, end), own in zip(pairwise(cut.stages.bounds), cut.residence, strict=True):
            layers = profile.layers[first:end]
            stages.append(
                Stage(
                    sum(forward_s[first:end]),
                    sum(backward_s[first:end]),
                    _crossing(profile, end, each),
                    sum(layer.touched_bytes for layer in layers[own.states :]),
                    sum(problem.layers.kept_bytes[first:end]) if own.kept else 0,
                    [layer for layer in layers[: own.states] if layer.grad_bytes],
                )
            )
        in_order = StagesInOrder(ranks, stages, order, micro_batches)
        yield PipelinePlan(
            profile, cut.stages, each, recompute, in_order, cut.residence, cut.host_bytes
        )


def _crossing(profile: LayerProfile, bound: int, samples: int) -> float:
    """What a micro-batch brings over a hop, where layers are on both sides of it."""
    between = 0 < bound < len(profile.layers)
    return profile.layers[bound].input_bytes(samples) if between else 0.0


def _cuts(
    problem: StageProblem,
    profile: LayerProfile,
    devices: PipelineDevices,
    both_s: Sequence[float],
    slowness: Sequence[float],
) -> Iterator[HostedCut]:
    """Cuts that fit, with what rests on hosts: nothing, or one thing, or both where that does not
    do."""
    found: dict[HostedCut, None] = {}
    for may_be in ((ON_DEVICE,), (KEPT, STATES), (BOTH,)) if devices.hosts else ((ON_DEVICE,),):
        for may in may_be:
            problem_of_rest = relieved(problem, profile, may)
            balanced = cut_by_time(problem_of_rest, both_s, slowness)
            if balanced is not None:
                for stages in dict.fromkeys((balanced, cut_stages(problem_of_rest))):
                    cut = hosted(problem, profile, devices, stages, may)
                    found |= {} if cut.missing_bytes else {cut: None}
        if found:
            break
    yield from found
