"""Stages in turn: Harmony's pipeline as it is run here, and what a step takes.

In: a `LayerProfile` that is a chain, a machine for each device, the samples of a step. Out: a
`StagesInTurn`.

The model rests on the host. Packs of layers are stages, dealt to the devices in turn; a stage runs
all of its micro-batches back to back, forward, and later backward on the same device, as the looped
schedule of `torch.distributed.pipelining` has it: a *visit*. Its parameters come once for either,
and once for both where nothing is between them; its gradients leave once. A backward makes its
forward again, but the last stage does both at once. What enters and leaves stages stays on the
devices; at the end the host updates. Harmony's own plans (VLDB 2022) have other packs and
micro-batches backward than forward, on other devices, and update as soon as gradients are there.

What a device sends to others goes beside its computing. With the host it copies and computes one
after the other; or it fetches ahead: while a stage has its visit, the parameters of the next one
come, and the gradients of the one before go home, where both fit beside it. The search tries both,
all sizes of micro-batches that divide the samples, and all multiples of the devices as numbers of
packs, balanced by memory and by time: of more of them fewer stay between their passes, but the next
device begins sooner.
"""

from __future__ import annotations

from collections.abc import Iterator

from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.steps.stage_step import fastest
from cotrain_compile.cluster.swapped.packs import Pack, PackCosts, Packs, cut_at_shares
from cotrain_compile.cluster.swapped.turn_step import StagesInTurn
from cotrain_compile.errors import CotrainError, OptionError, PlacementError
from cotrain_compile.machine import Machine
from cotrain_compile.support.units import format_bytes


def plan_stages_in_turn(
    profile: LayerProfile, machine: Machine, devices: int, samples: int
) -> StagesInTurn:
    """The fastest of all that fit.

    Raises `OptionError` where the profile is no chain or has no peaks, `PlacementError` where
    nothing fits.
    """
    costs = PackCosts(profile)
    best = fastest(
        plan
        for each in range(1, samples + 1)
        if samples % each == 0
        for ahead in (False, True)
        for plan in _plans(costs, machine, devices, each, samples // each, ahead)
    )
    if best is None:
        raise _nothing_fits(costs, machine, devices, samples)
    return best


def _plans(
    costs: PackCosts, machine: Machine, devices: int, each: int, micro_batches: int, ahead: bool
) -> Iterator[StagesInTurn]:
    alone = [Pack(layer, layer + 1) for layer in range(len(costs.layers))]
    inputs = [costs.input_bytes(each, pack.first) for pack in alone]
    own = [
        costs.backward_peak_bytes(each, pack) - entering
        for pack, entering in zip(alone, inputs, strict=True)
    ]
    seconds = [costs.forward_s(each, pack) + costs.backward_s(each, pack) for pack in alone]
    found: dict[Packs, None] = {}
    for weights in (own, seconds):
        for count in range(devices, len(alone) + 1, devices):
            packs = cut_at_shares(weights, count)
            if packs is None or packs in found:
                continue
            plan = StagesInTurn(costs, machine, devices, packs, each, micro_batches, ahead)
            if max(plan.peak_bytes) <= machine.device.capacity_bytes:
                found[packs] = None
                yield plan


def _nothing_fits(costs: PackCosts, machine: Machine, devices: int, samples: int) -> CotrainError:
    layers = len(costs.layers)
    packs = cut_at_shares([1.0] * layers, layers - layers % devices)
    if samples < 1 or layers < devices or packs is None:
        return OptionError(
            f"{samples} samples in {layers} layers cannot be dealt to {devices} devices in "
            "turn; take fewer devices"
        )
    peak = max(StagesInTurn(costs, machine, devices, packs, 1, samples).peak_bytes)
    missing = max(1, peak - machine.device.capacity_bytes)
    return PlacementError(
        f"the smallest stages need {format_bytes(missing)} more on {devices} "
        "devices, one sample at a time, with what goes between them for all samples; cut layers "
        "in parts, or take larger devices or fewer samples",
        shortfall_bytes=missing,
    )
