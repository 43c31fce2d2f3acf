"""What rests on the host: no timing passes the peak, by hand and at random; as little as fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.cluster.data_parallel.data_parallel import SHARD, plan_data_parallel
from cotrain_compile.cluster.data_parallel.step import Replicas, Sharding, data_parallel_step
from cotrain_compile.cluster.model.machines import beside_copies, machines_by_kind
from cotrain_compile.cluster.model.profiles import BUCKET_BYTES, per_sample, units_of
from cotrain_compile.cluster.steps.rank_memory import (
    ON_DEVICE,
    RankDemand,
    RankMemory,
    Residence,
    WorkingMemory,
    ladder,
)
from cotrain_compile.cluster.steps.stage_step import Does, Rank, Ring
from cotrain_compile.machine import HostUpdate, Link, Network
from cotrain_compile.plan import Timeline
from tests.support.clusters import HOST, a_box, a_machine, a_model

KEPT = 30


def held_bytes(step: Replicas, timeline: Timeline, working: WorkingMemory) -> int:
    """The most that the device holds, from the spans alone: when each thing comes and goes."""
    changes: list[tuple[float, int, float]] = []  # when, leaving (0) before coming (1), bytes
    spans = {span.name: span for span in timeline.spans}
    end_s = timeline.makespan_s
    residence, parts, samples = step.residence, step.parts, step.micro_batch

    def hold(nbytes: float, start_s: float, stop_s: float) -> None:
        if start_s < stop_s:
            changes.extend(((start_s, 1, nbytes), (stop_s, 0, -nbytes)))

    def turns() -> Iterator[tuple[int, str, str]]:
        for i in range(step.micro_batches):
            for number, unit in enumerate(step.units):
                yield number, f"forward {i} of {unit.name}", f"backward {i} of {unit.name}"

    last = len(step.units) - 1
    for number, unit in enumerate(step.units):
        rests = (number >= residence.states) * unit.state_bytes
        rests += (number >= residence.gradients) * unit.grad_bytes
        rests += (number >= residence.params) * unit.param_bytes
        hold(rests / parts, 0.0, end_s)
    for number, forward, backward in turns():
        unit = step.units[number]
        for turn in (forward, backward):
            hold(working.beside[number], spans[turn].start_s, spans[turn].end_s)
            until_s = spans[turn].end_s
            if turn == forward and (number == last or step.sharding is Sharding.ONCE):
                until_s = spans[backward].end_s
            if f"weights for {turn}" in spans:
                hold(unit.param_bytes / parts, spans[f"weights for {turn}"].start_s, until_s)
            if f"gather for {turn}" in spans:
                hold(unit.param_bytes, spans[f"gather for {turn}"].start_s, until_s)
        kept, came_s = KEPT * samples, spans[forward].start_s
        if number < residence.kept:
            hold(kept, came_s, spans[f"kept by {forward}"].end_s)
            came_s = spans[f"kept for {backward}"].start_s
        hold(kept, came_s, spans[backward].end_s)
        if step.sharded:
            scatter = spans[f"scatter after {backward}"]
            hold(unit.grad_bytes, spans[backward].start_s, scatter.end_s)
            if number < residence.gradients:
                gone = spans[f"gradients after {backward}"]
                hold(unit.grad_bytes / parts, scatter.start_s, gone.end_s)
        elif number < residence.gradients:
            gone = spans[f"gradients after {backward}"]
            hold(unit.grad_bytes, spans[backward].start_s, gone.end_s)
    now = most = 0.0
    for _, _, change in sorted(changes):
        now += change
        most = max(most, now)
    return round(most)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Replicas, WorkingMemory]:
    count = draw(st.integers(2, 4))
    params = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    profile = a_model([BUCKET_BYTES * size for size in params], per_sample(KEPT))
    seconds = st.floats(0.1, 9.0)
    rate = BUCKET_BYTES / draw(seconds)
    sharding = draw(st.sampled_from(Sharding))
    whole = 2 if sharding is Sharding.ONCE else 3
    residence = ladder(draw(st.integers(0, whole * count)), count)
    up, down = (Link(BUCKET_BYTES / draw(seconds)) for _ in range(2))
    host = replace(HOST, bytes_per_s=BUCKET_BYTES / draw(seconds))
    machine = a_machine(host=host, update=HostUpdate(BUCKET_BYTES / draw(seconds)))
    step = Replicas(
        units_of(profile),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        (Rank(machine.but(h2d=up, d2h=down), "small"),),
        draw(st.sampled_from((None, Ring(Network(rate), 2), Ring(Network(rate), 3)))),
        sharding,
        residence=replace(residence, kept=draw(st.integers(0, count - 1))),
        ahead=draw(st.sampled_from((1, 2))),
    )
    return step, WorkingMemory(profile, step.micro_batch)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_no_timing_passes_the_peak(drawn: tuple[Replicas, WorkingMemory]) -> None:
    step, working = drawn
    made = data_parallel_step(step)
    assert len(step.units) == len(working.profile.layers)
    streamed = step.sharding is Sharding.AGAIN
    memory = RankMemory(working, step.parts, streamed, step.micro_batches, step.ahead)
    peak = memory.peak_bytes(step.residence)
    assert held_bytes(step, made.timeline, working) <= peak
    assert made.timeline.makespan_s == made.seconds
    assert made.bound_s <= made.seconds * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(steps())
def test_bytes_are_those_that_have_to_move(drawn: tuple[Replicas, WorkingMemory]) -> None:
    step, _ = drawn
    moved = data_parallel_step(step).moved_bytes
    units, residence, m = step.units, step.residence, step.micro_batches
    kept = m * residence.kept * KEPT * step.micro_batch
    down = sum(
        u.grad_bytes * (m if i < residence.gradients else 1)
        for i, u in enumerate(units[: residence.states])
    )
    assert moved[Does.STORE] == pytest.approx(down / step.parts + kept)
    # A weight comes for each forward and each backward, the last unit's once for both; one that
    # rests on the device comes back from its update.
    comes = [2 * m if u is not units[-1] else m for u in units]
    up = sum(
        u.param_bytes * (comes[i] if i < residence.params else 1)
        for i, u in enumerate(units[: residence.states])
    )
    assert moved[Does.FETCH] == pytest.approx(up / step.parts + kept)


def test_as_little_is_offloaded_as_makes_the_rest_fit() -> None:
    units = 5

    def room(capacity: int, host: int = 10**9, *, streamed: bool = True) -> RankDemand:
        def peak(on_host: Residence) -> int:
            lighter = 4 * on_host.states + 3 * on_host.gradients + 2 * on_host.params
            return 100 - lighter - on_host.kept

        return RankDemand(units, streamed, peak, lambda own: 9 * own.states, capacity, host)

    assert room(100).fitting() == [ON_DEVICE]
    found = room(90).fitting()
    # Three states; or with all that is kept two; or all states, where nothing else has to go.
    assert found == [
        Residence(3),
        Residence(2, kept=4),
        Residence(5),
        Residence(5, 5),
        Residence(5, 5, 5),
    ]
    assert room(75).fitting()[0] == Residence(5, 2)
    assert room(90, host=20).fitting() == [Residence(2, kept=4)]
    assert set(room(62, streamed=False).fitting()) == {
        Residence(5, 5, kept=3),
        Residence(5, 5, kept=4),
    }
    assert room(10).fitting() == []
    assert room(10).nearest() == Residence(5, 5, 5, kept=4)
    assert room(10, host=30).nearest() == Residence(3, kept=4)


def test_states_on_the_host_are_updated_behind_all_gradients_by_hand() -> None:
    size = BUCKET_BYTES
    model = a_model((size, size), per_sample(KEPT))
    # The host updates a unit in 4 s; copies of its gradients and parameters take 1 s each.
    update = HostUpdate(7 * size / 4)
    rests = 8 * size
    box = a_box(1, size, rests - 2 * size + 110, host=HOST, update=update)
    plan = plan_data_parallel(model, box, 1)
    residence = plan.replicas.residence
    assert residence == Residence(states=1)
    assert residence.in_words(2) == "on the host states of 1 of 2 units"
    # Forwards to 2 s, backwards to 6 s, gradients down to 7, updated by 11, back at 12 s.
    assert plan.step.seconds == pytest.approx(12)
    assert plan.peak_bytes == 6 * size + 60 + 40 + 10
    moved = plan.step.moved_bytes
    assert moved[Does.STORE] == moved[Does.FETCH] == size


def test_a_rank_has_its_share_of_the_host() -> None:
    box = a_box(
        2, 8.0, host=replace(HOST, capacity_bytes=10, bytes_per_s=16.0), update=HostUpdate(6.0)
    )
    (rank,) = machines_by_kind(box).values()
    assert (rank.host.capacity_bytes, rank.host.bytes_per_s) == (5, 8.0)
    assert beside_copies(rank.host_update) == 3.0
    # Two devices copy both ways at once, each at a quarter of the host's memory.
    assert rank.h2d.bytes_per_s == rank.d2h.bytes_per_s == 4.0


def test_sharded_parameters_come_through_the_host_where_they_do_not_fit() -> None:
    size = BUCKET_BYTES
    model = a_model([size] * 8, per_sample(KEPT))
    small = a_box(2, 10.0 * size, 8 * size, host=HOST)
    plan = plan_data_parallel(model, small, 2, SHARD)
    assert plan.missing_bytes == 0
    assert plan.replicas.residence.states
    roomy = plan_data_parallel(model, a_box(2, 10.0 * size), 2, SHARD)
    assert roomy.replicas.residence == ON_DEVICE
    assert roomy.step.seconds <= plan.step.seconds
