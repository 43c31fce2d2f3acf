"""One answer: every strategy is in it, ranked, within its bound and what devices have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.cluster.answer.strategies import STRATEGIES, answer
from cotrain_compile.cluster.model.description import Cluster
from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.cluster.model.profiles import (
    BATCH,
    BUCKET_BYTES,
    LayerProfile,
    Read,
    per_sample,
)
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.sources.profile_files import read_profile
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import TierSpec
from tests.support.clusters import SMALL_HOST, a_box, a_device, a_mixed_box, a_model, some_machines
from tests.support.examples import examples

DATA = Path(__file__).parents[2] / "data"
SMALL = BUCKET_BYTES // 2


@st.composite
def models(draw: st.DrawFn) -> LayerProfile:
    params = draw(st.lists(st.sampled_from((0, SMALL, 2 * SMALL)), min_size=2, max_size=3))
    kept = draw(st.sampled_from((None, per_sample(30))))
    seconds = draw(st.floats(0.01, 2.0))
    return a_model(params, kept, forward_s=seconds, crossing=SMALL // 8)


def told_truly(found: Answer, cluster: Cluster) -> None:
    """What holds of every answer."""
    composed = [one.name for one in found.strategies if one.name == str(one.layout)]
    unnamed = len(STRATEGIES) - len(composed)
    assert len({one.name for one in found.strategies} & {*STRATEGIES, *composed}) == len(STRATEGIES)
    assert len({one.name for one in found.strategies} & set(STRATEGIES)) == unnamed
    for one in found.strategies:
        if one.step_s is None:
            assert one.reason
            continue
        assert one.bound_s is not None
        assert one.bound_s <= one.step_s * (1 + 1e-9)
        assert one.timeline is not None
        assert one.timeline.makespan_s == pytest.approx(one.step_s)
        assert not Counter(one.capacities_bytes) - Counter(cluster.capacities_bytes)
        if one.fits:
            assert one.peak_bytes is not None
            caps = zip(one.peak_bytes, one.capacities_bytes, strict=True)
            assert len(one.peak_bytes) == one.devices
            assert all(peak <= capacity for peak, capacity in caps)
    assert found.memory
    if found.memory.limit:
        assert not any(one.fits for one in found.strategies)
    doubted = found.best is None and any(one.fits is False for one in found.strategies)
    assert bool(found.why_none) == doubted
    ready = [one.step_s for one in found.strategies if one.step_s is not None and one.fits]
    assert ready == sorted(ready)


@settings(max_examples=30, deadline=None)
@given(
    model=models(),
    made=st.sampled_from((a_box, a_mixed_box, some_machines)),
    count=st.integers(1, 3),
    rate=st.floats(SMALL / 4, SMALL * 100),
    room=st.sampled_from((3, 20, 1000)),
    host=st.sampled_from((8, 40 * SMALL, 10**15)),
    samples=st.sampled_from((4, 6)),
)
def test_more_devices_or_bandwidth_never_make_the_best_slower(
    model: LayerProfile,
    made: Callable[..., Cluster],
    count: int,
    rate: float,
    room: int,
    host: int,
    samples: int,
) -> None:
    tier = TierSpec(host, 1e18, {"float32": 1e15})
    sizes = ((count, rate), (count + 1, rate), (count, 2 * rate))
    clusters = [made(n, per_s, room * SMALL, host=tier) for n, per_s in sizes]
    answers = [answer(model, cluster, samples) for cluster in clusters]
    for found, cluster in zip(answers, clusters, strict=True):
        told_truly(found, cluster)
    best = answers[0].best
    if best and best.step_s is not None:
        for other in answers[1:]:
            assert other.best
            assert other.best.step_s is not None
            assert other.best.step_s <= best.step_s * (1 + 1e-9)


@examples(8)
@given(model=models(), order=st.permutations(range(3)), samples=st.sampled_from((4, 6)))
def test_the_order_of_groups_in_a_file_changes_no_figure(
    model: LayerProfile, order: list[int], samples: int
) -> None:
    """Two kinds of cards, and machines without any."""
    small, large = (some_machines(2, SMALL * 50, room * SMALL).groups[0] for room in (8, 20))
    cpu = some_machines(1, SMALL * 50).groups[1]
    groups = (replace(small, name="small"), replace(large, name="large"), cpu)
    told = ("replicate", "shard", "pipeline-1f1b", "harmony-dp", "burst")
    in_file, other = (
        answer(model, Cluster("mixed", tuple(groups[i] for i in places)), samples, told)
        for places in (range(3), order)
    )
    assert other.strategies == in_file.strategies
    counted = "Ranks are counted from the fastest group of machines on: large, small."
    assert counted in in_file.assumed


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_stage_that_only_the_larger_card_holds_is_there(order: str) -> None:
    """Parameters, gradients and states of the first layer take 8, of the second one 4."""
    model = a_model((2 * SMALL, SMALL), per_sample(30), crossing=SMALL // 8)
    cluster = a_mixed_box(2, SMALL * 100, 6 * SMALL)
    found = answer(model, cluster, 4, (f"pipeline-{order}",))
    (one,) = found.strategies
    assert one.capacities_bytes == (12 * SMALL, 6 * SMALL)
    assert one.peak_bytes is not None
    assert one.peak_bytes[0] > 6 * SMALL
    assert all(p <= c for p, c in zip(one.peak_bytes, one.capacities_bytes, strict=True))


def test_bert_large_on_small_cards_has_every_strategy_that_can_be_judged() -> None:
    cluster = find_cluster("4xgtx1080ti")
    found = answer(read_profile(DATA / "harmony_bert_large.json"), cluster, 32)
    told_truly(found, cluster)
    without = [one.name for one in found.strategies if one.step_s is None]
    # One machine needs no helpers, and nobody has said what of these layers ranks could divide.
    assert without == ["byteps", "tensor", "pipeline-tensor", "experts"]
    assert found.best
    assert found.best.name == "shard"
    assert found.best.layout == Layout(shard=4, gathered_again=False, recompute=True, micro_batch=8)
    assert found.best.loses == ""
    assert "torchrun --nproc-per-node 4" in found.best.run
    assert all(one.loses for one in found.strategies[1:])


def test_what_a_profile_does_not_know_is_said_and_not_left_out() -> None:
    profile = read_profile(DATA / "deeppool_wrn101_2_a100.json")
    found = answer(profile, find_cluster("8xh100"), 32)
    by_name = {one.name: one for one in found.strategies}
    assert by_name["replicate"].peak_bytes is None
    assert by_name["replicate"].fits is None
    assert "knows no peaks" in by_name["replicate"].reason
    assert "no forward_peak_bytes" in by_name["harmony-pp"].reason
    assert "knows no peaks" in by_name["hsdp"].reason
    unknown = len(STRATEGIES) - 3
    assert [one.step_s is None for one in found.strategies] == [False] * 3 + [True] * unknown


def test_helpers_are_beside_replicas_with_the_same_computing() -> None:
    model = a_model((2 * SMALL, 2 * SMALL), per_sample(30))
    cluster = some_machines(4, SMALL / 2)
    found = answer(model, cluster, 4, ("replicate", "byteps"))
    helped, summed = found.strategies
    assert (helped.name, summed.name) == ("byteps", "replicate")
    # BytePS: 4 machines send 4/3 of the gradients each with one helper, which sends as much.
    assert helped.traffic == {
        "network cards of machines with devices": round(4 * 4 / 3 * model.grad_bytes),
        "network cards of CPU machines": round(4 / 3 * model.grad_bytes),
    }
    assert helped.devices == summed.devices == 4


def test_helpers_are_for_machines_of_as_many_devices_each() -> None:
    model = a_model((2 * SMALL, 2 * SMALL), per_sample(30))
    (one, cpu), (box,) = some_machines(2, SMALL / 2).groups, a_box(2, SMALL).groups
    cluster = Cluster("mixed", (one, replace(box, nic=one.nic), cpu))
    (helped,) = answer(model, cluster, 4, ("byteps",)).strategies
    assert helped.step_s is None
    assert "of mixed have not as many devices each" in helped.reason
    two = replace(box, count=2, nic=one.nic)
    (helped,) = answer(model, Cluster("boxes", (two, cpu)), 4, ("byteps",)).strategies
    assert helped.devices == 4
    assert "cpu_helpers(model, 1, devices_a_machine=2)" in helped.run


def test_without_machines_that_help_there_are_no_helpers() -> None:
    model = a_model((2 * SMALL, 2 * SMALL), per_sample(30))
    (cards, _) = some_machines(2, SMALL / 2).groups
    (helped,) = answer(model, Cluster("cards", (cards,)), 4, ("byteps",)).strategies
    assert helped.step_s is None
    assert helped.reason.startswith("cards has no machines without devices, which could help")


def test_branches_leave_only_what_needs_no_chain() -> None:
    model = a_model((2 * SMALL, 2 * SMALL), per_sample(30))
    last = model.layers[-1]
    split = replace(last, reads=(*last.reads, Read(BATCH, per_sample(10))))
    found = answer(replace(model, layers=(model.layers[0], split)), a_box(2, SMALL), 4)
    refused = {one.name: one.reason for one in found.strategies if one.step_s is None}
    branches = {name for name, reason in refused.items() if "has branches" in reason}
    assert {
        "pipeline-gpipe",
        "pipeline-1f1b",
        "pipeline-replicate",
        "pipeline-shard",
        "harmony-pp",
        "burst",
    } <= branches
    # Nothing of these layers can be divided, and two devices are no mesh of two dimensions.
    apart = {"byteps", "hsdp", "tensor", "pipeline-tensor", "experts"}
    assert refused.keys() - branches <= apart
    assert len(refused) == 12


def test_a_strategy_that_does_not_fit_is_behind_those_that_do() -> None:
    model = a_model([2 * SMALL] * 4, per_sample(30))
    found = answer(model, a_box(4, SMALL * 1000, 24 * SMALL, host=SMALL_HOST), 8)
    by_name = {one.name: one for one in found.strategies}
    # 32 half buckets rest on every device of replicas, a quarter of that where they are sharded.
    assert by_name["replicate"].fits is False
    assert "more on the smallest device" in by_name["replicate"].loses
    assert found.best
    assert found.best.fits
    assert found.strategies.index(by_name["replicate"]) > found.strategies.index(found.best)


def test_where_nothing_can_fit_the_answer_says_so_with_figures() -> None:
    """Two layers of 1000 bytes and their gradients, twice that of states, 40 bytes at work."""
    model = a_model((1000, 1000), per_sample(30))
    little = TierSpec(1000, 1e18, {"float32": 1e15})
    found = answer(model, a_box(2, 1e9, 3000, host=little), 4)
    assert found.memory
    assert (found.memory.needs_bytes, found.memory.has_bytes) == (8070, 7000)
    assert found.why_none == (
        "Nothing can fit: small takes 7.9 KiB at least (2.0 KiB of parameters, 2.0 KiB of "
        "gradients, 3.9 KiB of optimizer states, 70 B for a layer at work on one sample), and box "
        "has 6.8 KiB (5.9 KiB on devices, 1000 B on their hosts)."
    )
    assert found.figures()["why_none"] == found.why_none
    assert found.figures()["memory"]["needs_bytes"] == 8070
    narrow = answer(model, a_box(2, 1e9, 2000, host=replace(little, capacity_bytes=10**6)), 4)
    assert "layers.0 of small takes 2.0 KiB at work on one sample" in narrow.why_none


def test_what_fits_all_memory_together_but_no_parts_is_told_apart() -> None:
    """8070 bytes at least; of 8500 two equal parts, or a stage's parameters, are too large."""
    model = a_model((1000, 1000), per_sample(30))
    little = TierSpec(1000, 1e18, {"float32": 1e15})
    (group,) = a_box(2, 1e9, host=little).groups
    devices = (a_device(2200), a_device(5300))
    cluster = Cluster("uneven", (replace(group, devices=devices),))
    found = answer(model, cluster, 4)
    assert found.why_none.startswith("None of these fits, though small takes 7.9 KiB at least")
    told = {one.name: one.reason for one in found.strategies}
    part = "one of 2 equal parts of parameters, gradients and optimizer states is 3.9 KiB"
    assert (
        f"{part}, and the smallest device with its share of the host has 2.6 KiB" in told["shard"]
    )
    assert "a copy of parameters, gradients and optimizer states is 7.8 KiB" in told["replicate"]


def test_unknown_names_are_refused() -> None:
    model = a_model((0, 0), None)
    with pytest.raises(OptionError, match="strategies magic: known are replicate, shard"):
        answer(model, a_box(2, 1e9), 4, ("replicate", "magic"))
    with pytest.raises(OptionError, match="at least one sample"):
        answer(model, a_box(2, 1e9), 0)
