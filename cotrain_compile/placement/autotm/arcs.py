"""Arcs of AutoTM's flow networks: what a tensor can do before, beside and after each slot.

In: a `Step` and a variant. Out: for each home that a tensor can have, the arcs of its paths. A path
is a chain of (slot, place), so that one unit of flow is one history of the tensor in the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal, NamedTuple

from cotrain_compile.machine import Tier
from cotrain_compile.placement.autotm.step import Step, Tensor, TensorKind
from cotrain_compile.plan import Lane

Variant = Literal["static", "synchronous", "asynchronous"]


class Place(StrEnum):
    """Where valid copies of a tensor are."""

    DEVICE = "device"
    BOTH = "both"
    HOST = "host"


_DEVICE, _BOTH, _HOST = Place


class Arc(NamedTuple):
    """One way from `tail` to `head`, at the point before slot `at` or, if it `crosses`, past it.

    `held` when the tensor is on the device meanwhile. `seconds` of work load `lane` in parallel to
    the slot, or stall the device where `lane` is None. `updates` when the host runs the update.
    """

    at: int
    tail: Place
    head: Place
    crosses: bool = True
    held: bool = True
    seconds: float = 0.0
    lane: Lane | None = None
    updates: bool = False

    def serves(self, writes: bool) -> bool:
        """Device ops of the slot find the tensor; they may write it where no host copy is left."""
        return self.head is _DEVICE if writes else _HOST not in (self.tail, self.head)

    @property
    def is_on_host(self) -> bool:
        """The host has it from the beginning to the end of the slot."""
        return _DEVICE not in (self.tail, self.head)

    @property
    def is_on_host_only(self) -> bool:
        """The host may write it."""
        return self.tail is self.head is _HOST


def arcs_of(step: Step, variant: Variant, tensor: Tensor, home: Tier) -> Iterator[Arc]:
    """All arcs of the tensor's paths from `home` to `home`.

    What is at home on the device keeps its memory there throughout; only a parameter or gradient
    needs a copy elsewhere then, for its host update.
    """
    pinned = tensor.persists and home is Tier.DEVICE
    if pinned and not _feeds_host_update(step, tensor):
        for slot in range(tensor.first, tensor.last + 1):
            yield Arc(slot, _DEVICE, _DEVICE)
        return
    for slot in range(tensor.first, tensor.last + 1):
        yield from _stalls(step, variant, tensor, slot)
        yield from _stays(tensor, slot, pinned)
        if variant == "asynchronous":
            yield from _copies_beside(step, tensor, slot)
        if tensor.kind is TensorKind.PARAM and tensor.param in step.dataflow.update:
            yield from _host_updates(step, variant, tensor, slot, pinned)
    yield from _stalls(step, variant, tensor, tensor.last + 1)


def _feeds_host_update(step: Step, tensor: Tensor) -> bool:
    has_update = tensor.param in step.dataflow.update
    return has_update and tensor.kind in (TensorKind.PARAM, TensorKind.GRADIENT)


def _stalls(step: Step, variant: Variant, tensor: Tensor, point: int) -> Iterator[Arc]:
    """Copies before slot `point`: out right after a use, back right before one.

    Anywhere else they cost the same, and the tensor is on the device for longer.
    """
    moves_freely = variant != "static"
    if not (moves_freely or _feeds_host_update(step, tensor)):
        return
    is_after_use = point == tensor.first or point - 1 in tensor.touched
    is_before_use = point in tensor.touched or (tensor.persists and point > tensor.last)
    if is_after_use and (point <= tensor.leaves or tensor.persists):
        yield _stall(step, tensor, point, _DEVICE, Lane.D2H)
    if is_before_use:
        yield _stall(step, tensor, point, _HOST, Lane.H2D)
    if moves_freely:
        yield Arc(point, _BOTH, _HOST, crosses=False)


def _stall(step: Step, tensor: Tensor, point: int, source: Place, lane: Lane) -> Arc:
    return Arc(point, source, _BOTH, crosses=False, seconds=_copy_s(step, tensor, lane))


def _stays(tensor: Tensor, slot: int, pinned: bool) -> Iterator[Arc]:
    """The tensor is in the same place after the slot, but that writing leaves one valid copy."""
    is_used, is_written = slot in tensor.uses, tensor.uses.get(slot, False)
    held = pinned or slot <= tensor.leaves
    yield Arc(slot, _DEVICE, _DEVICE, held=held)
    if not is_written:
        yield Arc(slot, _BOTH, _BOTH, held=held)
    if is_written or tensor.update_uses.get(slot, False):
        yield Arc(slot, _BOTH, _DEVICE, held=held)
    if not is_used:
        yield Arc(slot, _HOST, _HOST, held=pinned)


def _copies_beside(step: Step, tensor: Tensor, slot: int) -> Iterator[Arc]:
    if slot > tensor.leaves:
        return
    if not tensor.uses.get(slot, False):
        yield Arc(
            slot,
            _DEVICE,
            _BOTH,
            seconds=_copy_s(step, tensor, Lane.D2H),
            lane=Lane.D2H,
        )
    if slot not in tensor.uses:
        yield Arc(slot, _HOST, _BOTH, seconds=_copy_s(step, tensor, Lane.H2D), lane=Lane.H2D)


def _host_updates(
    step: Step, variant: Variant, tensor: Tensor, slot: int, pinned: bool
) -> Iterator[Arc]:
    """The host runs the update: at its own place while the device waits, or beside any slot that
    its inputs allow. A device copy is out of date afterwards."""
    group = step.dataflow.update[tensor.param]
    if slot not in step.window[group.param]:
        return
    seconds = step.problem.costs.host_update_s[group.param]
    lanes: list[Lane | None] = [None] if slot == step.place[group.param] else []
    lanes += [Lane.HOST] if variant == "asynchronous" else []
    for lane in lanes:
        yield Arc(slot, _BOTH, _HOST, seconds=seconds, lane=lane, updates=True)
        yield Arc(slot, _HOST, _HOST, held=pinned, seconds=seconds, lane=lane, updates=True)


def _copy_s(step: Step, tensor: Tensor, lane: Lane) -> float:
    machine = step.problem.machine
    ends = machine.links[lane].ends
    return sum(machine.copy_s(buffer.nbytes, *ends) for buffer in tensor.buffers)


def homes_of(variant: Variant, tensor: Tensor) -> tuple[Tier, ...]:
    """Where its paths can begin; what the step itself makes begins on the device."""
    can_rest_on_host = tensor.kind is TensorKind.STATES or (
        tensor.kind is TensorKind.PARAM and variant != "static"
    )
    return (Tier.DEVICE, Tier.HOST) if can_rest_on_host else (Tier.DEVICE,)


def is_home(tensor: Tensor, home: Tier, place: Place) -> bool:
    """Whether the path may end there; what the step leaves behind may be anywhere."""
    elsewhere = _HOST if home is Tier.DEVICE else _DEVICE
    return not tensor.persists or place is not elsewhere
