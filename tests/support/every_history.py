"""AutoTM's model by trying everything: every history of every tensor, slot by slot.

A small problem in; the least seconds out. It shares no code with `placement.autotm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from cotrain_compile.dataflow import Buffer, Dataflow, Role
from cotrain_compile.machine import Tier
from cotrain_compile.placement.autotm.arcs import Variant
from cotrain_compile.placement.autotm.autotm import OVERLAP_PRICE
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Lane

# A place is the set of sides with a valid copy.
Sides = frozenset[str]
GONE, ON_DEVICE, ON_HOST, ON_BOTH = map(frozenset, ("", "d", "h", "dh"))


@dataclass(frozen=True)
class Item:
    """A tensor of the model; `home` is "" for what the step makes and forgets."""

    kind: Literal["param", "states", "gradient", "activation"]
    names: tuple[str, ...]
    group: str
    home: str


class Way(NamedTuple):
    """One way for one tensor to pass one slot."""

    after: Sides
    held: bool
    copied_before: Sides
    copies_beside: str
    sides: Sides


class Everything:
    """The model for one choice of homes and of who runs each update."""

    def __init__(
        self, problem: Problem, variant: Variant, items: list[Item], hosted: set[str]
    ) -> None:
        self.problem, self.step, self.variant = problem, problem.dataflow, variant
        self.items, self.hosted = items, hosted
        self.end = len(self.step.ops)
        self.owner = {op: g.param for g in self.step.updates for op in g.ops}
        self.last_op = {
            g.param: max(i for i, op in enumerate(self.step.ops) if op.name in g.ops)
            for g in self.step.updates
        }

    def best_s(self) -> float | None:
        """The least time over all histories, None when none fits."""
        start = tuple(
            ON_HOST if i.home == "host" else ON_DEVICE if i.home else GONE for i in self.items
        )
        frontier: dict[tuple[tuple[Sides, ...], frozenset[str]], float] = {
            (start, frozenset()): 0.0
        }
        for slot in range(self.end + 1):
            following: dict[tuple[tuple[Sides, ...], frozenset[str]], float] = {}
            for (places, updated), before_s in frontier.items():
                for key, seconds in self.moves(slot, places, updated):
                    total = before_s + seconds
                    if total < following.get(key, float("inf")):
                        following[key] = total
            frontier = following
        ends = [
            seconds + sum(map(self.return_s, self.items, places))
            for (places, updated), seconds in frontier.items()
            if updated == self.hosted
        ]
        return min(ends, default=None)

    def return_s(self, item: Item, place: Sides) -> float:
        missing = {"device": "d", "host": "h", "": ""}[item.home]
        return self.copy_s(item, missing) if missing and missing not in place else 0.0

    def copy_s(self, item: Item, to: str) -> float:
        ends = (Tier.DEVICE, Tier.HOST) if to == "h" else (Tier.HOST, Tier.DEVICE)
        sizes = (self.step.buffer[name].nbytes for name in item.names)
        return sum(self.problem.machine.copy_s(nbytes, *ends) for nbytes in sizes)

    def moves(
        self, slot: int, places: tuple[Sides, ...], updated: frozenset[str]
    ) -> Iterator[tuple[tuple[tuple[Sides, ...], frozenset[str]], float]]:
        """All joint ways to pass `slot` within the budget: what follows, and its seconds."""
        updates = [self.host_update_ways(slot, param) for param in sorted(self.hosted - updated)]
        for chosen in product(*updates):
            now = {param: way for param, way in chosen if way}
            ways = [
                list(self.ways(slot, item, place, now))
                for item, place in zip(self.items, places, strict=True)
            ]
            for joint in product(*ways):
                if self.fits(slot, joint):
                    key = (tuple(way.after for way in joint), updated | frozenset(now))
                    yield key, self.slot_s(slot, joint, now)

    def host_update_ways(self, slot: int, param: str) -> list[tuple[str, str]]:
        """Not now, stalling at its place, or beside any slot where its inputs allow."""
        ways = [(param, "")]
        if slot == self.last_op[param]:
            ways.append((param, "stall"))
        if self.variant == "asynchronous" and self.is_ready(slot, param):
            ways.append((param, "beside"))
        return ways

    def is_ready(self, slot: int, param: str) -> bool:
        group = self.step.update[param]
        for index, op in enumerate(self.step.ops):
            if op.name in group.ops:
                continue
            writes_input = {group.gradient, *group.scalars} & set(op.writes)
            if param in (*op.reads, *op.writes) or writes_input:
                if index < self.last_op[param] and index >= slot:
                    return False
                if index > self.last_op[param] and index <= slot:
                    return False
        return True

    def touches(self, slot: int, item: Item) -> tuple[bool, bool]:
        """Whether the device reads or writes the item in `slot`, and whether it writes."""
        if slot == self.end:
            return False, False
        op = self.step.ops[slot]
        if self.owner.get(op.name, "") in self.hosted:
            return False, False
        return (
            any(name in (*op.reads, *op.writes) for name in item.names),
            any(name in op.writes for name in item.names),
        )

    def span(self, item: Item) -> tuple[int, int]:
        """First and last op that has the item, whoever runs it."""
        found = [
            index
            for index, op in enumerate(self.step.ops)
            if any(name in (*op.reads, *op.writes) for name in item.names)
        ]
        return (0, self.end) if item.home else (found[0], found[-1])

    def ways(self, slot: int, item: Item, place: Sides, now: dict[str, str]) -> Iterator[Way]:
        first, last = self.span(item)
        if slot < first or (slot > last and not place):
            if not (item.group in now and item.kind == "gradient"):
                yield Way(GONE, False, GONE, "", GONE)
            return
        start = ON_DEVICE if slot == first and not item.home else place
        touched, written = self.touches(slot, item)
        is_update = item.group in now
        moves_at_all = self.may_move(item)
        for sides in (ON_DEVICE, ON_HOST, ON_BOTH) if moves_at_all else (start,):
            if slot > last and not sides <= start:
                continue
            if (touched and "d" not in sides) or (is_update and not self.serves(item, sides)):
                continue
            stays = self.variant == "static" and item.kind == "gradient" and slot <= last
            if stays and "d" not in sides:
                continue
            held = "d" in sides or item.home == "device"
            after = ON_DEVICE if written else sides
            if is_update and item.kind == "param":
                after = ON_HOST
            yield self.passed(slot, item, last, Way(after, held, sides - start, "", sides))
            is_alone = len(sides) == 1 and moves_at_all and slot <= last and not written
            if (
                self.variant == "asynchronous"
                and is_alone
                and not (is_update and item.kind == "param")
            ):
                to = "h" if sides == ON_DEVICE else "d"
                yield self.passed(slot, item, last, Way(ON_BOTH, True, sides - start, to, sides))

    def passed(self, slot: int, item: Item, last: int, way: Way) -> Way:
        """What the step has made is gone from the device after the last op that has it."""
        if item.home or slot < last:
            return way
        kept = way.after & ON_HOST if item.kind == "gradient" else GONE
        return way._replace(after=kept)

    def may_move(self, item: Item) -> bool:
        if item.home == "device":
            return item.kind == "param" and bool(item.group)
        return self.variant != "static" or item.kind == "gradient"

    def serves(self, item: Item, sides: Sides) -> bool:
        """The host update of this group finds the item."""
        if item.kind == "states":
            return sides == ON_HOST
        return "h" in sides or item.kind == "activation"

    def fits(self, slot: int, joint: tuple[Way, ...]) -> bool:
        used = 0
        for item, way in zip(self.items, joint, strict=True):
            first, last = self.span(item)
            if way.held and first <= slot <= last:
                used += sum(self.step.buffer[name].nbytes for name in item.names)
        moving = {name for item in self.items for name in item.names}
        used += sum(
            buffer.nbytes
            for buffer in self.step.buffers
            if buffer.name not in moving and self.is_alive(buffer, slot)
        )
        return used <= self.problem.budgets[Tier.DEVICE]

    def is_alive(self, buffer: Buffer, slot: int) -> bool:
        found = [
            (index, self.owner.get(op.name, ""))
            for index, op in enumerate(self.step.ops)
            if buffer.name in (*op.reads, *op.writes)
        ]
        if buffer.is_input:
            return True
        if {param for _, param in found} <= self.hosted:
            return False
        return found[0][0] <= slot and (buffer.is_output or slot <= found[-1][0])

    def slot_s(self, slot: int, joint: tuple[Way, ...], now: dict[str, str]) -> float:
        stall_s = 0.0
        lane_s = {Lane.D2H: 0.0, Lane.H2D: 0.0, Lane.HOST: 0.0}
        for item, way in zip(self.items, joint, strict=True):
            stall_s += sum(self.copy_s(item, side) for side in way.copied_before)
            if way.copies_beside:
                lane = Lane.D2H if way.copies_beside == "h" else Lane.H2D
                lane_s[lane] += self.copy_s(item, way.copies_beside)
        for param, how in now.items():
            if how == "stall":
                stall_s += self.problem.costs.host_update_s[param]
            else:
                lane_s[Lane.HOST] += self.problem.costs.host_update_s[param]
        device_s = 0.0
        if slot < self.end and self.owner.get(self.step.ops[slot].name, "") not in self.hosted:
            device_s = self.problem.costs.device_s[self.step.ops[slot].name]
        return max(device_s, *lane_s.values()) + stall_s + OVERLAP_PRICE * sum(lane_s.values())


def everything(problem: Problem, variant: Variant) -> float | None:
    """The least seconds over all homes, all choices of who updates, and all histories."""
    step = problem.dataflow
    groups = step.updates
    frozen = [b.name for b in step.buffers if b.role is Role.PARAM and b.name not in step.update]
    param_homes = ("device",) if variant == "static" else ("device", "host")
    found = []
    for modes in product(
        product(param_homes, ("device", "host"), (False, True)), repeat=len(groups)
    ):
        for frozen_homes in product(param_homes, repeat=len(frozen)):
            if any((home == "host" or is_hosted) and s == "device" for home, s, is_hosted in modes):
                continue
            items = [
                Item("param", (name,), "", home)
                for name, home in zip(frozen, frozen_homes, strict=True)
            ]
            for group, (home, states_home, _) in zip(groups, modes, strict=True):
                items.append(Item("param", (group.param,), group.param, home))
                items.append(Item("states", group.states, group.param, states_home))
                items.append(Item("gradient", (group.gradient,), group.param, ""))
            items += [Item("activation", (name,), "", "") for name in idle(step)]
            hosted = {g.param for g, mode in zip(groups, modes, strict=True) if mode[2]}
            best_s = Everything(problem, variant, items, hosted).best_s()
            found += [] if best_s is None else [best_s]
    return min(found, default=None)


def idle(step: Dataflow) -> list[str]:
    """Temporaries, but for gradients, that some op between their first and last does not touch."""
    gradients = {group.gradient for group in step.updates}
    names = []
    for buffer in step.buffers:
        found = [i for i, op in enumerate(step.ops) if buffer.name in (*op.reads, *op.writes)]
        stays = buffer.is_input or buffer.is_output or buffer.name in gradients
        if found and not stays and found[-1] - found[0] >= len(found):
            names.append(buffer.name)
    return names
