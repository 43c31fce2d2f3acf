"""Stages in turn: a step by hand, what it moves, and what of it a pipeline takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.cluster.harmony_lanes import Server
from cotrain_compile.cluster.harmony_packs import PackCosts, cut_at_shares
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.stages_in_turn import Draft, plan_stages_in_turn, simulated
from cotrain_compile.cluster.strategies import answer
from cotrain_compile.errors import OptionError, PlacementError
from tests.support.clusters import a_box, a_model

FREE = Server(2, 10**9, swap_bytes_per_s=1e18, peer_bytes_per_s=1e18)


def four_layers(nbytes: int = 100) -> LayerProfile:
    """A second forward and two backward for each sample."""
    return a_model([nbytes] * 4, None)


def draft(profile: LayerProfile, server: Server, micro_batches: int = 2) -> Draft:
    packs = cut_at_shares([1.0] * 4, 4)
    assert packs is not None
    return Draft(PackCosts(profile), server, packs, 1, micro_batches)


def test_a_step_takes_what_it_does_by_hand() -> None:
    """Where copies take no time: each number below is the end of a turn on its device.

    device 0: stage 0 forward 1, 2; stage 2 forward 3, 4; backward 12, 15; stage 0 backward 18, 21
    device 1: stage 1 forward 2, 3; stage 3 with its loss and backward 6, 9; stage 1 15, 18
    """
    plan = simulated(draft(four_layers(), FREE))
    assert plan.step_s == pytest.approx(21)
    assert plan.bound_s <= plan.step_s
    ends = {span.name: span.end_s for span in plan.timeline.spans}
    assert ends["forward 1 of stage 3"] == pytest.approx(9)
    assert ends["backward 0 of stage 1"] == pytest.approx(18)


def test_parameters_come_twice_at_most_and_take_their_time() -> None:
    profile = four_layers()
    plan = simulated(draft(profile, FREE))
    assert plan.moved_bytes == {
        "host to devices": 2 * 400 - 200,  # stages 2 and 3 stay from forward to backward
        "devices to host": 400,
        "between devices of a machine": 2 * 2 * 3 * 10,
    }
    slow = replace(FREE, swap_bytes_per_s=200.0)  # a second for each stage on each of two devices
    # Forwards are at 3, 5, 7, with the loss at 13. Stages 3 and 2 are there; device 0 runs stage 2
    # until 19 and sends its gradients until 20; stage 1 comes at 17, stage 0 at 21 and goes at 28.
    assert simulated(draft(profile, slow)).step_s == pytest.approx(28)


def test_what_does_not_fit_is_told_and_smaller_stages_are_found() -> None:
    profile = four_layers(10**6)
    one_each = replace(FREE, cap_bytes=2 * 10**6 + 1000)
    assert len(plan_stages_in_turn(profile, one_each, 2).packs) == 4
    with pytest.raises(PlacementError, match="smallest stages need") as caught:
        plan_stages_in_turn(profile, replace(FREE, cap_bytes=2 * 10**6), 2)
    assert caught.value.shortfall_bytes == 70 + 10 + 2 * 2 * 3 * 10  # at work, entering, held
    with pytest.raises(OptionError, match="take fewer devices"):
        plan_stages_in_turn(profile, replace(FREE, devices=5), 2)


def test_no_number_of_stages_is_faster() -> None:
    """Of layers that are dear in turn, where to fetch them takes as long as to run them."""
    profile = a_model([100, 300] * 4, None)
    server = replace(FREE, cap_bytes=2100, swap_bytes_per_s=200.0)
    tried = [
        simulated(one).step_s
        for each in (1, 2, 4)
        for count in (2, 4, 6, 8)
        for weights in ([1.0] * 8, [1.0, 3.0] * 4)
        if (packs := cut_at_shares(weights, count))
        and max((one := Draft(PackCosts(profile), server, packs, each, 4 // each)).peak_bytes)
        <= server.cap_bytes
    ]
    found = plan_stages_in_turn(profile, server, 4)
    assert found.step_s <= min(tried)
    assert found.bound_s <= found.step_s == pytest.approx(found.timeline.makespan_s)


def test_the_answer_has_the_stages_that_a_pipeline_takes() -> None:
    (found,) = answer(four_layers(10**6), a_box(2, 1e9, 2_100_000), 4, ("harmony-pp",)).strategies
    assert found.stages is not None
    assert found.stages.swapped
    assert found.stages.schedule == "LoopedBFS"
    assert found.stages.split_points == ("layers.1", "layers.2", "layers.3")
    assert found.stages.samples == 4
    assert found.stages.peak_bytes == found.peak_bytes
