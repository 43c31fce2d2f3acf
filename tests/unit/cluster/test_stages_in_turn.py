"""Stages in turn: a step by hand, what it moves, and what of it a pipeline takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cotrain_compile.cluster.answer.strategies import answer
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.steps.stage_step import Does, StageStep
from cotrain_compile.cluster.swapped.packs import Pack, PackCosts, cut_at_shares
from cotrain_compile.cluster.swapped.turn_step import StagesInTurn, plan_stages_in_turn
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Machine, Network
from tests.support.clusters import a_box, a_machine, a_model

PEERS = Network(1e18)
FREE = a_machine(10**9, 1e18, PEERS)
SLOW = a_machine(10**9, 100.0, PEERS)  # a second for each stage


def four_layers(nbytes: int = 100) -> LayerProfile:
    """A second forward and two backward for each sample."""
    return a_model([nbytes] * 4, None)


def plan_of(
    profile: LayerProfile, machine: Machine, micro_batches: int = 2, *, ahead: bool = False
) -> StagesInTurn:
    """Four stages on two devices."""
    packs = cut_at_shares([1.0] * 4, 4)
    assert packs is not None
    return StagesInTurn(PackCosts(profile), machine, 2, packs, 1, micro_batches, ahead)


def moved(step: StageStep) -> dict[Does, float]:
    return {does: step.moved_bytes[does] for does in (Does.FETCH, Does.STORE, Does.SEND)}


def test_a_step_takes_what_it_does_by_hand() -> None:
    """Where copies take no time: each number below is the end of a turn on its device.

    device 0: stage 0 forward 1, 2; stage 2 forward 3, 4; backward 12, 15; stage 0 backward 18, 21
    device 1: stage 1 forward 2, 3; stage 3 with its loss and backward 6, 9; stage 1 15, 18
    """
    step = plan_of(four_layers(), FREE).step
    assert step.seconds == pytest.approx(21)
    assert step.bound_s <= step.seconds
    ends = {span.name: span.end_s for span in step.timeline.spans}
    assert ends["forward 1 of stage 3"] == pytest.approx(9)
    assert ends["backward 0 of stage 1"] == pytest.approx(18)


def test_parameters_come_twice_at_most_and_take_their_time() -> None:
    profile = four_layers()
    assert moved(plan_of(profile, FREE).step) == {
        Does.FETCH: 2 * 400 - 200,  # stages 2 and 3 visit from forward to backward
        Does.STORE: 400,
        Does.SEND: 2 * 2 * 3 * 10,
    }
    # Forwards are at 3, 5, 7, with the loss at 13. Stages 3 and 2 are there; device 0 runs stage 2
    # until 19, whose first gradient lets stage 3 go at 16 and stage 1 come until 18; the first of
    # stage 1, at 21, lets stage 2 go and stage 0 come until 23. It goes from 29 on.
    assert plan_of(profile, SLOW).step.seconds == pytest.approx(30)


def test_what_is_fetched_ahead_comes_beside_the_stage_before() -> None:
    profile = four_layers()
    ahead, alone = plan_of(profile, SLOW, ahead=True), plan_of(profile, SLOW)
    # All of it is hidden but the first second, and the last.
    assert ahead.step.seconds == pytest.approx(1 + 21 + 1)
    assert moved(ahead.step) == moved(alone.step)
    # The fullest stays: stage 2 backward, beside parameters of stage 0; those of the loss, and of
    # stage 1 backward, beside parameters of stage 1 and gradients of stage 3.
    assert ahead.peak_bytes == (alone.peak_bytes[0] + 100, alone.peak_bytes[1] + 100)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_no_device_ever_holds_more_than_the_plan_says_nor_is_a_step_sooner_done(
    devices: int, ahead: bool
) -> None:
    """Replayed from the spans alone, whatever copies take."""
    for seed in range(8):
        rng = random.Random(seed)
        profile = a_model([rng.randrange(50, 500) for _ in range(6)], None)
        packs = cut_at_shares([1.0] * 6, 6)
        assert packs is not None
        machine = a_machine(10**9, rng.choice((20.0, 400.0, 1e9)), PEERS)
        costs, count = PackCosts(profile), rng.randrange(1, 4)
        found = StagesInTurn(costs, machine, devices, packs, 1, count, ahead)
        assert found.least_s <= found.step.seconds
        for device in range(devices):
            assert most_at_once(found, device) <= found.peak_bytes[device]


def most_at_once(plan: StagesInTurn, device: int) -> float:
    """What enters and leaves, and the most of all else that is there at one time."""
    costs, own = plan.costs, plan.packs_of(device)
    spans = {span.name: span for span in plan.step.timeline.spans}
    parameters: dict[str, tuple[float, float, float]] = {}  # from, to, bytes
    others: list[tuple[float, float, float]] = []
    for visit in plan.visits(device):
        pack = plan.packs[visit.k]
        nbytes, of_turn = costs.weight_bytes(pack), costs.forward_peak_bytes(1, pack)
        turns = [spans[visit.turn(i)] for i in visit.order(plan.micro_batches)]
        came = spans[replace(visit, again=visit.again and visit.k != own[-1]).parameters]
        parameters[came.name] = came.start_s, turns[-1].end_s, nbytes
        if visit.backward:
            of_turn = costs.backward_peak_bytes(1, pack) - nbytes
            others.append((turns[0].start_s, spans[visit.gradients].end_s, nbytes))
        others += [(turn.start_s, turn.end_s, of_turn - nbytes) for turn in turns]
    held = [*parameters.values(), *others]
    inputs = [layer for k in own for layer in (plan.packs[k].first, plan.packs[k].last) if layer]
    ends = 2 * plan.micro_batches * sum(costs.input_bytes(1, layer) for layer in inputs)
    starts = [start_s for start_s, _, _ in held]
    return ends + max(
        sum(nbytes for begin_s, end_s, nbytes in held if begin_s <= at_s < end_s) for at_s in starts
    )


def test_what_does_not_fit_is_told_and_smaller_stages_are_found() -> None:
    profile = four_layers(10**6)
    one_each = a_machine(2 * 10**6 + 1000, 1e18, PEERS)
    assert len(plan_stages_in_turn(profile, one_each, 2, 2).packs) == 4
    with pytest.raises(PlacementError, match="smallest stages need") as caught:
        plan_stages_in_turn(profile, a_machine(2 * 10**6, 1e18, PEERS), 2, 2)
    assert caught.value.shortfall_bytes == 70 + 10 + 2 * 2 * 3 * 10  # at work, entering, held
    with pytest.raises(OptionError, match="take fewer devices"):
        plan_stages_in_turn(profile, FREE, 5, 2)


def test_packs_that_are_given_are_those_of_the_plan() -> None:
    profile = four_layers(10**6)
    packs = (Pack(0, 1), Pack(1, 4))
    found = plan_stages_in_turn(profile, FREE, 2, 2, packs)
    assert found.packs == packs
    assert found.step.seconds >= plan_stages_in_turn(profile, FREE, 2, 2).step.seconds
    for wrong, told in (
        ((Pack(0, 1), Pack(2, 4)), "from 0 to 4, not 0 to 1, 2 to 4"),
        ((Pack(0, 4),), "1 packs cannot be dealt to 2 devices"),
    ):
        with pytest.raises(OptionError, match=told):
            plan_stages_in_turn(profile, FREE, 2, 2, wrong)
    with pytest.raises(PlacementError, match="these packs need"):
        plan_stages_in_turn(profile, a_machine(2 * 10**6 + 1000, 1e18, PEERS), 2, 2, packs)


def test_no_number_of_stages_is_faster() -> None:
    """Of layers that are dear in turn, where to fetch them takes as long as to run them."""
    profile = a_model([100, 300] * 4, None)
    costs = PackCosts(profile)
    machine = a_machine(2100, 100.0, PEERS)
    tried = [
        one.step.seconds
        for each in (1, 2, 4)
        for count in (2, 4, 6, 8)
        for ahead in (False, True)
        for weights in ([1.0] * 8, [1.0, 3.0] * 4)
        if (packs := cut_at_shares(weights, count))
        and max((one := StagesInTurn(costs, machine, 2, packs, each, 4 // each, ahead)).peak_bytes)
        <= 2100
    ]
    step = plan_stages_in_turn(profile, machine, 2, 4).step
    assert step.seconds <= min(tried)
    assert step.bound_s <= step.seconds == step.timeline.makespan_s


@pytest.mark.parametrize(("capacity", "ahead"), [(2_100_000, False), (3_100_000, True)])
def test_the_answer_has_the_stages_that_a_pipeline_takes(capacity: int, ahead: bool) -> None:
    (found,) = answer(four_layers(10**6), a_box(2, 1e9, capacity), 4, ("harmony-pp",)).strategies
    assert found.stages is not None
    assert found.stages.swapped
    assert found.stages.ahead == ahead
    assert found.stages.schedule == "LoopedBFS"
    assert found.stages.split_points == ("layers.1", "layers.2", "layers.3")
    assert found.stages.samples == 4
    with pytest.raises(OptionError, match=r"LoopedBFS .* not Interleaved1F1B"):
        replace(found.stages, schedule="Interleaved1F1B", ahead=True)
    assert found.stages.peak_bytes == found.peak_bytes
