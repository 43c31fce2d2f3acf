"""CUDA setup: what a step on a CUDA device of this computer is planned for and runs with.

In: the user's options and the tensors of the step. Out: a `Machine` for the card, budgets from the
memory that is free, and the device with one pool of pinned memory per process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch

from cotrain_compile import presets
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Rates, Tier, default_budget
from cotrain_compile.options.parts import PlanningOptions
from cotrain_compile.placement.simulate.reserved import Reserved
from cotrain_compile.presets.cards import like_card
from cotrain_compile.runtime.course import Piecewise
from cotrain_compile.runtime.cuda.card import CudaCard
from cotrain_compile.runtime.cuda.card_rates import tier_of
from cotrain_compile.runtime.cuda.device import CudaDevice
from cotrain_compile.runtime.cuda.pinned import PinnedPool, available_host_bytes
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.process.cores import Cores
from cotrain_compile.support import limits
from cotrain_compile.support.units import Size, format_bytes

Planned = TypeVar("Planned", bound=PlanningOptions)

# Of a card that no preset is of, the link and the host of this one are assumed.
_LINK_OF_UNKNOWN = "rtx3090"


def cuda_machine(name: str, device: torch.device) -> Machine:
    """The machine to plan for: "this-machine" is this card with the rates of the preset like it.

    Its capacities are the card's and this computer's. Raises as `presets.find`.
    """
    if name != presets.THIS_MACHINE:
        return presets.find(name)
    return machine_like(torch.cuda.get_device_properties(device))


def machine_like(properties: Any) -> Machine:
    """A machine with a card of these properties, and this computer's host memory.

    A card that no preset describes has the rates that its properties allow.
    """
    card = str(properties.name)
    known = like_card(card, int(properties.total_memory))
    like = presets.find(known.name if known else _LINK_OF_UNKNOWN)
    device = replace(like.device, capacity_bytes=int(properties.total_memory))
    told = f"rates of the preset {like.name}"
    if known is None:
        own = tier_of(properties)
        device, told = (
            (own[0], f"no preset; by its properties ({own[1]}), link and host as of {like.name}")
            if own is not None
            else (
                device,
                f"no preset, its driver says too little; {told}, which may be far off",
            )
        )
    return like.but(
        name=presets.THIS_MACHINE,
        device=device,
        host=replace(like.host, capacity_bytes=limits.usable_memory_bytes()),
        source=f"{card}: capacities as found, {told}; run `cotrain-compile calibrate "
        "--device cuda` for measured ones",
        rates=Rates.GUESSED,
        compute_capability=(int(properties.major), int(properties.minor)),
    )


def within_free_memory(options: Planned, values: Sequence[Any], device: torch.device) -> Planned:
    """`options` with budgets of what is free on both tiers, where the user set none.

    What the step's own tensors `values` take already is theirs to use. Raises `PlacementError`
    where nothing is left, `OptionError` where the user's budget is above what the card has.
    """
    free, total = torch.cuda.mem_get_info(device)
    if options.memory_budget is not None and options.memory_budget.of(total) > total:
        raise OptionError(
            f"option 'memory_budget' is {format_bytes(options.memory_budget.of(total))}, but the "
            f"card has {format_bytes(total)}; lower it, or leave it out for what is free"
        )
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    ours_bytes = free + cached + _storage_bytes(values, device.type)
    device_bytes = default_budget.of_what_is_free(ours_bytes, total)
    if options.memory_budget is not None:
        tell_if_not_free(options.memory_budget.of(total), ours_bytes)
    if options.memory_budget is None and device_bytes <= 0:
        raise PlacementError(
            f"the card has {format_bytes(free + cached)} free, and "
            f"{format_bytes(ours_bytes - device_bytes)} are "
            "kept for libraries; free memory on it, or set memory_budget",
            shortfall_bytes=1 - device_bytes,
        )
    host_bytes = available_host_bytes() + pool(device.index).held_bytes
    host_bytes += _storage_bytes([v for v in values if not _is_pooled(v, device)], "cpu")
    return replace(
        options,
        memory_budget=options.memory_budget or Size(nbytes=device_bytes),
        host_memory_budget=options.host_memory_budget or Size(nbytes=max(1, host_bytes)),
    )


def tell_if_not_free(budget_bytes: int, ours_bytes: int) -> None:
    """Warn at once of a budget above what is free on the card or the step's own already."""
    if budget_bytes > ours_bytes:
        warnings.warn(
            f"cotrain: memory_budget is {format_bytes(budget_bytes)}, but only "
            f"{format_bytes(ours_bytes)} of the card are free or the step's own; a plan that needs "
            "more than that runs out of memory in its rehearsal and is made again. Lower the "
            "budget, or end what else uses the card",
            stacklevel=2,
        )


def tell_if_in_pieces(predicted: Reserved, values: Sequence[Any], device: torch.device) -> None:
    """Warn where torch's allocator would need more than there is to hold what fits by itself."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    said = in_pieces(predicted, free + cached + _storage_bytes(values, device.type))
    if said and "expandable_segments:True" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        warnings.warn(said, stacklevel=2)


def in_pieces(predicted: Reserved, ours_bytes: int) -> str:
    """What to do where a plan fits but for the pieces that memory is in; "" where there is room."""
    if not predicted.allocated_bytes <= ours_bytes < predicted.reserved_bytes:
        return ""
    return (
        f"cotrain: the plan has {format_bytes(predicted.allocated_bytes)} in tensors at its peak, "
        f"but torch's allocator may reserve {format_bytes(predicted.reserved_bytes)} for them, "
        f"where {format_bytes(ours_bytes)} can be had; set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the process starts, so that "
        "memory is not in pieces, or lower memory_budget"
    )


def cuda_device(
    device: torch.device,
    machine: Machine,
    budgets: Mapping[Tier, int],
    kernels: Mapping[str, HostKernel],
    piecewise: Mapping[str, Piecewise],
    *,
    host_cores: Cores,
    timed: bool,
) -> CudaDevice:
    """The runtime of one compiled step on `device`.

    Where nobody says on which cores, the host works on those beside the card.
    """
    card = CudaCard(device)
    return CudaDevice(
        card,
        pool(device.index),
        budgets[Tier.HOST],
        kernels,
        piecewise,
        host_workers=machine.host_update.workers,
        host_cores=host_cores if host_cores.numbers else card.cores_beside,
        timed=timed,
    )


@cache
def pool(index: int) -> PinnedPool:
    """The pinned memory for one card, shared by all steps of the process."""
    card = CudaCard(torch.device("cuda", index))
    return PinnedPool(card.pin, card.unpin)


def _is_pooled(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and pool(device.index).holds(value)


def _storage_bytes(values: Sequence[Any], device_type: str) -> int:
    storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    sizes = {s._cdata: s.nbytes() for s in storages if s.device.type == device_type}
    return sum(sizes.values())
