"""Moves: what a placement sends over the link, runs on the host and runs earlier, not yet when.

Types alone: `find_moves` makes `Moves` from a Placement, in slots of the ops that stay at their
place. When each move happens is for `schedule` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from cotrain_compile.dataflow import UpdateGroup
from cotrain_compile.placement.op_order import Instance
from cotrain_compile.placement.residency import DeviceProgram, device_bytes, summed

_T = TypeVar("_T")

SMALL_COPY_BYTES = 4096


@dataclass(frozen=True)
class Send:
    """An offload that may start when the op in slot `ready` is done.

    `holds_from` is the slot from which its source is kept for this copy alone, None for a source
    that stays on the device anyway. `destination` is as in `Transfer`.
    """

    name: str
    buffer: str
    nbytes: int
    ready: int
    holds_from: int | None
    destination: str = ""

    @property
    def is_small(self) -> bool:
        """Whether it goes before all others: they may wait for it (a clipping coefficient)."""
        return self.nbytes <= SMALL_COPY_BYTES


@dataclass(frozen=True)
class Fetch:
    """A fresh prefetch of `buffer`, needed by the op in slot `need`, after the tasks in `after`.

    `after_previous` is as in `Transfer`.
    """

    name: str
    buffer: str
    nbytes: int
    need: int
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cast:
    """A low-precision copy that the host makes at the start of the step.

    `after_previous` is as in `HostRegion`.
    """

    name: str
    param: str
    makes: str
    ops: tuple[str, ...]
    seconds: float
    after_previous: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpeculativeUpdate:
    """An update on the host on guesses: possible after slot `earliest`, when `inputs` are sent.

    `after` are other tasks, `after_previous` is as in `HostRegion`.
    """

    name: str
    guesses: tuple[str, ...]
    inputs: tuple[str, ...]
    after: tuple[str, ...]
    after_previous: tuple[str, ...]
    earliest: int
    seconds: float


@dataclass(frozen=True)
class UpdateOnHost:
    """An update on the host: possible after slot `earliest`, done before slot `limit`.

    `inputs` are the sends it waits for, `after` other tasks. With `returns` the new parameter goes
    back over the old one. `next_use` is the slot of the next step by which both must be done, None
    where they end in their own step. Where a `speculation` has done the work, none is left.
    """

    name: str
    group: UpdateGroup
    inputs: tuple[str, ...]
    after: tuple[str, ...]
    earliest: int
    limit: int
    returns: bool
    seconds: float
    next_use: int | None = None
    speculation: SpeculativeUpdate | None = None


@dataclass(frozen=True)
class DeviceUpdate:
    """The update of `params` on the device, in any gap after slot `earliest`, up to `limit`.

    Mostly of one; where a layer is updated at one place, of all its own. `fetches` come before it,
    `stores` go back to their homes after it. Until it has run, gradients of `gradient_bytes` are
    held; until they are stored, weights of `weight_bytes` that were fetched for the backward.
    `workspace_bytes` is the most that its own values take beyond that. Of an update in pieces this
    is the one with `number`: they run in turn, and what waits for all waits for the last.
    """

    params: tuple[str, ...]
    ops: tuple[str, ...]
    earliest: int
    limit: int
    fetches: tuple[Fetch, ...]
    stores: tuple[str, ...]
    gradient_bytes: int
    weight_bytes: int
    workspace_bytes: int
    seconds: float
    number: int | None = None

    @property
    def fetched_bytes(self) -> int:
        return sum(fetch.nbytes for fetch in self.fetches)

    @property
    def waiting_bytes(self) -> int:
        """What is held until it runs, before anything is fetched for it."""
        return self.gradient_bytes + self.weight_bytes


@dataclass(frozen=True)
class Moves:
    """All that a placement moves. Slots are those of `program`, whose ops stay at their place.

    `slot_bytes` and `gap_bytes` (gap k is before op k) are what is on the device at least: every
    fetched copy only while it is used, every source of an offload gone after its last use.
    """

    program: DeviceProgram
    elapsed_s: Sequence[float]
    sends: tuple[Send, ...]
    fetches: tuple[Fetch, ...]
    casts: tuple[Cast, ...]
    host_updates: tuple[UpdateOnHost, ...]
    device_updates: tuple[DeviceUpdate, ...]
    instances: tuple[Instance, ...]

    @cached_property
    def sends_ready_after(self) -> dict[int, list[Send]]:
        """The sends by the slot after which they may start."""
        return _by(self.sends, lambda send: send.ready)

    @cached_property
    def scalar_slots(self) -> tuple[int, ...]:
        """The slots after which small copies may start, which others wait for."""
        waited = {name for update in self.host_updates for name in update.inputs}
        small = (s for s in self.sends if s.is_small and s.ready >= 0 and s.name in waited)
        return tuple(sorted({send.ready for send in small}))

    @cached_property
    def sends_held_from(self) -> dict[int, list[Send]]:
        """The sends that hold their source, by the slot from which they do."""
        holding = [send for send in self.sends if send.holds_from is not None]
        return _by(holding, lambda send: send.holds_from)

    @cached_property
    def opening(self) -> frozenset[int]:
        """The gaps in which a send becomes possible, or begins to hold its source alone."""
        return frozenset({*(slot + 1 for slot in self.sends_ready_after), *self.sends_held_from})

    @cached_property
    def needed_at(self) -> dict[int, list[str]]:
        """Names of the fetches by the slot that needs them."""
        needs = _by(self.fetches, lambda fetch: fetch.need)
        return {slot: [fetch.name for fetch in fetches] for slot, fetches in needs.items()}

    @cached_property
    def slot_bytes(self) -> list[int]:
        return device_bytes(self.program, self.instances)

    @cached_property
    def gap_bytes(self) -> list[int]:
        # Gap k lies between ops k - 1 and k; inputs are there in gap 0.
        return summed(
            self.program.end + 1,
            [held.buffer.nbytes for held in self.instances],
            [
                0 if held.first == 0 and held.buffer.is_input else min(held.first + 1, held.last)
                for held in self.instances
            ],
            [held.last for held in self.instances],
        )


def _by(items: Iterable[_T], key: Callable[[_T], int | None]) -> dict[int, list[_T]]:
    found: dict[int, list[_T]] = {}
    for item in items:
        if (slot := key(item)) is not None:
            found.setdefault(slot, []).append(item)
    return found
