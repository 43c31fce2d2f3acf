"""Pipeline: a chain of layers on devices one behind the other, and what a step takes.

In: a `LayerProfile` that is a chain, the devices in the order of the pipeline, the samples of a
step. Out: a `PipelinePlan`: where the model is cut, the size of a micro-batch, whether layers run
again for the backward, the simulated step, seconds that no timing of these works can beat, and the
peak of each device. Devices are as fast as the one that the profile is of.

A stage runs its micro-batches in the order of GPipe (all forwards, then all backwards) or of 1F1B
(as many forwards as stages follow, then a backward and a forward in turn). What goes from stage to
stage is sent while they compute. Parameters, gradients and optimizer states stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from cotrain_compile.cluster.description import Cluster
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


@dataclass(frozen=True)
class PipelineDevices:
    """Devices in order: their memory, its rate, and what the d-th sends to the next one over."""

    capacity_bytes: tuple[int, ...]
    memory_bytes_per_s: tuple[float, ...]
    hops: tuple[Network, ...]

    def __post_init__(self) -> None:
        count = len(self.capacity_bytes)
        if not count or len(self.memory_bytes_per_s) != count or len(self.hops) != count - 1:
            raise OptionError(
                f"{count} devices in a row have {count} memory rates and one hop fewer, not "
                f"{len(self.memory_bytes_per_s)} and {len(self.hops)}"
            )


def devices_of(cluster: Cluster) -> PipelineDevices:
    """All devices of a cluster in their order, machine by machine."""
    each = [cluster.groups[place.group].each[place.device].device for place in cluster.devices]
    hops = []
    for here, there in pairwise(cluster.devices):
        near = (here.group, here.machine) == (there.group, there.machine)
        ends = [cluster.groups[place.group] for place in (here, there)]
        paths = [group.peers if near else group.nic for group in ends]
        known = [path for path in paths if path]
        rate = min(path.bytes_per_s for path in known)
        hops.append(Network(rate, max(path.latency_s for path in known)))
    return PipelineDevices(
        tuple(device.capacity_bytes for device in each),
        tuple(device.bytes_per_s for device in each),
        tuple(hops),
    )


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
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    ways = [False, True] if all(layer.kept_bytes for layer in profile.layers) else [True]
    drafts = [
        draft
        for each in range(1, samples + 1)
        if samples % each == 0
        for recompute in ways
        for draft in _drafts(profile, devices, order, each, samples // each, recompute)
    ]
    if not drafts:
        problem = StageProblem(
            layer_peaks(profile, 1, recompute=True), devices.capacity_bytes, order, samples
        )
        problem.require_fit(cut_stages(problem))
    best: PipelinePlan | None = None
    for draft in sorted(drafts, key=lambda draft: draft.busiest_s):
        if best and draft.busiest_s >= best.step_s:
            break
        plan = _simulated(profile, devices, order, draft)
        if best is None or plan.step_s < best.step_s:
            best = plan
    assert best is not None  # the refusal above is of the draft with the smallest peaks
    return best


@dataclass(frozen=True)
class _Draft:
    """A cut that fits; seconds of its stages are for one micro-batch."""

    stages: Stages
    each: int
    micro_batches: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def busiest_s(self) -> float:
        both = zip(self.forward_s, self.backward_s, strict=True)
        return self.micro_batches * max(forward + backward for forward, backward in both)


def _drafts(
    profile: LayerProfile,
    devices: PipelineDevices,
    order: PipelineOrder,
    each: int,
    micro_batches: int,
    recompute: bool,
) -> Iterator[_Draft]:
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
    balanced = cut_by_time(problem, both_s)
    if balanced is None:
        return
    for stages in dict.fromkeys((balanced, cut_stages(problem))):
        yield _Draft(
            stages,
            each,
            micro_batches,
            recompute,
            _by_stage(forward_s, stages),
            _by_stage(backward_s, stages),
        )


def _by_stage(figures: Sequence[float], stages: Stages) -> tuple[float, ...]:
    return tuple(sum(figures[first:last]) for first, last in pairwise(stages.bounds))


def _simulated(
    profile: LayerProfile, devices: PipelineDevices, order: PipelineOrder, draft: _Draft
) -> PipelinePlan:
    works = list(_works(profile, devices, order, draft))
    lanes = [LaneSpec(lane) for lane in dict.fromkeys(work.lane for work in works)]
    timeline = simulate(works, lanes)
    crossing = _crossing(profile, draft)
    return PipelinePlan(
        order,
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


def _crossing(profile: LayerProfile, draft: _Draft) -> tuple[float, ...]:
    """What a micro-batch brings over each hop, where layers are on both sides of it."""
    count = len(profile.layers)
    return tuple(
        profile.layers[bound].input_bytes(draft.each) if 0 < bound < count else 0.0
        for bound in draft.stages.bounds[1:-1]
    )


def _works(
    profile: LayerProfile, devices: PipelineDevices, order: PipelineOrder, draft: _Draft
) -> Iterator[Work]:
    """Forwards, backwards, what goes over each hop, and at the end the update of each stage."""
    last = len(devices.capacity_bytes) - 1
    crossing = _crossing(profile, draft)
    for device in range(last + 1):
        for kind, i in _turns(order, draft.micro_batches, last + 1 - device):
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
                seconds = _sent_s(crossing[hop], devices.hops[hop])
                yield Work(f"{what} {i} over hop {hop}", f"{what} over hop {hop}", seconds, (name,))
    for device, (first, end) in enumerate(pairwise(draft.stages.bounds)):
        touched = sum(_touched_bytes(layer) for layer in profile.layers[first:end])
        seconds = touched / devices.memory_bytes_per_s[device]
        yield Work(f"update of stage {device}", f"device{device}", seconds)


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
