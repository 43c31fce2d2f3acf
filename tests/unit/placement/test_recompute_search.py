"""Which levels are tried: whole ones beside the fastest, then parts of the layers between two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import MEMORIES, Link, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.levels import Level, RegionLevels, StepLevel, spread
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.attempts import Attempts
from cotrain_compile.placement.search.climb_levels import _cut_replays
from cotrain_compile.placement.search.cuts import Cut
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.search.variants import Levels, Variant, promising
from cotrain_compile.presets import find
from tests.support.blocks import blocks
from tests.support.nets import MIB, Training
from tests.support.random_problems import with_budget
from tests.unit.placement.test_recompute_chain import unit_chain


def blocks_of_torch(count: int, training: Training | None = None) -> Dataflow:
    """Equal blocks with two levels each: ops of torch's may run again."""
    dataflow = blocks(count, training)
    ops = (replace(op, target="aten.mul.Tensor") for op in dataflow.ops)
    return replace(dataflow, ops=tuple(ops))


@pytest.fixture(scope="module")
def levels() -> Levels:
    return Levels(formulate(blocks_of_torch(8), find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40)))


def made_again(levels: Levels, number: float) -> frozenset[str]:
    return frozenset(levels.variant(number).recomputed)


@pytest.mark.parametrize("low", [0, 1])
def test_each_quarter_contains_the_smaller_ones_and_is_spread_evenly(
    levels: Levels, low: int
) -> None:
    numbers = [low + part for part in (0.25, 0.5, 0.75, 1.0)]
    sets = [made_again(levels, number) for number in numbers]
    below = made_again(levels, low) if low else frozenset[str]()
    value = ("h_act", "h_in")[low]
    for more, less, count in zip(sets, (below, *sets), (2, 4, 6, 8), strict=False):
        assert less < more
        chosen = sorted(int(name.removeprefix(value)) for name in more - below)
        assert len(chosen) == count
        assert all(len({n // 4 for n in chosen if n // 4 == half}) for half in (0, 1))
        assert sum(n < 4 for n in chosen) == count // 2


def test_layers_that_do_not_differ_take_no_turn() -> None:
    """An embedding and a head among the regions: of four layers the first takes the next level."""
    names = ("embedding", "a", "b", "c", "d", "head")
    less = StepLevel(frozenset(), 0, 0.0, (frozenset(),) * len(names))
    layers = tuple(frozenset({n}) if len(n) == 1 else frozenset[str]() for n in names)
    more = StepLevel(frozenset("abcd"), 4, 1.0, layers)
    found = [less.towards(more, quarters) for quarters in range(5)]
    assert found == [set(), {"a"}, {"a", "c"}, {"a", "b", "c"}, set("abcd")]


def tried(
    found_s: Callable[[float], float], claim_s: Callable[[float], float] | None = None
) -> list[float]:
    """The levels tried of five, each of which takes a second more to make again than the last."""
    ladder = Levels.__new__(Levels)
    ladder._levels = tuple(StepLevel(frozenset(), 0, float(n), ()) for n in range(6))
    ladder.drop_above(5)
    found, claims = {0.0: found_s(0.0)}, {0.0: (claim_s or found_s)(0.0)}
    order: list[float] = []
    at: float | None = 1.0
    while at is not None:
        order.append(at)
        found[at], claims[at] = found_s(at), (claim_s or found_s)(at)
        at = ladder.next_to_best(found, claims)
    return order


def test_the_search_goes_on_in_halves_and_quarters_where_that_promises_most() -> None:
    # More than level 3 is made again for nothing: what is between it and level 2 may take less.
    assert tried(lambda at: 10 + at if at > 2.4 else 30 - at) == [1, 2, 3, 4, 2.5, 2.25]
    # Copies keep level 3 far from its claim: a part of level 4 may be all that they lack.
    found_s = {0.0: 190.0, 1.0: 160.0, 2.0: 110.5, 3.0: 110.0, 4.0: 111.0}
    assert tried(lambda at: found_s.get(at, 120.0), lambda at: 100.0)[4:] == [3.5, 2.5, 3.25]


def test_where_no_level_fits_those_above_are_tried_and_then_those_below() -> None:
    """Whatever the step as it is takes: what runs again at once may need more than it saves."""
    ladder = Levels.__new__(Levels)
    ladder.drop_above(5)
    found, order = {0.0: 9.0, 3.0: math.inf}, list[float]()
    while (at := ladder.next_to_best(found, {})) is not None:
        order.append(at)
        found[at] = math.inf
    assert order == [4, 5, 2, 1]


class Cutting:
    """Attempts at a step whose replays have four cuts: none fits, but for those of `fits`."""

    def __init__(self, lacks: Mapping[tuple[int, ...], int], fits: tuple[int, ...]) -> None:
        self.lacks, self.fits = lacks, fits
        self.is_late, self.count = False, 1
        self.cuts = tuple(Cut(at, 1, frozenset({f"c{at}"})) for at in range(4))
        self.tried: list[tuple[int, ...]] = []

    def variant(self, number: int) -> tuple[int, ...]:
        return ()

    def with_cuts(self, cuts: Sequence[Cut]) -> tuple[int, ...]:
        return tuple(cut.at for cut in cuts)

    def known(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        return cuts

    def is_within(self, factor: float, seconds: float) -> bool:
        return True

    def cover_rank(self, cuts: tuple[int, ...]) -> tuple[float, int]:
        self.tried.append(cuts)
        return (1.0, 0) if cuts == self.fits else (math.inf, self.lacks.get(cuts, 100))


def test_a_second_cut_is_tried_beside_the_one_that_lacks_least_where_none_fits() -> None:
    cutting = Cutting({(): 90, (2,): 50, (1, 2): 30}, fits=(2, 3))
    _cut_replays(cutting, cutting, most=2)  # type: ignore[arg-type]
    assert cutting.tried[-1] == (2, 3)
    assert (0, 1) not in cutting.tried


def test_no_second_cut_is_tried_where_none_lacks_less_than_the_whole() -> None:
    cutting = Cutting({(): 90}, fits=(0, 1))
    _cut_replays(cutting, cutting, most=2)  # type: ignore[arg-type]
    assert max(map(len, cutting.tried)) == 1


def test_regions_between_two_levels_make_up_for_each_other() -> None:
    """What a region saves less than asked, the next one saves more."""

    def region(name: str, *saved_bytes: int) -> RegionLevels:
        names = [frozenset(f"{name}{n}" for n in range(i + 1)) for i in range(len(saved_bytes))]
        return RegionLevels(
            name, tuple(Level(n, b, 0.0) for n, b in zip(names, saved_bytes, strict=True))
        )

    layers = [region(name, 10, 20) for name in "abcd"]
    assert spread(layers, (1.25, 1.25, 1.25, 1.25)) == {"a0", "b0", "c0", "c1", "d0"}
    assert spread(layers, (2.0, 1.5, 0.5, 0.0)) == {"a0", "a1", "b0", "c0"}
    embedding, head = region("e"), region("h", 100)
    assert spread([embedding, *layers, head], (0, 0.5, 0.5, 0.5, 0.5, 0)) == {"b0", "d0"}


def test_what_fits_without_a_link_is_tried_with_any(levels: Levels) -> None:
    """The first level with which nothing has to move, in as few layers as will do."""
    suffixes = [level.suffix for level in levels.that_fit(100_000_000)]
    assert suffixes == [f"+recompute:{number}" for number in ("2", "1.75", "1.5")]
    assert not list(levels.that_fit(80_000_000))
    problem = formulate(blocks_of_torch(8), find("gh200"), dict.fromkeys(MEMORIES, 1 << 40))
    report = solve(problem.with_budget(Tier.DEVICE, 100_000_000)).report
    assert report is not None
    assert {f"resident{suffix}" for suffix in suffixes} <= set(report.simulated_s)


def test_where_nothing_fits_more_is_made_again() -> None:
    never = float("inf")
    assert tried(lambda at: 500.0 if at > 2 else never) == [1, 2, 3, 4]
    assert tried(lambda at: never) == [1, 2, 3, 4, 5]


def test_little_is_not_worth_another_level() -> None:
    assert tried(lambda at: 1e4 + at if at >= 1 else 2e4) == [1, 2]


def test_a_program_is_solved_only_where_its_relaxation_leaves_it_a_chance() -> None:
    step = Variant(formulate(blocks_of_torch(2), find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40)))
    again = Variant(step.problem.recomputing(("h_in0",)))
    times = {step.recomputed: 1.2, again.recomputed: 1.0}

    class Relaxed:
        def __init__(self, step_s: float) -> None:
            self.claim_s = step_s

    def hopeful(step_claim_s: float, again_claim_s: float, gap: float = 0.01) -> list[Variant]:
        step.relaxed, again.relaxed = Relaxed(step_claim_s), Relaxed(again_claim_s)  # type: ignore[assignment]
        return promising([step, again], times.__getitem__, gap)

    assert hopeful(1.2, 0.9) == [again]
    assert hopeful(1.0, 0.9) == [again, step]
    assert hopeful(1.2, 0.995) == []
    assert hopeful(1.2, 0.995, gap=-1.0) == [again]
    assert hopeful(0.9, 0.995) == [step]


def test_a_plan_may_have_layers_at_two_levels() -> None:
    """Memory for half of the layers at level 2, and links over which nothing is worth sending.

    The program proposes them, at what they take.
    """
    machine = find("rtx4090")
    slow = machine.but(h2d=Link(1e6), d2h=Link(1e6))
    problem = formulate(blocks_of_torch(8), slow, dict.fromkeys(MEMORIES, 1 << 40))
    half = Levels(problem).variant(1.5)
    peak_bytes = schedule(problem, half.by_rule("resident")).predicted.peak_bytes
    problem = with_budget(problem, peak_bytes[Tier.DEVICE])
    plan = solve(problem, SolveSettings())
    check(problem, plan)
    # The program may choose others of the layers, which are alike.
    assert len(plan.placement.recomputed) == len(half.recomputed)
    assert not plan.tasks
    asked = Attempts(problem, SolveSettings(), lambda stage: None)
    proposed = asked.propose_levels(Levels(problem).regions)
    assert proposed is not None
    assert plan.predicted.makespan_s == pytest.approx(proposed.claim_s)


def test_a_level_that_makes_the_same_again_is_tried_once() -> None:
    """Beside what a program proposes lie levels that the search looks at again later."""
    problem = formulate(blocks_of_torch(2), find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    attempts = Attempts(problem, SolveSettings(), lambda stage: None)
    first, second = (Levels(problem).variant(1) for _ in range(2))
    for level in (first, second):
        attempts.try_level(level)
    assert attempts.variants == [attempts.step, first]


def test_a_replay_that_hardly_fits_is_cut() -> None:
    """Sixteen equal values, four made again at once: two and two of them leave room for copies."""
    problem = formulate(unit_chain(16), find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 40))
    levels = Levels(problem)
    assert levels.cuts
    for cut in levels.cuts:
        assert all(len(cut.names & names) <= 1 for names in levels.last.by_region)
    problem = with_budget(problem, 6 * MIB)
    plan = solve(problem, SolveSettings())
    check(problem, plan)
    assert plan.report is not None
    others = [s for way, s in plan.report.simulated_s.items() if "cut" not in way]
    # With its values offloaded as the greedy has them, two cuts take 0.897 ms.
    assert plan.predicted.makespan_s < min(0.00086, min(others))


def test_what_moves_spares_a_third_of_what_making_again_costs() -> None:
    """As POFO (NeurIPS 2021) has it for convolutional nets on a V100 with a host at 12 GB/s.

    The step has as many seconds for a byte of activations as ResNet-50 on that card, and the memory
    in which it fits with all blocks made again.
    """
    plain = blocks_of_torch(8)
    step = replace(plain, ops=tuple(replace(op, flops=op.flops // 2) for op in plain.ops))

    def over_link(bytes_per_s: float) -> Problem:
        machine = find("v100-dgx2").but(h2d=Link(bytes_per_s), d2h=Link(bytes_per_s))
        return formulate(step, machine, dict.fromkeys(MEMORIES, 1 << 40))

    slowest = over_link(1e6)
    fits_s = solve(slowest).predicted.makespan_s
    all_again = Levels(slowest).variant(2).by_rule("resident")
    least = schedule(slowest, all_again).predicted.peak_bytes[Tier.DEVICE]
    settings = SolveSettings()
    alone, with_host = (
        solve(with_budget(problem, least), settings) for problem in (slowest, over_link(12e9))
    )
    assert alone.placement.recomputed
    assert not alone.tasks
    assert with_host.tasks
    overheads = [plan.predicted.makespan_s / fits_s - 1 for plan in (alone, with_host)]
    assert overheads[0] > 0.1
    assert overheads[1] <= 2 / 3 * overheads[0]
