"""Harmony: how a server trains a model that is larger than all its devices, and what a step takes.

In: a `LayerProfile` that is a chain, a `Server`, a layout and the samples of a step. Out: a
`HarmonyPlan`: packs and micro-batch sizes of both passes, the simulated step, the bytes that cross
each link, the peak of each device, and seconds that no order of these works can beat.

The search is Harmony's (VLDB 2022): every pair of micro-batch sizes that divide the samples, the
forward's at least the backward's, every pair of packings that fits; the fastest one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cotrain_compile.cluster.harmony_bound import least_s
from cotrain_compile.cluster.harmony_lanes import Content, Server, Stream
from cotrain_compile.cluster.harmony_packs import Fits, Pack, PackCosts, Packs, packings
from cotrain_compile.cluster.harmony_tasks import (
    HarmonyChoice,
    Layout,
    Task,
    TaskGraph,
    TaskKind,
    task_graph,
)
from cotrain_compile.cluster.harmony_works import harmony_works
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.placement.simulate.engine import simulate
from cotrain_compile.plan import Timeline

# A bound is a sum in another order than the simulator's.
_ROUNDING = 1 - 1e-9


class CapOf(StrEnum):
    """What has to stay below the cap of a device.

    TASK: everything that a task holds. PACK: the pack alone, without what enters and leaves it, as
    in the authors' search; their plans may be above the cap by that.
    """

    TASK = "task"
    PACK = "pack"


@dataclass(frozen=True)
class HarmonyPlan:
    """A choice and what its step takes, simulated.

    `peak_bytes` is by device, `moved_bytes` by stream and content over all devices (a copy between
    devices is counted where it goes out). `bound_s` is the busiest lane, or `least_s` where that is
    more. The timeline is that of all devices, or of the first one where all do the same.
    """

    layout: Layout
    choice: HarmonyChoice
    devices: int
    step_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]
    moved_bytes: dict[tuple[Stream, Content], float]
    timeline: Timeline

    @property
    def name(self) -> str:
        """What strategies call it."""
        return self.layout.value

    @property
    def weight_traffic_bytes(self) -> float:
        """Weights that come to devices and gradients that leave them.

        At most three times the model, for data parallelism on each device.
        """
        weights = self.moved_bytes[Stream.SWAP_IN, Content.WEIGHTS]
        return weights + self.moved_bytes[Stream.SWAP_OUT, Content.GRADIENTS]


def plan_harmony(
    profile: LayerProfile,
    server: Server,
    layout: Layout,
    samples: int,
    *,
    prefetch: bool = False,
    cap_of: CapOf = CapOf.TASK,
    alike: bool = False,
) -> HarmonyPlan:
    """The fastest of all choices that fit the cap; `alike` are those with the same micro-batches in
    both passes, as one captured step has them.

    Raises:
        OptionError: the profile is no chain, has no peaks, or there are fewer samples than devices.
        PlacementError: a layer alone does not fit, not even with micro-batches of one sample.
    """
    costs = PackCosts(profile)
    choices = {
        choice: None
        for choice in harmony_choices(costs, server, layout, samples, cap_of)
        if not alike or choice.forward_samples == choice.backward_samples
    }
    if not choices:
        raise _nothing_fits(costs, server)
    best: HarmonyPlan | None = None
    bounds = {
        choice: least_s(
            task_graph(layout, choice, samples, server.devices), costs, server, prefetch=prefetch
        )
        for choice in choices
    }
    for choice in sorted(bounds, key=lambda choice: bounds[choice]):
        if best and bounds[choice] * _ROUNDING >= best.step_s:
            break
        plan = simulate_choice(costs, server, layout, choice, samples, prefetch=prefetch)
        if best is None or plan.step_s < best.step_s:
            best = plan
    assert best is not None  # there is a choice
    return best


def simulate_choice(
    costs: PackCosts,
    server: Server,
    layout: Layout,
    choice: HarmonyChoice,
    samples: int,
    *,
    prefetch: bool = False,
) -> HarmonyPlan:
    """What a step takes with `choice`.

    Raises:
        PlanError: its tasks wait for each other.
    """
    graph = task_graph(layout, choice, samples, server.devices)
    works = harmony_works(graph, costs, server, prefetch=prefetch)
    works.require_no_deadlock()
    timeline = simulate(works.works, works.lanes)
    return HarmonyPlan(
        layout,
        choice,
        graph.devices,
        max(span.end_s for span in timeline.spans),
        max(works.busiest_s, least_s(graph, costs, server, prefetch=prefetch)),
        _peaks(graph, costs),
        works.moved_bytes,
        timeline,
    )


def _peaks(graph: TaskGraph, costs: PackCosts) -> tuple[int, ...]:
    peaks = [0] * graph.devices
    for task in graph.sequence:
        peaks[task.device] = max(peaks[task.device], round(_task_bytes(task, graph, costs)))
    alike = graph.layout is Layout.DATA_PARALLEL
    return (peaks[0],) * graph.devices if alike else tuple(peaks)


def _task_bytes(task: Task, graph: TaskGraph, costs: PackCosts) -> float:
    samples = task.micro_batches[0]
    if task.kind is TaskKind.BACKWARD:
        return costs.backward_task_bytes(samples, task.pack)
    stashed = [reader.pack.first for reader in graph.stashed(task)]
    return costs.forward_task_bytes(samples, task.pack, stashed)


def harmony_choices(
    costs: PackCosts, server: Server, layout: Layout, samples: int, cap_of: CapOf
) -> Iterator[HarmonyChoice]:
    """All choices that are tried; some of them twice, where two packings agree."""
    layers = len(costs.layers)
    sizes = equal_micro_batches(layout, samples, server.devices)
    for backward in sizes:
        fits = _backward_fits(costs, server, backward, cap_of)
        whole = packings(costs, backward, layers, fits, server.cap_bytes, backward=True)
        for packs in whole.values():
            if len(packs) == 1:
                yield HarmonyChoice(backward, (), backward, packs)
                continue
            for forward in (size for size in sizes if size >= backward):
                for ahead in _forward_packings(costs, server, forward, packs, cap_of):
                    yield HarmonyChoice(forward, ahead, backward, packs)


def equal_micro_batches(layout: Layout, samples: int, devices: int) -> tuple[int, ...]:
    """The sizes of micro-batches that divide the samples of every device.

    Raises:
        OptionError: fewer samples than devices under data parallelism, or none.
    """
    parts = devices if layout is Layout.DATA_PARALLEL else 1
    if samples < parts:
        raise OptionError(f"{samples} samples cannot be shared by {parts} devices; take more")
    shares = {samples // parts, -(-samples // parts)}
    return tuple(u for u in range(1, min(shares) + 1) if all(s % u == 0 for s in shares))


def _backward_fits(costs: PackCosts, server: Server, samples: int, cap_of: CapOf) -> Fits:
    needs = costs.backward_task_bytes if cap_of is CapOf.TASK else costs.backward_peak_bytes
    return lambda pack: needs(samples, pack) <= server.cap_bytes


def _forward_packings(
    costs: PackCosts, server: Server, samples: int, backward: Packs, cap_of: CapOf
) -> Iterator[Packs]:
    begins = [pack.first for pack in backward]

    def fits(pack: Pack) -> bool:
        if cap_of is CapOf.PACK:
            return costs.forward_peak_bytes(samples, pack) <= server.cap_bytes
        stashed = [layer for layer in begins if pack.first <= layer < pack.last]
        return costs.forward_task_bytes(samples, pack, stashed) <= server.cap_bytes

    layers = backward[-1].first
    yield from packings(costs, samples, layers, fits, server.cap_bytes, backward=False).values()
    if all(map(fits, backward[:-1])):
        yield backward[:-1]


def _nothing_fits(costs: PackCosts, server: Server) -> PlacementError:
    needs = [
        costs.backward_task_bytes(1, Pack(layer, layer + 1)) for layer in range(len(costs.layers))
    ]
    most = max(needs)
    name = costs.layers[needs.index(most)].name
    missing = round(most - server.cap_bytes)
    return PlacementError(
        f"layer {name} alone needs {round(most)} bytes in the backward of one sample, and a device "
        f"may hold {round(server.cap_bytes)}; cut it in parts or take larger devices",
        shortfall_bytes=missing,
    )
