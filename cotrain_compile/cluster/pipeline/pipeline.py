"""Pipeline: a chain of layers on devices one behind the other, and what a step takes.

In: a `LayerProfile` that is a chain, the devices in the order of the pipeline, the samples of a
step. Out: a `PipelinePlan`: where the model is cut, the size of a micro-batch, whether layers run
again for the backward, what of each stage rests on its host, and from these the step, and the peak
of each device. A device of another kind takes as many times as long as the profile says.

Layers of the last stage run again only where what they keep of one micro-batch does not fit: it
does both passes of it at once.

Something rests on hosts where else a size of micro-batches does not fit (`hosted`). Where several
ranks have each stage, each for its share of the samples, `SharedStages` says what they exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import ceil
from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import Layer, LayerProfile, units_in
from cotrain_compile.cluster.pipeline.bounds import least_of, once_s
from cotrain_compile.cluster.pipeline.cuts import (
    LayerPeaks,
    PipelineDevices,
    PipelineOrder,
    StageProblem,
    Stages,
    cut_stages,
)
from cotrain_compile.cluster.pipeline.hosted_cuts import (
    BOTH,
    HostedCut,
    fitting_cuts,
    hosted,
    relieved,
)
from cotrain_compile.cluster.pipeline.shared_stages import ALONE, SharedStages
from cotrain_compile.cluster.pipeline.step import (
    ExchangedPart,
    Stage,
    StagesInOrder,
    pipeline_step,
)
from cotrain_compile.cluster.steps.fastest import fastest_option
from cotrain_compile.cluster.steps.rank_memory import Residence
from cotrain_compile.cluster.steps.stage_step import (
    Does,
    StageStep,
)
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.support.units import format_bytes


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
    def closer_s(self) -> float:
        """What its turns take in their order, with what is sent between them."""
        return max(self.least_s, self.stages.turns_s())

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
    found = fastest_option(options_of(profile, rows, order, samples, again_only=again_only))
    if found is None:
        longest = max(rows, key=lambda row: len(row.machines))
        raise _nothing_fits(profile, longest, order, samples)
    return found[1]


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


def options_of(
    profile: LayerProfile,
    rows: Sequence[PipelineDevices],
    order: PipelineOrder,
    samples: int,
    *,
    again_only: bool = False,
) -> Iterator[PipelineOption]:
    """Each row of devices with each size of micro-batches, as layers are and run again."""
    keeps = not again_only and all(layer.kept_bytes for layer in profile.layers)
    sizes = [each for each in range(1, samples + 1) if samples % each == 0]
    known = {each: once_s(profile, each) for each in sizes}
    for devices, each, recompute in product(rows, sizes, [False, True] if keeps else [True]):
        batches = Batches(each, samples // each, recompute)
        slowness = min(rank.slowness for rank in devices.ranks(profile))
        seconds = known[each].again if recompute else known[each].kept
        least_s = slowness * least_of(seconds, batches.micro_batches, len(devices.machines))
        yield PipelineOption(profile, devices, order, batches, least_s)


@dataclass(frozen=True)
class PipelineOption:
    """A row of devices with micro-batches of a size, and what none of its cuts passes under."""

    profile: LayerProfile
    devices: PipelineDevices
    order: PipelineOrder
    batches: Batches
    least_s: float

    def plans(self) -> Iterator[PipelinePlan]:
        """All cuts that fit."""
        yield from plans_at(self.profile, self.devices, self.order, self.batches)


class Batches(NamedTuple):
    """Micro-batches of a size, and whether layers run again for the backward of each."""

    micro_batch: int
    micro_batches: int
    recompute: bool


def plans_at(
    profile: LayerProfile,
    devices: PipelineDevices,
    order: PipelineOrder,
    batches: Batches,
    beside: SharedStages = ALONE,
) -> Iterator[PipelinePlan]:
    """All that fits of one size of micro-batches, on one row of devices."""
    at_rest = beside.at_rest(profile)
    peaks = layer_peaks(at_rest, batches.micro_batch, recompute=batches.recompute)
    problem = StageProblem(peaks, devices.capacity_bytes, order, batches.micro_batches)
    made: dict[tuple[HostedCut, bool], None] = {}
    for again in (False, True) if batches.recompute else (False,):
        both_s = list(_both_s(profile, devices, batches, again))
        is_last_again = again
        for cut in fitting_cuts(problem, at_rest, devices, both_s, in_parts=beside.parts > 1):
            whole = cut
            if batches.recompute and not again:
                whole = _keeping(profile, cut, batches.micro_batch)
            if whole.stages.peak_bytes[-1] <= problem.capacity_bytes[-1]:
                made[whole, again] = None
            else:
                made[cut, True], is_last_again = None, True
        if not is_last_again:
            break
    for cut, again in made:
        stages = list(_stages(profile, cut, peaks, batches, beside, again))
        ranks = devices.ranks(profile)
        in_order = StagesInOrder(ranks, stages, order, batches.micro_batches, beside.rings)
        yield PipelinePlan(
            profile,
            cut.stages,
            batches.micro_batch,
            batches.recompute,
            in_order,
            cut.residence,
            cut.host_bytes,
        )


def _both_s(
    profile: LayerProfile, devices: PipelineDevices, batches: Batches, last_again: bool
) -> Iterator[Sequence[float]]:
    """The seconds of all layers on each device, with what runs again."""
    each = batches.micro_batch
    last = len(devices.machines) - 1
    for number, rank in enumerate(devices.ranks(profile)):
        again = batches.recompute and (number < last or last_again)
        yield [
            rank.slowness * (layer.compute_s(each) + again * layer.forward_s.at(each))
            for layer in profile.layers
        ]


def _keeping(profile: LayerProfile, cut: HostedCut, samples: int) -> HostedCut:
    """A cut whose last stage keeps what its layers make of one micro-batch, at most as much as the
    peaks of their backwards, where nobody knows what they keep."""
    first, end = cut.stages.bounds[-2:]
    more = 0.0
    for layer in profile.layers[first:end]:
        if layer.kept_bytes:
            kept = layer.kept(samples)
        else:
            kept = layer.backward_peak(samples) - layer.param_bytes - layer.grad_bytes
        more += max(0.0, kept - layer.input_bytes(samples))
    *others, last = cut.stages.peak_bytes
    return cut._replace(stages=replace(cut.stages, peak_bytes=(*others, last + ceil(more))))


def _stages(
    profile: LayerProfile,
    cut: HostedCut,
    peaks: LayerPeaks,
    batches: Batches,
    beside: SharedStages,
    last_again: bool,
) -> Iterator[Stage]:
    each, last = batches.micro_batch, len(cut.residence) - 1
    for number, (first, end) in enumerate(pairwise(cut.stages.bounds)):
        layers, offloaded = profile.layers[first:end], cut.residence[number]
        again = batches.recompute and (number < last or last_again)
        own = [beside.own(layer) for layer in layers]
        forward_s = sum(layer.forward_s.at(each) for layer in layers)
        yield Stage(
            forward_s,
            sum(layer.backward_s.at(each) for layer in layers) + again * forward_s,
            _crossing(profile, end, each),
            sum(layer.touched_bytes for layer in own[offloaded.states :]),
            sum(peaks.kept_bytes[first:end]) if offloaded.kept else 0,
            [layer for layer in own[: offloaded.states] if layer.grad_bytes],
            list(_parts(layers, each, again, beside)),
            at_once=batches.recompute and not again,
        )


def _parts(
    layers: Sequence[Layer], samples: int, again: bool, beside: SharedStages
) -> Iterator[ExchangedPart]:
    """What of a stage is exchanged at once, where other ranks have it too."""
    if not layers or not beside.rings:
        return
    for unit in units_in(layers):
        forward_s = unit.forward_s(samples)
        yield ExchangedPart(
            forward_s,
            unit.backward_s(samples) + again * forward_s,
            unit.param_bytes if beside.parts > 1 else 0,
            tuple(beside.exchanges(unit)),
        )


def _crossing(profile: LayerProfile, bound: int, samples: int) -> float:
    """What a micro-batch brings over a hop, where layers are on both sides of it."""
    between = 0 < bound < len(profile.layers)
    return profile.layers[bound].input_bytes(samples) if between else 0.0
