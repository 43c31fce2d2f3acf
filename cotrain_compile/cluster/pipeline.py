"""Pipeline: a chain of layers on devices one behind the other, and what a step takes.

In: a `LayerProfile` that is a chain, the devices in the order of the pipeline, the samples of a
step. Out: a `PipelinePlan`: where the model is cut, the size of a micro-batch, whether layers run
again for the backward, the simulated step, seconds that no timing of these works can beat, and the
peak of each device. A device of another kind takes as many times as long as the profile says.

A stage runs its micro-batches in the order of GPipe (all forwards, then all backwards) or of 1F1B
(as many forwards as stages follow, then a backward and a forward in turn). What goes from stage to
stage is sent while they compute. Parameters, gradients and optimizer states stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil

from cotrain_compile.cluster.pipeline_devices import PipelineDevices
from cotrain_compile.cluster.profiles import Layer, LayerProfile
from cotrain_compile.cluster.stages import (
    LayerPeaks,
    PipelineOrder,
    StageProblem,
    Stages,
    cut_by_time,
    cut_stages,
)
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Network
from cotrain_compile.placement.simulate.engine import LaneSpec, Work, lower_bound, simulate
from cotrain_compile.plan import Timeline

# A bound is a sum in another order than the simulator's.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class PipelinePlan:
    """A cut and what its step takes, simulated; `hop_bytes` cross each hop, both ways together."""

    order: PipelineOrder
    stages: Stages
    micro_batch: int
    micro_batches: int
    recompute: bool
    step_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]
    hop_bytes: tuple[int, ...]
    timeline: Timeline

    @property
    def name(self) -> str:
        """What strategies call it."""
        return f"pipeline-{self.order}"


def layer_peaks(profile: LayerProfile, samples: int, *, recompute: bool) -> LayerPeaks:
    """What the layers take on a device, in micro-batches of so many samples.

    A layer brings its parameters, buffers, gradients and states, and what it keeps: its input where
    it runs again for the backward, else what the profile says. While its backward runs it takes
    what its peak has beyond these, and the gradient of its output.

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
    """What the backward takes beside what rests; a peak has all that is made, and no input."""
    held = layer.param_bytes + layer.buffer_bytes + layer.grad_bytes
    made = 0.0 if recompute else layer.kept(samples)
    return max(0.0, layer.backward_peak(samples) - held - made)


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
    """The same over several rows of devices; what cannot be faster is not simulated.

    With `again_only` layers run again for the backward in any case, as in stages that
    `cotrain_compile.pipeline` runs. Raises as `plan_pipeline`, of the first row.
    """
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    drafts = drafts_of(profile, rows, order, samples, again_only=again_only)
    if not drafts:
        problem = StageProblem(
            layer_peaks(profile, 1, recompute=True), rows[0].capacity_bytes, order, samples
        )
        problem.require_fit(cut_stages(problem))
    best: PipelinePlan | None = None
    for draft in sorted(drafts, key=lambda draft: draft.bound_s):
        if best and draft.bound_s >= best.step_s:
            break
        plan = simulated(profile, draft)
        if best is None or plan.step_s < best.step_s:
            best = plan
    assert best is not None  # the refusal above is of the draft with the smallest peaks
    return best


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


@dataclass(frozen=True)
class Draft:
    """A cut that fits; seconds of its stages, and over hops, are for one micro-batch."""

    order: PipelineOrder
    stages: Stages
    each: int
    micro_batches: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    hop_s: tuple[float, ...]

    @cached_property
    def bound_s(self) -> float:
        """What this order takes at least: the longest of two chains through each stage.

        Before its first forward a micro-batch passes the stages before it, and they run its
        backward after its last one; each stage updates at its end. Between, a stage computes all
        micro-batches; or it waits for one to come back, as often as it may begin another only then.
        """
        both_s = [sum(both) for both in zip(self.forward_s, self.backward_s, strict=True)]
        around_s = [2 * hop_s for hop_s in self.hop_s]
        passed_s, longest_s = 0.0, 0.0
        back_s = sum(both_s) + sum(around_s)
        for stage, each_s in enumerate(both_s):
            ahead = self.order.in_flight(self.micro_batches, len(both_s), stage)
            rounds, more = divmod(self.micro_batches - 1, ahead)
            waiting_s = (rounds + 1) * back_s + more * self.backward_s[stage]
            ends_s = max(self.update_s[stage], self.update_s[0] if stage else 0.0)
            stays_s = max(self.micro_batches * each_s, waiting_s)
            longest_s = max(longest_s, passed_s + stays_s + ends_s)
            if stage < len(around_s):
                passed_s += each_s + around_s[stage]
                back_s -= each_s + around_s[stage]
        return longest_s * _ROUNDING


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
    balanced = cut_by_time(problem, both_s, slowness)
    if balanced is None:
        return
    for stages in dict.fromkeys((balanced, cut_stages(problem))):
        yield Draft(
            order,
            stages,
            each,
            micro_batches,
            recompute,
            _by_stage(forward_s, stages, slowness),
            _by_stage(backward_s, stages, slowness),
            tuple(_updates_s(profile, devices, stages)),
            tuple(map(_sent_s, _crossing(profile, stages, each), devices.hops)),
        )


def _by_stage(
    figures: Sequence[float], stages: Stages, slowness: Sequence[float]
) -> tuple[float, ...]:
    cuts = zip(pairwise(stages.bounds), slowness, strict=True)
    return tuple(times * sum(figures[first:last]) for (first, last), times in cuts)


def simulated(profile: LayerProfile, draft: Draft) -> PipelinePlan:
    """The step of a draft."""
    works = list(_works(draft))
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
        timeline,
    )


def _crossing(profile: LayerProfile, stages: Stages, samples: int) -> tuple[float, ...]:
    """What a micro-batch brings over each hop, where layers are on both sides of it."""
    count = len(profile.layers)
    return tuple(
        profile.layers[bound].input_bytes(samples) if 0 < bound < count else 0.0
        for bound in stages.bounds[1:-1]
    )


def _works(draft: Draft) -> Iterator[Work]:
    """Forwards, backwards, what goes over each hop, and at the end the update of each stage."""
    last = len(draft.forward_s) - 1
    for device in range(last + 1):
        for kind, i in _turns(draft.order, draft.micro_batches, last + 1 - device):
            name = f"{kind} {i} of stage {device}"
            if kind == "forward":
                after = [f"activations {i} over hop {device - 1}"] if device else []
                yield Work(name, f"device{device}", draft.forward_s[device], tuple(after))
                ahead, hop = device < last, device
            else:
                after = [f"forward {i} of stage {device}"]
                after += [f"gradients {i} over hop {device}"] if device < last else []
                yield Work(name, f"device{device}", draft.backward_s[device], tuple(after))
                ahead, hop = device > 0, device - 1
            if ahead:
                what = "activations" if kind == "forward" else "gradients"
                lane = f"{what} over hop {hop}"
                yield Work(f"{what} {i} over hop {hop}", lane, draft.hop_s[hop], (name,))
    for device, seconds in enumerate(draft.update_s):
        yield Work(f"update of stage {device}", f"device{device}", seconds)


def _updates_s(profile: LayerProfile, devices: PipelineDevices, stages: Stages) -> Iterator[float]:
    cuts = pairwise(stages.bounds)
    for (first, end), rate in zip(cuts, devices.memory_bytes_per_s, strict=True):
        yield sum(_touched_bytes(layer) for layer in profile.layers[first:end]) / rate


def _sent_s(nbytes: float, hop: Network) -> float:
    return nbytes / hop.bytes_per_s + hop.latency_s if nbytes else 0.0


def _touched_bytes(layer: Layer) -> int:
    """What an update reads and writes: parameters and states both, gradients are only read."""
    return 2 * (layer.param_bytes + layer.state_bytes) + layer.grad_bytes


def _turns(order: PipelineOrder, micro_batches: int, stages: int) -> Iterator[tuple[str, int]]:
    """In which order a stage with so many stages from it on runs its micro-batches."""
    ahead = order.in_flight(micro_batches, stages, 0)
    yield from (("forward", i) for i in range(ahead))
    for i in range(micro_batches):
        yield "backward", i
        if ahead + i < micro_batches:
            yield "forward", ahead + i
