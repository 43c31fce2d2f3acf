"""Composed strategies: the optimum of their space, within memory, and bytes that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.answer.strategies import answer
from cotrain_compile.cluster.composed.divided import Divided, rank_profile
from cotrain_compile.cluster.composed.mesh import MeshLinks
from cotrain_compile.cluster.composed.search import KINDS, options_of, plan_composed
from cotrain_compile.cluster.data_parallel.step import lanes_s
from cotrain_compile.cluster.model.description import Cluster, MachineGroup
from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.cluster.model.profiles import (
    BUCKET_BYTES,
    Division,
    LayerProfile,
    per_sample,
)
from cotrain_compile.cluster.pipeline.pipeline import PipelinePlan
from cotrain_compile.cluster.steps.stage_step import Does
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import HostUpdate, Network
from tests.support.clusters import HOST, a_device, a_model
from tests.support.examples import examples

SMALL = BUCKET_BYTES // 2


def boxes(
    machines: int, devices: int, near: float, far: float, room: int = 10**15, host: int = 10**15
) -> Cluster:
    """Machines of as many devices, each with a fast ring and one network card."""
    group = MachineGroup(
        "box",
        machines,
        replace(HOST, capacity_bytes=host),
        HostUpdate(1e18),
        (a_device(room, near),) * devices,
        peers=Network(near) if devices > 1 else None,
        nic=Network(far),
    )
    return Cluster("boxes", (group,))


def divisible(params: list[int], seconds: float, crossing: int, experts: bool) -> LayerProfile:
    """A chain of layers whose heads, and experts, four ranks can divide."""
    model = a_model(params, per_sample(30), forward_s=seconds, crossing=crossing)
    tensor = Division(4, seconds=0.8, params=0.9, kept=0.5, exchanged=per_sample(crossing))
    own = Division(4, 0.0, params=0.75, kept=0.0, exchanged=per_sample(2 * crossing))
    layers = [
        replace(each, tensor=tensor, experts=own if experts else None) for each in model.layers
    ]
    return replace(model, layers=tuple(layers), tokens_per_sample=4)


MODELS = st.builds(
    divisible,
    st.lists(st.sampled_from((SMALL, 2 * SMALL)), min_size=2, max_size=4),
    st.floats(0.01, 2.0),
    st.sampled_from((10, SMALL // 8)),
    st.booleans(),
)
CLUSTERS = st.builds(
    boxes,
    st.sampled_from((1, 2)),
    st.sampled_from((2, 4)),
    st.floats(SMALL, SMALL * 100),
    st.floats(SMALL / 4, SMALL * 10),
    st.sampled_from((4 * SMALL, 12 * SMALL, 10**15)),
    st.sampled_from((8, 10**15)),
)


@examples(12)
@given(model=MODELS, cluster=CLUSTERS, kind=st.sampled_from(tuple(KINDS)), samples=st.just(8))
def test_the_search_finds_the_optimum_of_its_space(
    model: LayerProfile, cluster: Cluster, kind: str, samples: int
) -> None:
    """Every option of every layout, all plans simulated, against the search with its bounds."""
    try:
        options = list(options_of(model, cluster, samples, kind))
    except OptionError:
        with pytest.raises(OptionError):
            plan_composed(model, cluster, samples, kind)
        return
    made = [(option, plan) for option in options for plan in option.plans()]
    if not made:
        with pytest.raises(PlacementError):
            plan_composed(model, cluster, samples, kind)
        return
    found = plan_composed(model, cluster, samples, kind)
    least_s = min(plan.step.seconds for _, plan in made)
    assert found.step.seconds == pytest.approx(least_s, rel=1e-8)
    for option, plan in made:
        assert option.least_s <= plan.least_s * (1 + 1e-9) or option.least_s <= plan.step.seconds
        assert plan.step.bound_s <= plan.step.seconds * (1 + 1e-9)
        assert plan.least_s <= plan.closer_s <= plan.step.seconds
        assert KINDS[kind](option.layout)
        assert option.layout.step_samples == samples
        if not isinstance(plan, PipelinePlan):
            assert dict(lanes_s(plan.replicas)) == pytest.approx(dict(plan.step.lanes_s))
    capacities = cluster.capacities_bytes[: found.layout.devices]
    assert len(found.peak_bytes) == found.layout.devices
    for peak, capacity in zip(found.peak_bytes, capacities, strict=True):
        assert peak <= capacity


def test_rings_that_leave_machines_share_their_cards() -> None:
    links = MeshLinks(boxes(2, 4, near=100.0, far=40.0))
    ways = links.ways(Layout(replicate=2, shard=4))
    assert (ways["shard"].network.bytes_per_s, ways["shard"].leaving) == (100.0, 0.0)
    # Four rings of two, each with a quarter of a card.
    assert (ways["replicate"].network.bytes_per_s, ways["replicate"].leaving) == (10.0, 1.0)
    whole = links.ways(Layout(shard=8))["shard"]
    assert (whole.network.bytes_per_s, whole.leaving) == (40.0, 0.25)
    hops = links.hops(Layout(pipeline=4, shard=2))
    assert [hop.network.bytes_per_s for hop in hops] == [100.0, 20.0, 100.0]


def test_a_rank_has_its_part_of_divided_layers() -> None:
    model = divisible([SMALL, SMALL], 1.0, 10, experts=True)
    network = Network(10.0)
    half = rank_profile(model, Divided(2, 1, False, network)).layers[0]
    assert half.param_bytes == pytest.approx(SMALL * 0.55, abs=1)
    # 0.6 of the seconds, and two all-reduces of ten bytes, of which two ranks send as many.
    assert half.forward_s.at(1) == pytest.approx(0.6 + 2 * 10 / 10.0)
    assert half.kept(1) == pytest.approx(30 * 0.75)
    by_tokens = rank_profile(model, Divided(2, 1, True, network)).layers[0]
    assert by_tokens.forward_s.at(1) == pytest.approx(0.5 + 2 * 10 / 10.0)
    assert (by_tokens.kept(1), by_tokens.input_bytes(1)) == (15.0, 5.0)
    experts = rank_profile(model, Divided(1, 4, False, None, network)).layers[0]
    assert experts.param_bytes == pytest.approx(SMALL * (0.25 + 0.75 / 4), abs=1)
    assert experts.experts
    assert experts.experts.params == pytest.approx(0.1875 / 0.4375)
    # Two all-to-alls of twenty bytes, of which a quarter stays.
    assert experts.forward_s.at(1) == pytest.approx(1 + 2 * 15 / 10.0)


def test_hsdp_scatters_in_machines_and_sums_between_them() -> None:
    model = divisible([2 * SMALL] * 3, 0.1, 10, experts=False)
    found = plan_composed(model, boxes(2, 2, SMALL * 50.0, SMALL * 1.0), 8, "hsdp")
    assert str(found.layout) == "replicate 2 x shard 2"
    grads = model.grad_bytes
    moved, count = found.step.moved_bytes, found.layout.micro_batches
    assert moved[Does.SCATTER] == count * grads / 2
    assert moved[Does.SUM] == count * grads / 2  # of a half, once there and back
    traffic = found.traffic()
    assert traffic["between machines"] == 4 * moved[Does.SUM]
    near = moved[Does.SCATTER] + moved[Does.GATHER]
    assert traffic["between devices of a machine"] == 4 * near


def test_what_no_layout_can_be_says_why() -> None:
    plain = a_model([SMALL, SMALL], per_sample(30))
    cluster = boxes(1, 4, SMALL, SMALL)
    with pytest.raises(OptionError, match="no experts that ranks could divide"):
        plan_composed(plain, cluster, 8, "experts")
    with pytest.raises(OptionError, match="nobody knows which ops"):
        plan_composed(plain, cluster, 8, "tensor")
    with pytest.raises(PlacementError, match="no layout of this kind fits") as error:
        plan_composed(plain, boxes(1, 4, SMALL, SMALL, SMALL // 8, 8), 8, "hsdp")
    assert error.value.shortfall_bytes > 0


def test_rows_are_named_by_their_layout_and_say_what_runs_them() -> None:
    """Where the way between machines is slow and layers keep much, tensors are divided in them."""
    model = divisible([2 * SMALL] * 4, 1.0, 10, experts=True)
    found = answer(model, boxes(2, 4, SMALL * 100.0, SMALL * 1.0, 14 * SMALL), 8, tuple(KINDS))
    assert all(one.fits for one in found.strategies)
    for one in found.strategies:
        assert one.layout
        assert one.name == str(one.layout)
        assert one.devices == one.layout.devices
        assert (one.stages is None) == (one.layout.pipeline == 1)
        planned = bool(one.layout.not_executed)
        assert one.run.startswith("planned and not executed") == planned
        assert planned or f'cotrain_compile.scale, strategy="{one.name}"' in one.run
        assert one.traffic["between devices of a machine"] > 0
