"""What rests on the host: no timing passes the peak, by hand and at random; as little as fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.cluster.away import NOTHING, Away, Room, ladder
from cotrain_compile.cluster.data_parallel import SHARD, plan_data_parallel
from cotrain_compile.cluster.data_parallel_works import Gathering, Ring, Step, Way, works_of
from cotrain_compile.cluster.host_share import HostShare, host_shares
from cotrain_compile.cluster.profiles import per_sample
from cotrain_compile.cluster.rank_memory import RankMemory, WorkingMemory
from cotrain_compile.cluster.units import BUCKET_BYTES, units_of
from cotrain_compile.machine import HostUpdate, Link, Network
from cotrain_compile.placement.simulate.engine import LaneSpec, Work, lower_bound, simulate
from cotrain_compile.placement.simulate.last_end import last_end_s
from cotrain_compile.plan import Timeline
from tests.support.clusters import HOST, a_box, a_model

KEPT = 30


def held_bytes(step: Step, timeline: Timeline, working: WorkingMemory) -> int:
    """The most that the device holds, from the spans alone: when each thing comes and goes."""
    changes: list[tuple[float, int, float]] = []  # when, leaving (0) before coming (1), bytes
    spans = {span.name.removesuffix(" on small"): span for span in timeline.spans}
    end_s = timeline.makespan_s
    away, parts, samples = step.away, step.parts, step.micro_batch

    def hold(nbytes: float, start_s: float, stop_s: float) -> None:
        if start_s < stop_s:
            changes.extend(((start_s, 1, nbytes), (stop_s, 0, -nbytes)))

    def turns() -> Iterator[tuple[int, str, str]]:
        for i in range(step.micro_batches):
            for number, unit in enumerate(step.units):
                yield number, f"forward {i} of {unit.name}", f"backward {i} of {unit.name}"

    last = len(step.units) - 1
    for number, unit in enumerate(step.units):
        rests = (number >= away.states) * unit.state_bytes
        rests += (number >= away.gradients) * unit.grad_bytes
        rests += (number >= away.params) * unit.param_bytes
        hold(rests / parts, 0.0, end_s)
    for number, forward, backward in turns():
        unit = step.units[number]
        for turn in (forward, backward):
            hold(working.beside[number], spans[turn].start_s, spans[turn].end_s)
            until_s = spans[turn].end_s
            if turn == forward and (number == last or step.gathering is Gathering.ONCE):
                until_s = spans[backward].end_s
            if f"weights for {turn}" in spans:
                hold(unit.param_bytes / parts, spans[f"weights for {turn}"].start_s, until_s)
            if f"gather for {turn}" in spans:
                hold(unit.param_bytes, spans[f"gather for {turn}"].start_s, until_s)
        kept, came_s = KEPT * samples, spans[forward].start_s
        if number < away.kept:
            hold(kept, came_s, spans[f"kept by {forward}"].end_s)
            came_s = spans[f"kept for {backward}"].start_s
        hold(kept, came_s, spans[backward].end_s)
        if step.sharded:
            scatter = spans[f"scatter after {backward}"]
            hold(unit.grad_bytes, spans[backward].start_s, scatter.end_s)
            if number < away.gradients:
                gone = spans[f"gradients after {backward}"]
                hold(unit.grad_bytes / parts, scatter.start_s, gone.end_s)
        elif number < away.gradients:
            gone = spans[f"gradients after {backward}"]
            hold(unit.grad_bytes, spans[backward].start_s, gone.end_s)
    now = most = 0.0
    for _, _, change in sorted(changes):
        now += change
        most = max(most, now)
    return round(most)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, WorkingMemory]:
    count = draw(st.integers(2, 4))
    params = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    profile = a_model([BUCKET_BYTES * size for size in params], per_sample(KEPT))
    seconds = st.floats(0.1, 9.0)
    rate = BUCKET_BYTES / draw(seconds)
    gathering = draw(st.sampled_from(Gathering))
    whole = 2 if gathering is Gathering.ONCE else 3
    away = ladder(draw(st.integers(0, whole * count)), count)
    up, down = (Link(BUCKET_BYTES / draw(seconds)) for _ in range(2))
    host = HostShare(10**15, down, up, BUCKET_BYTES / draw(seconds), BUCKET_BYTES / draw(seconds))
    step = Step(
        units_of(profile),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        {"small": 1e15},
        draw(st.sampled_from((None, Ring(Network(rate), 2), Ring(Network(rate), 3)))),
        gathering,
        hosts={"small": host},
        away=replace(away, kept=draw(st.integers(0, count - 1))),
        ahead=draw(st.sampled_from((1, 2))),
    )
    return step, WorkingMemory(profile, step.micro_batch)


def simulated(works: list[Work]) -> Timeline:
    return simulate(works, [LaneSpec(lane) for lane in dict.fromkeys(w.lane for w in works)])


@settings(max_examples=60, deadline=None)
@given(steps())
def test_no_timing_passes_the_peak(drawn: tuple[Step, WorkingMemory]) -> None:
    step, working = drawn
    works = [each.work for each in works_of(step)]
    timeline = simulated(works)
    assert len(step.units) == len(working.profile.layers)
    streamed = step.gathering is Gathering.AGAIN
    memory = RankMemory(working, step.parts, streamed, step.micro_batches, step.ahead)
    peak = memory.peak_bytes(step.away)
    assert held_bytes(step, timeline, working) <= peak
    assert timeline.makespan_s == pytest.approx(last_end_s(works))
    lanes = [LaneSpec(lane) for lane in dict.fromkeys(w.lane for w in works)]
    assert lower_bound(works, lanes) <= timeline.makespan_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(steps())
def test_bytes_are_those_that_have_to_move(drawn: tuple[Step, WorkingMemory]) -> None:
    step, _ = drawn
    moved = dict.fromkeys(Way, 0.0)
    for each in works_of(step):
        moved[each.way] += each.nbytes
    units, away, m = step.units, step.away, step.micro_batches
    kept = m * away.kept * KEPT * step.micro_batch
    down = sum(
        u.grad_bytes * (m if i < away.gradients else 1) for i, u in enumerate(units[: away.states])
    )
    assert moved[Way.DOWN] == pytest.approx(down / step.parts + kept)
    # A weight comes for each forward and each backward, the last unit's once for both; one that
    # rests on the device comes back from its update.
    comes = [2 * m if u is not units[-1] else m for u in units]
    up = sum(
        u.param_bytes * (comes[i] if i < away.params else 1)
        for i, u in enumerate(units[: away.states])
    )
    assert moved[Way.UP] == pytest.approx(up / step.parts + kept)


def test_as_little_is_away_as_makes_the_rest_fit() -> None:
    units = 5

    def room(capacity: int, host: int = 10**9, *, streamed: bool = True) -> Room:
        def peak(away: Away) -> int:
            return 100 - 4 * away.states - 3 * away.gradients - 2 * away.params - away.kept

        return Room(units, streamed, peak, lambda away: 9 * away.states, capacity, host)

    assert room(100).placements() == [NOTHING]
    found = room(90).placements()
    # Three states; or with all that is kept two; or all states, where nothing else has to go.
    assert found == [Away(3), Away(2, kept=4), Away(5), Away(5, 5), Away(5, 5, 5)]
    assert room(75).placements()[0] == Away(5, 2)
    assert room(90, host=20).placements() == [Away(2, kept=4)]
    assert set(room(62, streamed=False).placements()) == {Away(5, 5, kept=3), Away(5, 5, kept=4)}
    assert room(10).placements() == []
    assert room(10).nearest() == Away(5, 5, 5, kept=4)
    assert room(10, host=30).nearest() == Away(3, kept=4)


def test_states_on_the_host_are_updated_behind_all_gradients_by_hand() -> None:
    size = BUCKET_BYTES
    model = a_model((size, size), per_sample(KEPT))
    # The host updates a unit in 4 s; copies of its gradients and parameters take 1 s each.
    update = HostUpdate(7 * size / 4)
    rests = 8 * size
    box = a_box(1, size, rests - 2 * size + 110, host=HOST, update=update)
    plan = plan_data_parallel(model, box, 1)
    assert plan.away == Away(states=1)
    assert plan.on_host == "on the host states of 1 of 2 units"
    # Forwards to 2 s, backwards to 6 s, gradients down to 7, updated by 11, back at 12 s.
    assert plan.step_s == pytest.approx(12)
    assert plan.peak_bytes == 6 * size + 60 + 40 + 10
    assert plan.moved_bytes == {Way.DOWN: size, Way.UP: size}


def test_a_rank_has_its_share_of_the_host() -> None:
    box = a_box(
        2, 8.0, host=replace(HOST, capacity_bytes=10, bytes_per_s=16.0), update=HostUpdate(6.0)
    )
    (share,) = host_shares(box).values()
    assert (share.capacity_bytes, share.bytes_per_s, share.update_bytes_per_s) == (5, 8.0, 3.0)
    # Two devices copy both ways at once, each at a quarter of the host's memory.
    assert share.up.bytes_per_s == share.down.bytes_per_s == 4.0


def test_sharded_parameters_come_through_the_host_where_they_do_not_fit() -> None:
    size = BUCKET_BYTES
    model = a_model([size] * 8, per_sample(KEPT))
    small = a_box(2, 10.0 * size, 8 * size, host=HOST)
    plan = plan_data_parallel(model, small, 2, SHARD)
    assert plan.missing_bytes == 0
    assert plan.away.states
    roomy = plan_data_parallel(model, a_box(2, 10.0 * size), 2, SHARD)
    assert roomy.away == NOTHING
    assert roomy.step_s <= plan.step_s
