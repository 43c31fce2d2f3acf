"""The simulator of works on lanes, on the smallest cases that show each rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Contention, SharedPath, Tier
from cotrain_compile.placement.simulate.engine import (
    LaneSpec,
    Work,
    lower_bound,
    makespan_s,
    repeat,
    simulate,
    steady_state,
)
from cotrain_compile.plan import Timeline
from tests.support.examples import examples

DEVICE, HOST, COPY = LaneSpec("device"), LaneSpec("host"), LaneSpec("copy")


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start_s, span.end_s) for span in timeline.spans}


def test_a_copy_runs_beside_compute_and_its_reader_waits_for_it() -> None:
    works = [
        Work("fetch", "copy", 3.0),
        Work("first", "device", 1.0),
        Work("reader", "device", 1.0, after=("fetch",)),
    ]
    timeline = simulate(works, [DEVICE, COPY])
    assert times(timeline) == {"fetch": (0, 3), "first": (0, 1), "reader": (3, 4)}
    assert timeline.makespan_s == 4.0
    assert timeline.source == "predicted"


def test_a_waiting_work_holds_up_those_behind_it_on_its_lane() -> None:
    works = [
        Work("slow", "copy", 5.0),
        Work("waits", "device", 1.0, after=("slow",)),
        Work("could run", "device", 1.0),
    ]
    assert times(simulate(works, [DEVICE, COPY]))["could run"] == (6, 7)


def test_two_workers_take_the_works_of_a_lane_in_order() -> None:
    works = [Work(f"u{i}", "host", seconds) for i, seconds in enumerate((4.0, 1.0, 2.0, 1.0))]
    timeline = simulate(works, [LaneSpec("host", workers=2)])
    assert times(timeline) == {"u0": (0, 4), "u1": (0, 1), "u2": (1, 3), "u3": (3, 4)}


def test_an_update_slows_down_exactly_while_a_copy_runs() -> None:
    """3 s of update beside a copy from 1 s to 3 s at half speed: 1 + 2/2 done at 3 s, 1 left."""
    works = [
        Work("update", "host", 3.0),
        Work("before", "device", 1.0),
        Work("fetch", "copy", 2.0, after=("before",)),
    ]
    timeline = simulate(works, [HOST, DEVICE, COPY], Contention({("host", "copy"): 2.0}))
    assert times(timeline)["update"] == (0, 4)
    assert times(timeline)["fetch"] == (1, 3)


def test_two_directions_that_share_a_path_slow_each_other() -> None:
    """Both at 2/3 speed: the short one ends at 3, having left the long one 2 of its 4 s."""
    works = [Work("up", "h2d", 2.0), Work("down", "d2h", 4.0)]
    slowdown = Contention({("h2d", "d2h"): 1.5, ("d2h", "h2d"): 1.5})
    timeline = simulate(works, [LaneSpec("h2d"), LaneSpec("d2h")], slowdown)
    assert times(timeline) == {"up": (0, 3), "down": (0, 5)}


def test_of_several_busy_lanes_the_worst_one_counts() -> None:
    works = [Work("update", "host", 2.0), Work("up", "h2d", 9.0), Work("down", "d2h", 9.0)]
    slowdown = Contention({("host", "h2d"): 2.0, ("host", "d2h"): 3.0})
    timeline = simulate(works, [HOST, LaneSpec("h2d"), LaneSpec("d2h")], slowdown)
    assert times(timeline)["update"] == (0, 6)


def test_on_a_crowded_path_it_counts_how_many_are_busy() -> None:
    """Three at half speed for 2 s, then two at 3/4 for 4/3 s, then one alone for 1 s."""
    names = ("a", "b", "c")
    works = [
        Work(f"copy {n}", n, seconds) for n, seconds in zip(names, (1.0, 2.0, 3.0), strict=True)
    ]
    crowded = Contention(crowded=(SharedPath(names, together=1.5),))
    timeline = simulate(works, [LaneSpec(name) for name in names], crowded)
    ends_s = [span.end_s for span in timeline.spans]
    assert ends_s == pytest.approx([2, 10 / 3, 13 / 3])
    with pytest.raises(PlanError, match=r"\['c'\] share a path, known lanes are \['a', 'b'\]"):
        simulate([], [LaneSpec("a"), LaneSpec("b")], crowded)


def test_memory_is_taken_at_the_start_and_returned_at_the_end() -> None:
    works = [
        Work("hold", "device", 0.0, allocates={"device": 100}),
        Work("make", "device", 1.0, allocates={"device": 8}),
        Work("offload", "copy", 2.0, ("make",), allocates={"host": 8}, frees={"device": 8}),
        Work("other", "device", 1.0, allocates={"device": 4}, frees={"device": 4}),
    ]
    timeline = simulate(works, [DEVICE, COPY])
    assert timeline.peak_bytes == {Tier.DEVICE: 112, Tier.HOST: 8}
    assert timeline.memory[Tier.DEVICE] == (
        (0, 0),
        (0, 100),
        (0, 108),
        (1, 112),
        (2, 108),
        (3, 100),
    )
    assert all(isinstance(tier, Tier) for tier in timeline.peak_bytes)


def test_what_is_freed_at_an_instant_makes_room_for_what_starts_then() -> None:
    works = [
        Work(f"w{i}", "device", 1.0, allocates={"device": 10}, frees={"device": 10})
        for i in range(5)
    ]
    assert simulate(works, [DEVICE]).peak_bytes == {Tier.DEVICE: 10}


def test_freeing_what_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="twice frees 5 bytes on device, 5 more than are alive"):
        simulate([Work("twice", "device", 1.0, frees={"device": 5})], [DEVICE])


def test_two_devices_with_a_link_between_them_need_nothing_new() -> None:
    works = [
        Work("a", "device0", 2.0, allocates={"device0": 7}),
        Work("send", "0to1", 1.0, ("a",), allocates={"device1": 7}, frees={"device0": 7}),
        Work("b", "device1", 2.0, ("send",)),
        Work("c", "device0", 2.0),
    ]
    lanes = [LaneSpec("device0"), LaneSpec("device1"), LaneSpec("0to1")]
    timeline = simulate(works, lanes)
    assert timeline.makespan_s == 5.0
    assert {str(tier): nbytes for tier, nbytes in timeline.peak_bytes.items()} == {
        "device0": 7,
        "device1": 7,
    }


def test_nothing_to_do_takes_no_time() -> None:
    assert simulate([], [DEVICE]).makespan_s == 0.0
    assert lower_bound([], []) == 0.0


def test_works_that_wait_for_each_other_are_named() -> None:
    works = [Work("a", "device", 1.0, after=("b",)), Work("b", "host", 1.0, after=("a",))]
    with pytest.raises(PlanError, match=r"2 works can never start.*(a -> b -> a|b -> a -> b)"):
        simulate(works, [DEVICE, HOST])
    with pytest.raises(PlanError, match="wait for each other"):
        lower_bound(works, [DEVICE, HOST])


def test_an_order_on_a_lane_that_contradicts_the_dependencies_is_named() -> None:
    works = [
        Work("fine", "device", 1.0),
        Work("late", "device", 1.0, after=("early",)),
        Work("early", "device", 1.0),
    ]
    with pytest.raises(PlanError, match=r"their order on a lane: (late -> early|early -> late)"):
        simulate(works, [DEVICE])


@pytest.mark.parametrize(
    ("works", "message"),
    [
        ([Work("a", "device", 1.0, after=("ghost",))], "a waits for ghost"),
        ([Work("a", "moon", 1.0)], r"a is on lane moon, known are \['device'\]"),
        ([Work("a", "device", 1.0), Work("a", "device", 1.0)], "two works are named a"),
    ],
)
def test_wrong_names_are_refused(works: list[Work], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(works, [DEVICE])


@pytest.mark.parametrize("pair", [("device", "moon"), ("device", "device")])
def test_a_slowdown_needs_two_known_lanes(pair: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match="two different lanes"):
        simulate([], [DEVICE], Contention({pair: 2.0}))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Work("a", "device", -1.0)
    with pytest.raises(ValueError, match="0 workers"):
        LaneSpec("host", workers=0)
    with pytest.raises(PlanError, match="factor of at least 1"):
        simulate([], [DEVICE, HOST], Contention({("device", "host"): 0.5}))
    with pytest.raises(ValueError, match="at least 2 steps"):
        steady_state([Work("a", "device", 1.0)], [DEVICE], steps=1)


def test_a_repeated_step_waits_for_the_one_before() -> None:
    """The first step need not wait for an update; every later one does: 3 s, then 5 s each."""
    works = [
        Work("compute", "device", 3.0, after_previous=("update",)),
        Work("update", "host", 2.0, after=("compute",)),
    ]
    periodic = steady_state(works, [DEVICE, HOST], steps=4)
    assert (periodic.first_s, periodic.period_s) == (5.0, 5.0)
    (compute, _) = periodic.steps[2]
    assert (compute.start_s, compute.end_s) == (10, 13)


def test_steps_overlap_where_nothing_forbids_it() -> None:
    works = [Work("compute", "device", 3.0), Work("update", "host", 2.0, after=("compute",))]
    periodic = steady_state(works, [DEVICE, HOST])
    assert (periodic.first_s, periodic.period_s) == (5.0, 3.0)


def test_the_period_is_right_when_the_slowest_circuit_spans_two_steps() -> None:
    """a needs the b of the step before, b the a of the step before: each pair of steps takes 4 s,
    and the ends of the steps are 1 s and 3 s apart in turn."""
    works = [
        Work("a", "x", 3.0, after_previous=("b",)),
        Work("b", "y", 1.0, after_previous=("a",)),
    ]
    periodic = steady_state(works, [LaneSpec("x", workers=9), LaneSpec("y", workers=9)], steps=9)
    assert periodic.period_s == 2.0


# Multiples of 1/1024 s add up without rounding, so the laws can be tested without tolerances.
SECONDS = st.integers(0, 4096).map(lambda n: n / 1024)


@st.composite
def random_works(draw: st.DrawFn) -> tuple[list[Work], list[LaneSpec]]:
    lanes = [LaneSpec(f"l{i}", draw(st.integers(1, 3))) for i in range(draw(st.integers(1, 4)))]
    works: list[Work] = []
    for i in range(draw(st.integers(1, 25))):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        lane = draw(st.sampled_from(lanes)).name
        before = tuple(f"w{j}" for j in sorted(after))
        works.append(Work(f"w{i}", lane, draw(SECONDS), before, allocates={"t": i}, frees={"t": i}))
    return works, lanes


@given(random_works())
def test_a_schedule_obeys_its_rules(case: tuple[list[Work], list[LaneSpec]]) -> None:
    works, lanes = case
    timeline = simulate(works, lanes)
    at = times(timeline)
    peak_bytes = {str(tier): nbytes for tier, nbytes in timeline.peak_bytes.items()}["t"]
    assert len(at) == len(works)
    for work in works:
        start, end = at[work.name]
        assert end - start == work.seconds
        assert all(at[before][1] <= start for before in work.after)
        alive = [w for w in works if at[w.name][0] <= start < at[w.name][1]]
        assert sum(w.allocates["t"] for w in alive) <= peak_bytes
    for lane in lanes:
        starts = [at[work.name][0] for work in works if work.lane == lane.name]
        assert starts == sorted(starts)
        for start in starts:
            running = [s for s in timeline.lane(lane.name) if s.start_s <= start < s.end_s]
            assert len(running) <= lane.workers
    assert timeline.makespan_s >= lower_bound(works, lanes)


@given(random_works(), st.data())
def test_slowing_lanes_never_shortens_a_work(
    case: tuple[list[Work], list[LaneSpec]], data: st.DataObject
) -> None:
    works, lanes = case
    names = [lane.name for lane in lanes]
    pairs = [(a, b) for a in names for b in names if a != b]
    slowdown = {pair: data.draw(st.sampled_from([1.0, 1.5, 3.0])) for pair in pairs}
    timeline = simulate(works, lanes, Contention(slowdown))
    seconds = {work.name: work.seconds for work in works}
    for span in timeline.spans:
        taken, alone = span.end_s - span.start_s, seconds[span.name]
        assert alone * (1 - 1e-9) <= taken <= 3 * alone * (1 + 1e-9)


@given(random_works())
@examples(25)
def test_the_same_works_give_the_same_timeline(
    case: tuple[list[Work], list[LaneSpec]],
) -> None:
    assert simulate(*case) == simulate(*case)


def test_repeat_joins_steps_by_name() -> None:
    step = Work("v", "host", 1.0), Work("w", "device", 2.0, ("v",), after_previous=("w",))
    works = repeat(step, 2)
    assert [work.key for work in works] == [("v", 0), ("w", 0), ("v", 1), ("w", 1)]
    # Each lane has room for both steps: only `w` of the first one holds up that of the second.
    timeline = simulate(works, [LaneSpec("host", 2), LaneSpec("device", 2)])
    spans = [(span.name, span.start_s, span.end_s) for span in timeline.spans]
    assert spans == [("v", 0.0, 1.0), ("v", 0.0, 1.0), ("w", 1.0, 3.0), ("w", 3.0, 5.0)]


def plainly(
    works: list[Work], lanes: list[LaneSpec], contention: Contention
) -> dict[str, tuple[float, float]]:
    """When each work runs, by looking at all of them at every instant."""
    workers = {lane.name: lane.workers for lane in lanes}
    left_s = {work.name: work.seconds for work in works}
    start_s, end_s = dict[str, float](), dict[str, float]()
    now_s = 0.0
    while len(end_s) < len(works):
        for lane in workers:
            for work in (w for w in works if w.lane == lane and w.name not in start_s):
                busy = [w for w in works if w.lane == lane and w.name in start_s.keys() - end_s]
                if len(busy) >= workers[lane] or not end_s.keys() >= set(work.after):
                    break
                start_s[work.name] = now_s
        running = [work for work in works if work.name in start_s.keys() - end_s]
        busy_lanes = {work.lane for work in running}

        def slower(lane: str, busy: set[str]) -> float:
            pairs = [f for (a, b), f in contention.slowdown.items() if a == lane and b in busy]
            paths = [path for path in contention.crowded if lane in path.links]
            return max([1.0, *pairs, *(p.slowdown(len(busy & {*p.links})) for p in paths)])

        step_s = min(left_s[work.name] * slower(work.lane, busy_lanes) for work in running)
        now_s += step_s
        for work in running:
            left_s[work.name] -= step_s / slower(work.lane, busy_lanes)
            if left_s[work.name] <= 1e-9:
                end_s[work.name] = now_s
    return {name: (start_s[name], end_s[name]) for name in end_s}


@given(random_works(), st.data())
def test_a_simulation_is_what_a_plain_look_at_every_instant_says(
    case: tuple[list[Work], list[LaneSpec]], data: st.DataObject
) -> None:
    works, lanes = case
    names = [lane.name for lane in lanes]
    pairs = [(a, b) for a in names for b in names if a != b]
    factors = st.sampled_from([1.0, 1.25, 1.5, 2.0])
    slowdown = data.draw(st.dictionaries(st.sampled_from(pairs), factors)) if pairs else {}
    shared = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    contention = Contention(slowdown, (SharedPath(tuple(shared), min(1.5, len(shared))),))
    found = times(simulate(works, lanes, contention))
    expected = plainly(works, lanes, contention)
    assert found.keys() == expected.keys()
    for name, when in expected.items():
        assert found[name] == pytest.approx(when, rel=1e-9, abs=1e-9)
    ends = [end_s for _, end_s in found.values()]
    starts = [start_s for start_s, _ in found.values()]
    whole_s = makespan_s(works, lanes, contention)
    assert whole_s == (max(ends) - min(starts) if works else 0.0)
