"""Pipeline: a chain of layers on devices one behind the other, and what a step takes.

In: a `LayerProfile` that is a chain, the devices in the order of the pipeline, the samples of a
step. Out: a `PipelinePlan`: where the model is cut, the size of a micro-batch, whether layers run
again for the backward, what of each stage rests on its host, the simulated step, seconds that no
timing of these works can beat, and the peak of each device. A device of another kind takes as many
times as long as the profile says.

Something rests on hosts where without that a size of micro-batches does not fit (`stage_away`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

from cotrain_compile.cluster.pipeline_devices import PipelineDevices
from cotrain_compile.cluster.pipeline_works import Draft, HostWork, Swapped, works_of
from cotrain_compile.cluster.profiles import Layer, LayerProfile
from cotrain_compile.cluster.stage_away import (
    BOTH,
    KEPT,
    NOTHING,
    STATES,
    Placed,
    StageAway,
    placed,
    relieved,
)
from cotrain_compile.cluster.stages import (
    LayerPeaks,
    PipelineOrder,
    StageProblem,
    Stages,
    cut_by_time,
    cut_stages,
)
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Network
from cotrain_compile.placement.simulate.engine import LaneSpec, lower_bound, simulate
from cotrain_compile.placement.simulate.last_end import last_end_s
from cotrain_compile.plan import Timeline
from cotrain_compile.units import format_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """A cut and what its step takes, simulated; `hop_bytes` cross each hop, both ways together.

    `away` says what of each stage rests on its host, `host_bytes` how much that is of all of them,
    and `swapped_bytes` what they send there in a step, and what comes back.
    """

    order: PipelineOrder
    stages: Stages
    micro_batch: int
    micro_batches: int
    recompute: bool
    step_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]
    hop_bytes: tuple[int, ...]
    away: tuple[StageAway, ...]
    host_bytes: int
    swapped_bytes: tuple[int, int]
    timeline: Timeline

    @property
    def name(self) -> str:
        """What strategies call it."""
        return f"pipeline-{self.order}"


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
    resting = [_resting(layer) + k for layer, k in zip(layers, kept, strict=True)]
    leaving = [layer.input_bytes(samples) for layer in layers[1:]] + [0.0]
    working = [
        ceil(_beyond(layer, samples, recompute) + out)
        for layer, out in zip(layers, leaving, strict=True)
    ]
    names = tuple(layer.name for layer in layers)
    return LayerPeaks(names, tuple(resting), tuple(resting), tuple(kept), tuple(working))


def _kept(layer: Layer, samples: int, recompute: bool) -> float:
    return layer.input_bytes(samples) if recompute else layer.kept(samples)


def _resting(layer: Layer) -> int:
    return layer.param_bytes + layer.buffer_bytes + layer.grad_bytes + layer.state_bytes


def _beyond(layer: Layer, samples: int, recompute: bool) -> float:
    """What both passes take beside what rests; a peak has all that is made, and no input."""
    held = layer.param_bytes + layer.buffer_bytes + (0.0 if recompute else layer.kept(samples))
    backward = layer.backward_peak(samples) - held - layer.grad_bytes
    forward = layer.forward_peak(samples) - held if layer.forward_peak_bytes else 0.0
    return max(0.0, backward, forward)


def plan_pipeline(
    profile: LayerProfile, devices: PipelineDevices, order: PipelineOrder, samples: int
) -> PipelinePlan:
    """The fastest of all that fit: sizes of micro-batches that divide the samples, with and without
    running layers again, cut for the smallest peak and for the shortest slowest stage.

    Raises:
        OptionError: as `layer_peaks`, or there are no samples.
        PlacementError: nothing fits, not even micro-batches of one sample whose layers run again.
    """
    return fastest_pipeline(profile, [devices], order, samples)


def fastest_pipeline(
    profile: LayerProfile,
    rows: Sequence[PipelineDevices],
    order: PipelineOrder,
    samples: int,
    *,
    again_only: bool = False,
) -> PipelinePlan:
    """The same over several rows of devices, the first of those that are as fast; what cannot be
    faster is not simulated.

    With `again_only` layers run again for the backward in any case, as in stages that
    `cotrain_compile.pipeline` runs. Raises as `plan_pipeline`, of the longest row.
    """
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    drafts = drafts_of(profile, rows, order, samples, again_only=again_only)
    if not drafts:
        longest = max(rows, key=lambda row: len(row.capacity_bytes))
        raise _nothing_fits(profile, longest, order, samples)
    best, best_s = drafts[0], inf
    for draft in sorted(drafts, key=lambda draft: draft.bound_s):
        if draft.bound_s >= best_s:
            break
        step_s = last_end_s(works_of(draft))
        if step_s < best_s:
            best, best_s = draft, step_s
    return simulated(profile, best)


def _nothing_fits(
    profile: LayerProfile, devices: PipelineDevices, order: PipelineOrder, samples: int
) -> PlacementError:
    """What is missing where peaks are smallest: all away that may be, layers that run again."""
    peaks = layer_peaks(profile, 1, recompute=True)
    problem = StageProblem(peaks, devices.capacity_bytes, order, samples)
    all_away = relieved(problem, profile, BOTH) if devices.hosts else problem
    stages = cut_stages(all_away)
    if not all_away.fits(stages):
        peaks_and_rooms = zip(stages.peak_bytes, devices.capacity_bytes, strict=True)
        missing = max(peak - room for peak, room in peaks_and_rooms)
        away = ", optimizer states and kept values on hosts" if devices.hosts else ""
        return PlacementError(
            f"needs {format_bytes(missing)} more on the fullest device, one sample at a time, "
            f"layers that run again{away}; take more or larger devices",
            shortfall_bytes=missing,
        )
    missing = placed(problem, profile, devices, stages, BOTH).missing_bytes
    return PlacementError(
        f"needs {format_bytes(missing)} more on the fullest host, for optimizer states and kept "
        "values that its devices have no room for; take hosts with more memory, or more devices",
        shortfall_bytes=missing,
    )


def drafts_of(
    profile: LayerProfile,
    rows: Sequence[PipelineDevices],
    order: PipelineOrder,
    samples: int,
    *,
    again_only: bool = False,
) -> list[Draft]:
    """All that is tried and fits, before it is simulated."""
    keeps = not again_only and all(layer.kept_bytes for layer in profile.layers)
    ways = [False, True] if keeps else [True]
    return [
        draft
        for devices in rows
        for each in range(1, samples + 1)
        if samples % each == 0
        for recompute in ways
        for draft in _drafts(profile, devices, order, each, samples // each, recompute)
    ]


def _drafts(
    profile: LayerProfile,
    devices: PipelineDevices,
    order: PipelineOrder,
    each: int,
    micro_batches: int,
    recompute: bool,
) -> Iterator[Draft]:
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
    slowness = devices.slowness(profile)
    for stages, away, host_bytes, _ in _cuts(problem, profile, devices, both_s, slowness):
        yield Draft(
            order,
            stages,
            each,
            micro_batches,
            recompute,
            _by_stage(forward_s, stages, slowness),
            _by_stage(backward_s, stages, slowness),
            tuple(_updates_s(profile, devices, stages, away)),
            tuple(map(_sent_s, _crossing(profile, stages, each), devices.hops)),
            away,
            tuple(_swapped(problem, profile, devices, stages, away)),
            host_bytes,
        )


def _cuts(
    problem: StageProblem,
    profile: LayerProfile,
    devices: PipelineDevices,
    both_s: Sequence[float],
    slowness: Sequence[float],
) -> Iterator[Placed]:
    """Cuts that fit, with what is away: nothing, or one thing, or both where that does not do."""
    found: dict[Placed, None] = {}
    for may_be in ((NOTHING,), (KEPT, STATES), (BOTH,)) if devices.hosts else ((NOTHING,),):
        for may in may_be:
            all_away = relieved(problem, profile, may)
            balanced = cut_by_time(all_away, both_s, slowness)
            if balanced is not None:
                for stages in dict.fromkeys((balanced, cut_stages(all_away))):
                    cut = placed(problem, profile, devices, stages, may)
                    found |= {} if cut.missing_bytes else {cut: None}
        if found:
            break
    yield from found


def _by_stage(
    figures: Sequence[float], stages: Stages, slowness: Sequence[float]
) -> tuple[float, ...]:
    cuts = zip(pairwise(stages.bounds), slowness, strict=True)
    return tuple(times * sum(figures[first:last]) for (first, last), times in cuts)


def simulated(profile: LayerProfile, draft: Draft) -> PipelinePlan:
    """The step of a draft."""
    works = list(works_of(draft))
    lanes = [LaneSpec(lane) for lane in dict.fromkeys(work.lane for work in works)]
    timeline = simulate(works, lanes)
    crossing = _crossing(profile, draft.stages, draft.each)
    return PipelinePlan(
        draft.order,
        draft.stages,
        draft.each,
        draft.micro_batches,
        draft.recompute,
        max(span.end_s for span in timeline.spans),
        lower_bound(works, lanes),
        draft.stages.peak_bytes,
        tuple(round(2 * draft.micro_batches * nbytes) for nbytes in crossing),
        draft.away,
        draft.host_bytes,
        draft.swapped_bytes,
        timeline,
    )


def _crossing(profile: LayerProfile, stages: Stages, samples: int) -> tuple[float, ...]:
    """What a micro-batch brings over each hop, where layers are on both sides of it."""
    count = len(profile.layers)
    return tuple(
        profile.layers[bound].input_bytes(samples) if 0 < bound < count else 0.0
        for bound in stages.bounds[1:-1]
    )


def _updates_s(
    profile: LayerProfile,
    devices: PipelineDevices,
    stages: Stages,
    away: Sequence[StageAway],
) -> Iterator[float]:
    """On each device, of the layers whose states rest there."""
    cuts = zip(pairwise(stages.bounds), away, devices.memory_bytes_per_s, strict=True)
    for (first, end), own, rate in cuts:
        yield sum(map(_touched_bytes, profile.layers[first + own.states : end])) / rate


def _swapped(
    problem: StageProblem,
    profile: LayerProfile,
    devices: PipelineDevices,
    stages: Stages,
    away: Sequence[StageAway],
) -> Iterator[Swapped]:
    for device, ((first, end), own) in enumerate(zip(pairwise(stages.bounds), away, strict=True)):
        if own == NOTHING:
            yield Swapped()
            continue
        host = devices.hosts[device]
        kept = sum(problem.layers.kept_bytes[first:end]) if own.kept else 0
        updates = [
            HostWork(
                layer.name,
                host.down_s(layer.grad_bytes),
                host.update_s(_touched_bytes(layer)),
                host.up_s(layer.param_bytes),
                layer.grad_bytes,
                layer.param_bytes,
            )
            for layer in profile.layers[first : first + own.states]
            if layer.grad_bytes
        ]
        yield Swapped(kept, host.down_s(kept), host.up_s(kept), tuple(updates))


def _sent_s(nbytes: float, hop: Network) -> float:
    return nbytes / hop.bytes_per_s + hop.latency_s if nbytes else 0.0


def _touched_bytes(layer: Layer) -> int:
    """What an update reads and writes: parameters and states both, gradients are only read."""
    return 2 * (layer.param_bytes + layer.state_bytes) + layer.grad_bytes
