"""Burst plan: widths of layers on a cluster, with updates and the peak of the fullest device.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: a `BurstPlan`, the fastest that fits.
The widths are `plan_widths`'; what is added is the update of all parameters by the first device,
which has every layer, and its peak. No torch.

Width search: on how many devices each layer of a chain runs, so that the step takes least.

In: a `WidthProblem`, in which the samples of a step are a fixed number. Out: a `WidthPlan`
(DeepPool; Park et al., MLSys 2022), by a dynamic program over the widths of all layers:

    t[i, g]        = min over p of t[i-1, p] + transfer(p, g) + compute(i, batch/g) + sync(i, g)
    sync(i, g)     = gradient bytes / rate, 0 for one device
    transfer(p, g) = 2 (max(sent, received by any device) / rate + latency), 0 for p = g

What a device has under both widths is not sent. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from cotrain_compile.cluster.model.description import Cluster, first_devices
from cotrain_compile.cluster.model.machines import machines_by_kind
from cotrain_compile.cluster.model.profiles import (
    BATCH,
    Layer,
    LayerProfile,
    Read,
    constant,
    knows_peaks,
    units_of,
    ways_of,
)
from cotrain_compile.cluster.steps.rank_memory import ON_DEVICE, RankMemory, WorkingMemory
from cotrain_compile.cluster.steps.stage_step import Does, Rank
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import NETWORK, Network
from cotrain_compile.plan import Span, Timeline

_ALONE = Network(1.0)  # one device sends nothing
_Part = tuple[tuple[str, ...], str, float]  # lanes, what is done there, seconds


@dataclass(frozen=True)
class BurstPlan:
    """Widths by layer. `compute_s` and `network_s` are what the first device is busy with each.

    `peak_bytes` is its peak, None where the profile knows no peaks.
    """

    widths: Mapping[str, int]
    devices: int
    recompute: bool
    seconds: float
    compute_s: float
    network_s: float
    peak_bytes: int | None
    missing_bytes: int
    traffic: Mapping[str, int]
    timeline: Timeline

    @property
    def bound_s(self) -> float:
        """The busier of its two lanes."""
        return max(self.compute_s, self.network_s)

    @property
    def busiest(self) -> tuple[str, float]:
        """That lane, and its seconds."""
        if self.compute_s >= self.network_s:
            return "compute", self.compute_s
        return NETWORK, self.network_s


def plan_burst(profile: LayerProfile, cluster: Cluster, samples: int) -> BurstPlan:
    """The fastest that fits, on any number of the first devices; else the nearest to it."""
    plans = [
        _planned(way, first_devices(cluster, count), samples, recompute=recompute)
        for count in _powers_of_two(len(cluster.devices))
        for way, recompute in ways_of(profile)
    ]
    return min(plans, key=lambda plan: (plan.missing_bytes, plan.seconds))


def _powers_of_two(most: int) -> Iterator[int]:
    """Widths are of these."""
    return (1 << i for i in range(most.bit_length()))


def _planned(profile: LayerProfile, part: Cluster, samples: int, *, recompute: bool) -> BurstPlan:
    profile = profile.on(part.kinds)
    problem = WidthProblem(profile, part.ring or _ALONE, samples, len(part.devices))
    plan = plan_widths(problem)
    units = units_of(profile)
    update_s = max(
        Rank(machine, "").seconds(Does.UPDATE, sum(unit.touched_bytes for unit in units))
        for machine in machines_by_kind(part).values()
    )
    widths = [(layer, plan.widths[layer.name]) for layer in profile.layers]
    compute_s = sum(layer.compute_s(samples / width) for layer, width in widths)
    sync_s = sum(problem.sync_s(layer, width) for layer, width in widths)
    peak = None
    if knows_peaks(profile):
        working = WorkingMemory(_at_widths(profile, plan, samples), 1)
        peak = RankMemory(working, 1, streamed=False).peak_bytes(ON_DEVICE)
    return BurstPlan(
        plan.widths,
        max(plan.widths.values()),
        recompute,
        plan.step_s + update_s,
        compute_s + update_s,
        sync_s,
        peak,
        max(0, (peak or 0) - min(part.capacities_bytes)),
        _traffic(profile, plan, samples),
        width_timeline(problem, plan.widths, update_s),
    )


def _at_widths(profile: LayerProfile, plan: WidthPlan, samples: int) -> LayerProfile:
    """The profile with what each layer takes of its share of the samples, as constants."""
    return replace(
        profile,
        layers=tuple(
            _at_share(layer, samples / plan.widths[layer.name], plan, samples)
            for layer in profile.layers
        ),
    )


def _at_share(layer: Layer, share: float, plan: WidthPlan, samples: int) -> Layer:
    def widest(read: Read) -> Read:
        """What is read, where it is made or where it is read, whichever is more."""
        made = samples / plan.widths[read.source] if read.source else share
        return Read(read.source, constant(read.nbytes.at(max(made, share))))

    forward = layer.forward_peak_bytes
    return replace(
        layer,
        reads=tuple(map(widest, layer.reads)),
        kept_bytes=constant(layer.kept(share)),
        forward_peak_bytes=constant(forward.at(share)) if forward else None,
        backward_peak_bytes=constant(layer.backward_peak(share)),
    )


def _traffic(profile: LayerProfile, plan: WidthPlan, samples: int) -> dict[str, int]:
    """Gradients that are summed, once from each device, and what changes its devices, both ways."""
    moved: Counter[str] = Counter()
    for layer in profile.layers:
        width = plan.widths[layer.name]
        if width > 1:
            moved["sums of gradients"] += width * layer.grad_bytes
        for read in layer.reads:
            if read.source:
                before = plan.widths[read.source]
                part = abs(before - width) / max(before, width)
                moved["between widths"] += round(2 * part * read.nbytes.at(samples))
    return {link: nbytes for link, nbytes in moved.items() if nbytes}


def width_timeline(problem: WidthProblem, widths: Mapping[str, int], update_s: float) -> Timeline:
    """The step as a timeline of its devices, which takes as long as the plan says.

    All forwards, all backwards, the sums of gradients as DeepPool counts them, behind what was
    computed, and the update, one part after the other. Devices that always work together share a
    lane.
    """
    lanes = device_lanes(widths)
    everywhere = tuple(lanes.values())
    layers = problem.profile.layers
    forth = [
        part for layer in layers for part in _layer_parts(problem, layer, widths, lanes, "forward")
    ]
    back = [
        part
        for layer in reversed(layers)
        for part in _layer_parts(problem, layer, widths, lanes, "backward")
    ]
    sums = [
        ((NETWORK,), f"sum of {layer.name}", problem.sync_s(layer, widths[layer.name]))
        for layer in layers
    ]
    spans, now_s = [], 0.0
    for on, name, seconds in (*forth, *back, *sums, (everywhere, "update", update_s)):
        if seconds:
            spans += [Span(lane, name, now_s, now_s + seconds) for lane in on]
            now_s += seconds
    return Timeline("predicted", tuple(spans), {})


def device_lanes(widths: Mapping[str, int]) -> dict[int, str]:
    """Lanes by the width from which on their devices work: `devices 4 to 7` from 8 on."""
    edges = (0, *sorted(set(widths.values())))
    return {
        end: f"device {first}" if end - first == 1 else f"devices {first} to {end - 1}"
        for first, end in pairwise(edges)
    }


def _layer_parts(
    problem: WidthProblem,
    layer: Layer,
    widths: Mapping[str, int],
    lanes: Mapping[int, str],
    kind: str,
) -> Iterator[_Part]:
    """A layer's forward after what comes to it, or its backward before that goes back."""
    width = widths[layer.name]
    share = problem.batch / width
    seconds = (layer.forward_s if kind == "forward" else layer.backward_s).at(share)
    on = tuple(lane for end, lane in lanes.items() if end <= width)
    turn = (on, f"{kind} of {layer.name}", seconds)
    (read,) = layer.reads
    both_s = problem.transfer_s(layer, widths.get(read.source, width), width)
    sent = ((NETWORK,), f"to {layer.name}, {kind}", both_s / 2)
    yield from (sent, turn) if kind == "forward" else (turn, sent)


# Ops that work on each number by itself, by how their names begin.
POINTWISE = ("relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "identity", "flatten")


@dataclass(frozen=True)
class WidthProblem:
    """`batch` samples a step, on up to `devices` devices joined by `network`.

    Raises `OptionError` for a model with branches, which no rank could run by widths.
    """

    profile: LayerProfile
    network: Network
    batch: int
    devices: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.devices < 1:
            raise OptionError(
                f"a step has samples and devices, not {self.batch} and {self.devices}"
            )
        if not self.profile.is_chain:
            raise OptionError(
                f"{self.profile.name} has branches, and widths are of a chain; join the layers of "
                "a branch to one"
            )

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Powers of two that are no more than the devices and share the batch evenly."""
        powers = (1 << i for i in range(self.devices.bit_length()))
        return tuple(w for w in powers if w <= self.devices and self.batch % w == 0)

    def layer_s(self, layer: Layer, width: int) -> float:
        """Forward, backward and sum of gradients of a layer on so many devices."""
        return layer.compute_s(self.batch / width) + self.sync_s(layer, width)

    def sync_s(self, layer: Layer, width: int) -> float:
        """The sum of a layer's gradients over its devices."""
        return layer.grad_bytes / self.network.bytes_per_s if width > 1 else 0.0

    def transfer_s(self, layer: Layer, before: int, after: int) -> float:
        """What a layer reads, forward and backward, from one width to another.

        Nothing of the batch: each device reads its own samples.
        """
        (read,) = layer.reads
        if before == after or read.source == BATCH:
            return 0.0
        nbytes, apart = read.nbytes.at(self.batch), 1 / min(before, after) - 1 / max(before, after)
        most = max(apart, 1 / max(before, after))
        return 2 * (most * nbytes / self.network.bytes_per_s + self.network.latency_s)


@dataclass(frozen=True)
class WidthPlan:
    """The width of each layer by name, and the step's time."""

    widths: Mapping[str, int]
    step_s: float


class _Path(NamedTuple):
    """A way to run the layers up to one of them."""

    seconds: float
    device_s: float
    widths: tuple[int, ...]


def _cost(path: _Path) -> tuple[float, float]:
    """What is to be least: seconds, and among equals device-seconds."""
    return path.seconds, path.device_s


def plan_widths(problem: WidthProblem) -> WidthPlan:
    """The widths with the least step time; among equals few device-seconds."""
    ends = {0: _Path(0.0, 0.0, ())}
    layers = problem.profile.layers
    for layer in layers:
        ends = {
            width: min(paths, key=_cost)
            for width in problem.widths
            if (
                paths := [
                    _then(problem, path, layer, before, width)
                    for before, path in ends.items()
                    if before == width or not is_pinned(layer)
                ]
            )
        }
    best = min(ends.values(), key=_cost)
    names = (layer.name for layer in layers)
    return WidthPlan(dict(zip(names, best.widths, strict=True)), best.seconds)


def is_pinned(layer: Layer) -> bool:
    """Whether it must have the width of the layer that it reads."""
    (read,) = layer.reads
    return read.source != BATCH and layer.op.lower().startswith(POINTWISE)


def _then(problem: WidthProblem, path: _Path, layer: Layer, before: int, width: int) -> _Path:
    moved_s = problem.transfer_s(layer, before, width)
    layer_s = problem.layer_s(layer, width)
    return _Path(
        path.seconds + moved_s + layer_s,
        path.device_s + moved_s * max(before, width) + layer_s * width,
        (*path.widths, width),
    )
