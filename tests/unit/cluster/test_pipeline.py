"""Pipelines from a profile: time and peaks by hand, what holds always, what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from cotrain_compile.cluster.model.profiles import (
    BATCH,
    Layer,
    LayerProfile,
    Read,
    constant,
    per_sample,
)
from cotrain_compile.cluster.pipeline.cuts import PipelineDevices, PipelineOrder, devices_of
from cotrain_compile.cluster.pipeline.pipeline import (
    PipelinePlan,
    layer_peaks,
    options_of,
    plan_pipeline,
)
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.sources.profile_files import read_profile
from cotrain_compile.cluster.steps.rank_memory import Residence
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import HostUpdate, Machine, Network
from tests.support.clusters import HOST, a_machine

BERT_LARGE = Path(__file__).parents[2] / "data" / "harmony_bert_large.json"


def a_layer(name: str, source: str) -> Layer:
    """One second forward, two backward; 40 bytes rest, 10 a sample enter, 30 are kept."""
    return Layer(
        name=name,
        op="layer",
        reads=(Read(source, per_sample(10)),),
        forward_s=per_sample(1.0),
        backward_s=per_sample(2.0),
        param_bytes=10,
        grad_bytes=10,
        state_bytes=20,
        backward_peak_bytes=per_sample(70),
        kept_bytes=per_sample(30),
    )


MODEL = LayerProfile(
    "small",
    tuple(a_layer(f"layers.{i}", f"layers.{i - 1}" if i else BATCH) for i in range(6)),
)


def a_row(
    count: int, capacity_bytes: int, hop_s: float = 0.0, host: Machine | None = None
) -> PipelineDevices:
    """Devices of one machine, each a rank with what `host` has beside its device."""
    device = replace((host or a_machine()).device, capacity_bytes=capacity_bytes)
    machine = (host or a_machine()).but(device=device, network=Network(1e15, hop_s))
    return PipelineDevices((machine,) * count, hosts=((0, 0),) * count if host else ())


def a_host(capacity_bytes: int, bytes_per_s: float) -> Machine:
    host = replace(HOST, capacity_bytes=capacity_bytes, bytes_per_s=bytes_per_s)
    return a_machine(bytes_per_s=bytes_per_s, host=host, update=HostUpdate(bytes_per_s))


def most_kept(plan: PipelinePlan, stage: int) -> int:
    """Of how many micro-batches a stage has on its device what it keeps, by the timeline."""
    spans = {span.name: span for span in plan.step.timeline.spans}
    changes: list[tuple[float, int]] = []
    for i in range(plan.micro_batches):
        begun_s = spans[f"forward {i} of stage {stage}"].start_s
        done_s = spans[f"backward {i} of stage {stage}"].end_s
        if plan.residence[stage].kept:
            changes += [(begun_s, 1), (spans[f"kept {i} of stage {stage}"].end_s, -1)]
            begun_s = spans[f"kept {i} back to stage {stage}"].start_s
        changes += [(begun_s, 1), (done_s, -1)]
    return max(accumulate(change for _, change in sorted(changes)))


@pytest.mark.parametrize("order", PipelineOrder)
def test_a_step_takes_a_turn_for_each_micro_batch_and_each_further_stage(
    order: PipelineOrder,
) -> None:
    plan = plan_pipeline(MODEL, [a_row(3, 10_000)], order, 8)
    assert (plan.micro_batch, plan.micro_batches, plan.recompute) == (1, 8, False)
    assert plan.cut.split_points == ("layers.2", "layers.4")
    assert plan.step.seconds == pytest.approx((8 + 3 - 1) * 2 * (1 + 2))
    assert plan.hop_bytes == (2 * 8 * 10, 2 * 8 * 10)


def test_a_hop_delays_the_first_micro_batch_only() -> None:
    plan = plan_pipeline(MODEL, [a_row(2, 10_000, hop_s=0.5)], PipelineOrder.GPIPE, 6)
    # There and back once; the other micro-batches are sent while stages compute.
    assert plan.step.seconds == pytest.approx((6 + 2 - 1) * 3 * (1 + 2) + 2 * 0.5)


def test_peaks_hold_what_rests_what_is_in_flight_and_the_layer_at_work() -> None:
    row = a_row(3, 10_000)
    alternating = plan_pipeline(MODEL, [row], PipelineOrder.ONE_F_ONE_B, 8)
    # Two layers rest with 40 each and keep 30 for each in flight; the backward takes
    # 70 - 10 - 10 - 30 beside them, and the gradient of its output 10.
    assert alternating.cut.peak_bytes == (80 + 3 * 60 + 30, 80 + 2 * 60 + 30, 80 + 60 + 30)
    gpipe = plan_pipeline(MODEL, [row], PipelineOrder.GPIPE, 8)
    assert gpipe.cut.peak_bytes == (80 + 8 * 60 + 30,) * 3


def test_layers_run_again_where_what_they_keep_does_not_fit() -> None:
    plan = plan_pipeline(MODEL, [a_row(3, 400)], PipelineOrder.GPIPE, 8)
    assert plan.recompute
    assert max(plan.cut.peak_bytes) <= 400
    # Two layers rest with 80 and hold inputs of eight; at work are 60, and the last stage, which
    # runs them once, keeps what they make.
    assert plan.cut.peak_bytes == (80 + 8 * 20 + 60, 80 + 8 * 20 + 60, 80 + 8 * 20 + 60 + 40)
    # Eight forwards and one more, the last stage once, eight backwards and one more.
    assert plan.step.seconds == pytest.approx((8 + 1) * 2 + 2 * (1 + 2) + (8 + 1) * 2 * (1 + 2))
    # 1F1B holds fewer at once, and nothing has to run again.
    assert not plan_pipeline(MODEL, [a_row(3, 400)], PipelineOrder.ONE_F_ONE_B, 8).recompute


def test_the_search_misses_nothing_by_its_bounds_and_knows_slower_devices() -> None:
    rows = [replace(a_row(n, 10**6, 0.25), kinds=("slow", "fast", "fast")[:n]) for n in (3, 2, 1)]
    model = replace(MODEL, slowness={"slow": 3.0, "fast": 1.0})
    for order in PipelineOrder:
        best = plan_pipeline(model, rows, order, 8)
        plans = [p for option in options_of(model, rows, order, 8) for p in option.plans()]
        assert len(plans) > 20
        assert best.step.seconds == min(plan.step.seconds for plan in plans)
        for plan in plans:  # nothing is exchanged, or on hosts
            assert plan.least_s <= plan.closer_s <= plan.step.seconds
            assert plan.closer_s == pytest.approx(plan.step.seconds)
        # The slow device has the smallest stage.
        first, *others = [b - a for a, b in pairwise(best.cut.bounds)]
        assert first < max(others)
        alike = plan_pipeline(replace(model, slowness={}), rows[:1], order, 8)
        assert alike.step.seconds < best.step.seconds < 3 * alike.step.seconds


@pytest.mark.parametrize("seconds", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("order", PipelineOrder)
def test_what_does_not_fit_rests_on_the_host_and_no_timing_passes_the_peak(
    order: PipelineOrder, seconds: float
) -> None:
    # Two layers rest with 80, keep 60 for each in flight, and take 30 at work.
    host = a_host(10_000, 60 / seconds)
    # 1F1B has three in flight at most, so that states alone are offloaded.
    cases = [(200, True)]
    if order is PipelineOrder.GPIPE:
        cases = [(80 + 3 * 60 + 30, False), (40 + 3 * 60 + 30, True)]
    for capacity, states in cases:
        row = a_row(3, capacity, host=host)
        plans = [
            plan
            for option in options_of(MODEL, [row], order, 8)
            for plan in option.plans()
            if not plan.recompute and plan.micro_batch == 1
        ]
        assert plans
        for plan in plans:
            assert plan.step.bound_s <= plan.step.seconds
            pairs = zip(plan.residence, plan.cut.peak_bytes, strict=True)
            for stage, (residence, peak) in enumerate(pairs):
                assert peak <= row.capacity_bytes[stage]
                layers = plan.cut.bounds[stage + 1] - plan.cut.bounds[stage]
                rests = 40 * layers - 20 * residence.states
                assert rests + most_kept(plan, stage) * 30 * layers + 30 <= peak
        assert any(each.states for plan in plans for each in plan.residence) >= states


def test_states_on_the_host_are_updated_behind_the_last_backward_by_hand() -> None:
    # Six layers rest with 240, keep 180 and take 30; without one layer's states it fits.
    row = a_row(1, 240 - 20 + 180 + 30, host=a_host(1000, 100.0))
    plan = plan_pipeline(MODEL, [row], PipelineOrder.GPIPE, 1)
    assert plan.residence == (Residence(states=1),)
    # Forward 6, backward 12; gradients of 10 down, 2 * 30 + 10 touched, parameters of 10 up.
    assert plan.step.seconds == pytest.approx(18 + 0.1 + 0.7 + 0.1)
    assert plan.swapped_bytes == (10, 10)
    assert plan.host_bytes == 40
    with pytest.raises(PlacementError, match="take hosts with more memory"):
        plan_pipeline(MODEL, [a_row(3, 150, host=a_host(9, 1.0))], PipelineOrder.GPIPE, 1)


def test_bert_large_on_small_cards_is_within_its_bound_and_its_peaks() -> None:
    profile = read_profile(BERT_LARGE)
    cards = devices_of(find_cluster("4xgtx1080ti"))
    for order in PipelineOrder:
        plan = plan_pipeline(profile, [cards], order, 32)
        assert plan.recompute  # what layers keep was not measured
        assert plan.step.bound_s <= plan.step.seconds
        assert all(
            peak <= capacity
            for peak, capacity in zip(plan.cut.peak_bytes, cards.capacity_bytes, strict=True)
        )
        hop = Network(min(m.network.bytes_per_s for m in cards.machines if m.network) / 8)
        slower = replace(cards, machines=tuple(m.but(network=hop) for m in cards.machines))
        assert plan_pipeline(profile, [slower], order, 32).step.seconds >= plan.step.seconds


def test_machines_of_a_cluster_are_joined_by_their_network_cards() -> None:
    cluster = find_cluster("2x8xa100")
    hops = [machine.network for machine in devices_of(cluster).machines[:-1]]
    nic, peers = cluster.groups[0].nic, cluster.groups[0].peers
    assert nic
    assert peers
    within = [peers.bytes_per_s] * 7
    assert [hop.bytes_per_s for hop in hops if hop] == [*within, nic.bytes_per_s, *within]


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    with pytest.raises(PlacementError, match="needs 100 B more on the fullest device"):
        plan_pipeline(MODEL, [a_row(3, 100)], PipelineOrder.ONE_F_ONE_B, 8)
    with pytest.raises(OptionError, match="at least one sample"):
        plan_pipeline(MODEL, [a_row(3, 100)], PipelineOrder.GPIPE, 0)
    with pytest.raises(OptionError, match="each with a network to the next"):
        PipelineDevices((a_machine(),) * 2)
    head = replace(MODEL.layers[-1], reads=(*MODEL.layers[-1].reads, Read(BATCH, constant(1))))
    with pytest.raises(OptionError, match="small has branches"):
        layer_peaks(replace(MODEL, layers=(*MODEL.layers[:-1], head)), 1, recompute=True)
