"""CUDA setup: what a step on a CUDA device of this computer is planned for and runs with.

In: the user's options and the tensors of the step. Out: a `Machine` for the card, budgets from the
memory that is free, and the device with one pool of pinned memory per process.

Card rates: what a card that no preset describes can reach, from what its driver says of it.

In: the properties of a CUDA device, as `torch.cuda.get_device_properties` has them. Out: its tier,
and in words what that is taken from. Multiply-adds of a multiprocessor and clock are in NVIDIA's
architecture white papers and the throughput table of the CUDA programming guide; a multiply-add
counts as two. What is reached of them is the common fraction of the presets.
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
from cotrain_compile.machine import Machine, Rates, Tier, TierSpec, default_budget
from cotrain_compile.options.parts import PlanningOptions
from cotrain_compile.placement.simulate.reserved import Reserved
from cotrain_compile.presets.cards import like_card
from cotrain_compile.runtime.course import Piecewise
from cotrain_compile.runtime.cuda.card import CudaCard
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
            "more than that runs out of memory in its dry run and is made again. Lower the "
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


# Flops of a multiprocessor in a clock, dense, sums in float32: of tensor cores in bfloat16 or
# float16, and of float32 units. By compute capability; an unknown one counts as the last below it.
_PER_CLOCK = {
    (7, 0): (1024, 128),
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (1024, 256),
    (8, 9): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (1024, 256),
}
# GeForce cards of these sum in float32 at half the rate of their chips.
_HALVED = {(7, 5), (8, 6), (8, 9), (12, 0)}
_FIRST_BFLOAT16 = (8, 0)
_TENSOR_SHARE, _FLOAT32_SHARE, _MEMORY_SHARE = 0.6, 0.7, 0.85
_LAUNCH_S = 5e-6


def tier_of(properties: Any) -> tuple[TierSpec, str] | None:
    """The tier of a card and its source; None where the driver does not say enough."""
    capability = (int(properties.major), int(properties.minor))
    known = [each for each in _PER_CLOCK if each <= capability]
    # Of these, not every version of torch and of the driver tells.
    clock_khz = int(getattr(properties, "clock_rate", 0) or 0)
    memory_khz = int(getattr(properties, "memory_clock_rate", 0) or 0)
    bus_bits = int(getattr(properties, "memory_bus_width", 0) or 0)
    if not (known and clock_khz and memory_khz and bus_bits):
        return None
    tensor, single = _PER_CLOCK[known[-1]]
    if known[-1] in _HALVED and "GeForce" in str(properties.name):
        tensor //= 2
    clocks_per_s = int(properties.multi_processor_count) * clock_khz * 1e3
    low = _TENSOR_SHARE * tensor * clocks_per_s
    rates = {"float16": low, "float32": _FLOAT32_SHARE * single * clocks_per_s}
    if capability >= _FIRST_BFLOAT16:
        rates["bfloat16"] = low
    # Two transfers in a clock.
    bytes_per_s = _MEMORY_SHARE * 2 * memory_khz * 1e3 * bus_bits / 8
    source = (
        f"{properties.multi_processor_count} multiprocessors at {clock_khz / 1e6:.2f} GHz, "
        f"compute capability {capability[0]}.{capability[1]}: {tensor} flops each in a clock on "
        f"tensor cores x {_TENSOR_SHARE}, {single} in float32 x {_FLOAT32_SHARE}; memory of "
        f"{bus_bits} bits at {memory_khz / 1e6:.2f} GHz x {_MEMORY_SHARE}"
    )
    return TierSpec(int(properties.total_memory), bytes_per_s, rates, _LAUNCH_S), source
