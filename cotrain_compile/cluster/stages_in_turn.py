"""Stages in turn: Harmony's pipeline as it is run here, and what a step takes.

In: a `LayerProfile` that is a chain, a `Server`, the samples of a step. Out: a `TurnsPlan`.

The model rests on the host. Packs of layers are stages, dealt to the devices in turn; a stage runs
all of its micro-batches back to back, forward, and later backward on the same device, as the looped
schedule of `torch.distributed.pipelining` has it: a *stay*. Its parameters come once for either,
and once for both where nothing is between them; its gradients leave once. A backward makes its
forward again, but the last stage does both at once. What enters and leaves stages stays on the
devices; at the end the host updates. Harmony's own plans (`harmony`) have other packs and
micro-batches backward than forward, on other devices, and update as soon as gradients are there.

What a device sends to others goes beside its computing. With the host it copies and computes one
after the other; or it fetches ahead: while a stage has its stay, the parameters of the next one
come, and the gradients of the one before go home, where both fit beside it. The search tries both,
all sizes of micro-batches that divide the samples, and all multiples of the devices as numbers of
packs, balanced by memory and by time: of more of them fewer stay between their passes, but the next
device begins sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from cotrain_compile.cluster.harmony_lanes import Server
from cotrain_compile.cluster.harmony_packs import Pack, PackCosts, Packs, cut_at_shares
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.turn_works import Draft
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.placement.simulate.engine import LaneSpec, lower_bound, simulate
from cotrain_compile.placement.simulate.last_end import last_end_s
from cotrain_compile.plan import Timeline
from cotrain_compile.units import format_bytes

# A bound is a sum in another order than the simulator's.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class TurnsPlan:
    """Packs and what a step takes, simulated; `peak_bytes` is by device, `moved_bytes` by link."""

    packs: Packs
    devices: int
    micro_batch: int
    micro_batches: int
    ahead: bool
    step_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]
    moved_bytes: Mapping[str, float]
    timeline: Timeline


def plan_stages_in_turn(profile: LayerProfile, server: Server, samples: int) -> TurnsPlan:
    """The fastest of all that fit.

    Raises `OptionError` where the profile is no chain or has no peaks, `PlacementError` where
    nothing fits.
    """
    costs = PackCosts(profile)
    drafts = [
        draft
        for each in range(1, samples + 1)
        if samples % each == 0
        for ahead in (False, True)
        for draft in _drafts(costs, server, each, samples // each, ahead)
    ]
    if not drafts:
        raise _nothing_fits(costs, server, samples)
    best, best_s = drafts[0], inf
    for draft in sorted(drafts, key=lambda draft: draft.least_s):
        if draft.least_s * _ROUNDING >= best_s:
            break
        step_s = last_end_s(draft.works())
        if step_s < best_s:
            best, best_s = draft, step_s
    return simulated(best)


def _drafts(
    costs: PackCosts, server: Server, each: int, micro_batches: int, ahead: bool
) -> Iterator[Draft]:
    alone = [Pack(layer, layer + 1) for layer in range(len(costs.layers))]
    inputs = [costs.input_bytes(each, pack.first) for pack in alone]
    own = [
        costs.backward_peak_bytes(each, pack) - entering
        for pack, entering in zip(alone, inputs, strict=True)
    ]
    seconds = [costs.forward_s(each, pack) + costs.backward_s(each, pack) for pack in alone]
    found: dict[Packs, None] = {}
    for weights in (own, seconds):
        for count in range(server.devices, len(alone) + 1, server.devices):
            packs = cut_at_shares(weights, count)
            if packs is None:
                continue
            draft = Draft(costs, server, packs, each, micro_batches, ahead)
            if max(draft.peak_bytes) <= server.cap_bytes and packs not in found:
                found[packs] = None
                yield draft


def _nothing_fits(costs: PackCosts, server: Server, samples: int) -> CotrainError:
    layers = len(costs.layers)
    packs = cut_at_shares([1.0] * layers, layers - layers % server.devices)
    if samples < 1 or layers < server.devices or packs is None:
        return OptionError(
            f"{samples} samples in {layers} layers cannot be dealt to {server.devices} devices in "
            "turn; take fewer devices"
        )
    missing = max(Draft(costs, server, packs, 1, samples).peak_bytes) - round(server.cap_bytes)
    return PlacementError(
        f"the smallest stages need {format_bytes(max(1, missing))} more on {server.devices} "
        "devices, one sample at a time, with what goes between them for all samples; cut layers "
        "in parts, or take larger devices or fewer samples",
        shortfall_bytes=max(1, missing),
    )


def simulated(draft: Draft) -> TurnsPlan:
    """The step of a draft."""
    works = list(draft.works())
    lanes = [LaneSpec(lane) for lane in dict.fromkeys(work.lane for work in works)]
    timeline = simulate(works, lanes)
    return TurnsPlan(
        draft.packs,
        draft.server.devices,
        draft.each,
        draft.micro_batches,
        draft.ahead,
        max(span.end_s for span in timeline.spans),
        lower_bound(works, lanes),
        draft.peak_bytes,
        _moved(draft),
        timeline,
    )


def _moved(draft: Draft) -> dict[str, float]:
    """Bytes of a step, all devices together."""
    costs, packs = draft.costs, draft.packs
    weights = [costs.weight_bytes(pack) for pack in packs]
    stays = sum(weights[-draft.server.devices :])  # from its forwards to its backwards
    crossing = sum(costs.input_bytes(draft.each, pack.first) for pack in packs[1:])
    between = 2 * draft.micro_batches * crossing if draft.server.devices > 1 else 0.0
    return {
        "host to devices": 2 * sum(weights) - stays,
        "devices to host": sum(weights),
        "between devices of a machine": between,
    }
