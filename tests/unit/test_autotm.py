"""AutoTM's program: as good as trying everything, its variants nested, its budgets exact.

`Everything` goes through all histories of all tensors and shares no code with the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import HostUpdate, Link, Machine, Tier, TierSpec
from cotrain_compile.placement.autotm import OVERLAP_PRICE, autotm
from cotrain_compile.placement.autotm_arcs import Variant
from cotrain_compile.placement.autotm_step import Step
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.rules import check_placement
from cotrain_compile.plan import Lane, UpdateMode
from tests.unit.dataflows import chain, mixed_precision_step

PLENTY = 1 << 62
VARIANTS: tuple[Variant, ...] = get_args(Variant)
MACHINE = Machine(
    name="small",
    device=TierSpec(PLENTY, 1e9, {"float32": 1e9}),
    host=TierSpec(PLENTY, 1e9, {"float32": 1e9}),
    h2d=Link(bytes_per_s=2e6, latency_s=1e-4),
    d2h=Link(bytes_per_s=1e6, latency_s=2e-4),
    host_update=HostUpdate(1e6),
)


def problem_of(dataflow: Dataflow, budget_bytes: int, milliseconds: int = 5) -> Problem:
    costs = CostTable(
        device_s={op.name: milliseconds * 1e-3 for op in dataflow.ops},
        host_update_s={group.param: 50e-3 for group in dataflow.updates},
    )
    return Problem(dataflow, MACHINE, costs, {Tier.DEVICE: budget_bytes, Tier.HOST: PLENTY})


def within(problem: Problem, budget_bytes: int) -> Problem:
    return replace(problem, budgets={**problem.budgets, Tier.DEVICE: budget_bytes})


def least_bytes(problem: Problem, variant: Variant) -> int:
    """The least feasible budget, by what a refusal says is missing."""
    with pytest.raises(PlacementError) as refusal:
        autotm(within(problem, 0), variant)
    return refusal.value.shortfall_bytes


def arch(height: int, size: int = 1000) -> Dataflow:
    """Forward ops make h0, h1, ..., backward ops read them in reverse; no parameters."""
    names = [f"h{i}" for i in range(height)]
    ops = [Op(f"forward_{n}", "test.f", Phase.FORWARD, (), (n,)) for n in names]
    ops += [Op(f"backward_{n}", "test.b", Phase.BACKWARD, (n,), ()) for n in reversed(names)]
    buffers = tuple(Buffer(name, size, Role.TEMPORARY) for name in names)
    return Dataflow(f"arch-{height}", tuple(ops), buffers)


def with_frozen_weight(step: Dataflow, size: int = 1000) -> Dataflow:
    """The first and the last op of `step` read one more weight, which nothing updates."""
    first, *middle, last = (replace(op) for op in step.ops)
    first = replace(first, reads=(*first.reads, "frozen"))
    last = replace(last, reads=(*last.reads, "frozen"))
    frozen = Buffer("frozen", size, Role.PARAM, is_input=True, is_output=True)
    return replace(step, ops=(first, *middle, last), buffers=(*step.buffers, frozen))


def test_a_step_that_fits_stays_as_it_is() -> None:
    problem = problem_of(mixed_precision_step(2), PLENTY)
    for variant in VARIANTS:
        answer = autotm(problem, variant)
        assert answer.placement.policy == f"autotm-{variant}"
        assert answer.status == "optimal"
        assert answer.objective_s == pytest.approx(sum(problem.costs.device_s.values()))
        assert set(answer.placement.updates.values()) == {UpdateMode.RESIDENT}
        assert set(answer.placement.homes.values()) == {Tier.DEVICE}
        assert answer.placement.away == ()


def test_one_activation_leaves_and_only_overlap_hides_its_copies() -> None:
    problem = problem_of(arch(5), 4000, milliseconds=2)
    stalled = autotm(problem, "synchronous")
    hidden = autotm(problem, "asynchronous")
    assert len(stalled.placement.away) == len(hidden.placement.away) == 1
    copies_s = 1.2e-3 + 0.6e-3  # 1000 bytes down at 1 MB/s and up at 2 MB/s, with latencies
    assert stalled.objective_s == pytest.approx(20e-3 + copies_s, rel=1e-6)
    assert hidden.objective_s == pytest.approx(20e-3 + OVERLAP_PRICE * copies_s, rel=1e-6)


def test_a_tensor_that_nobody_writes_again_leaves_the_second_time_for_free() -> None:
    """h is read three times with a large temporary in each gap: one copy down, two up."""
    ops = [
        Op("make", "test.make", Phase.FORWARD, (), ("h",)),
        Op("big_0", "test.big", Phase.FORWARD, (), ("t0",)),
        Op("read_0", "test.read", Phase.FORWARD, ("h",), ()),
        Op("big_1", "test.big", Phase.BACKWARD, (), ("t1",)),
        Op("read_1", "test.read", Phase.BACKWARD, ("h",), ()),
    ]
    buffers = [Buffer("h", 1000, Role.TEMPORARY)]
    buffers += [Buffer(name, 1500, Role.TEMPORARY) for name in ("t0", "t1")]
    step = Dataflow("twice", tuple(ops), tuple(buffers))
    answer = autotm(problem_of(step, 2000), "synchronous")
    assert answer.objective_s == pytest.approx(25e-3 + 1.2e-3 + 2 * 0.6e-3, rel=1e-6)


def test_the_static_variant_moves_only_what_host_updates_need() -> None:
    problem = problem_of(chain(2), 0)
    answer = autotm(within(problem, least_bytes(problem, "static")), "static")
    assert set(answer.placement.updates.values()) == {UpdateMode.HOST}
    assert answer.placement.away == ()
    assert {answer.placement.homes[name] for name in ("w0", "w1")} == {Tier.DEVICE}
    assert {answer.placement.homes[name] for name in ("m0", "m1")} == {Tier.HOST}


def test_a_refusal_says_what_where_and_how_to_go_on() -> None:
    with pytest.raises(PlacementError, match=r"at \w+.*2.9 KiB.* short; raise memory_budget"):
        autotm(problem_of(arch(3), 5), "static")


def test_too_many_tensors_are_for_the_segment_program() -> None:
    with pytest.raises(PlanError, match=r"400 tensors at most, this step has \d+; use the segment"):
        autotm(problem_of(chain(140), PLENTY), "static")


def test_no_time_is_an_error_and_not_an_empty_answer() -> None:
    problem = problem_of(chain(2), 0)
    tight = within(problem, least_bytes(problem, "asynchronous"))
    with pytest.raises(PlanError, match="raise time_limit_s"):
        autotm(tight, "asynchronous", time_limit_s=0.0)


def test_ops_that_share_a_slot_keep_their_peak_and_updates_stay_apart() -> None:
    long = problem_of(arch(40), 0)
    assert Step(long).end < 80
    assert least_bytes(long, "static") == liveness(long.dataflow).peak_bytes
    training = Step(problem_of(mixed_precision_step(20), 0))
    owners: dict[int, set[bool]] = {}
    for op, slot in zip(training.dataflow.ops, training.slot_of, strict=False):
        owners.setdefault(slot, set()).add(op.name in training.group_of)
    assert all(len(kinds) == 1 for kinds in owners.values())
    for group in training.dataflow.updates:
        assert len({training.slot_of[training.dataflow.position[op]] for op in group.ops}) == 1


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """Up to four tensors: enough to try everything."""
    size = draw(st.sampled_from([64, 1000, 4096]))
    step = draw(
        st.sampled_from(
            [
                chain(1, width=16, batch=draw(st.integers(1, 40))),
                mixed_precision_step(1, params=size, batch_bytes=draw(st.integers(1, 9999))),
                arch(draw(st.integers(3, 4)), size),
                with_frozen_weight(arch(3, size), draw(st.integers(1, 5000))),
            ]
        )
    )
    return draw(with_random_seconds(step))


def with_random_seconds(step: Dataflow) -> st.SearchStrategy[Problem]:
    seconds = st.integers(0, 40).map(lambda n: n * 1e-4)
    return st.builds(
        lambda device, host: Problem(
            step,
            MACHINE,
            CostTable(
                dict(zip((op.name for op in step.ops), device, strict=True)),
                dict(zip((group.param for group in step.updates), host, strict=True)),
            ),
            {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY},
        ),
        st.lists(seconds, min_size=len(step.ops), max_size=len(step.ops)),
        st.lists(seconds, min_size=len(step.updates), max_size=len(step.updates)),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@given(problem=small_problems(), room=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_the_program_is_as_good_as_trying_everything(
    variant: Variant, problem: Problem, room: float
) -> None:
    least = least_bytes(problem, variant)
    most = sum(buffer.nbytes for buffer in problem.dataflow.buffers)
    assert everything(within(problem, least - 1), variant) is None
    for budget in {least, round(least + room * (most - least))}:
        answer = autotm(within(problem, budget), variant)
        best_s = everything(within(problem, budget), variant)
        assert answer.objective_s == pytest.approx(best_s, rel=2e-4, abs=1e-9)
        assert answer.bound_s <= answer.objective_s * (1 + 1e-9)


@st.composite
def training_steps(draw: st.DrawFn) -> Problem:
    layers = draw(st.integers(1, 2))
    if draw(st.booleans()):
        step = chain(layers, width=draw(st.integers(4, 40)), batch=draw(st.integers(1, 40)))
    else:
        params = draw(st.integers(10, 2000))
        step = mixed_precision_step(layers, params=params, batch_bytes=draw(st.integers(1, 9999)))
    return draw(with_random_seconds(step))


@given(problem=training_steps(), room=st.floats(0, 1))
@settings(max_examples=6, deadline=None)
def test_each_variant_is_at_least_as_good_as_the_one_before(problem: Problem, room: float) -> None:
    needs = [least_bytes(problem, variant) for variant in VARIANTS]
    assert needs == sorted(needs, reverse=True)
    most = sum(buffer.nbytes for buffer in problem.dataflow.buffers)
    budget = round(needs[0] + room * (most - needs[0]))
    static, synchronous, asynchronous = (autotm(within(problem, budget), v) for v in VARIANTS)
    for answer in (static, synchronous, asynchronous):
        check_placement(problem.dataflow, answer.placement)
    assert synchronous.objective_s <= static.objective_s * (1 + 2e-4)
    assert asynchronous.bound_s <= synchronous.objective_s * (1 + 1e-9)
    if asynchronous.status == "optimal":
        assert asynchronous.objective_s <= synchronous.objective_s * (1 + 2e-4)


# Every history of every tensor, slot by slot. A place is the set of sides with a valid copy.

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
        link = MACHINE.d2h if to == "h" else MACHINE.h2d
        return sum(link.seconds(self.step.buffer[name].nbytes) for name in item.names)

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
