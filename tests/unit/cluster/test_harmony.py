"""Harmony's planner: the authors' published estimate, a step by hand, and what holds always."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain_compile.cluster.cluster_presets import find_cluster
from cotrain_compile.cluster.harmony import (
    CapOf,
    HarmonyPlan,
    harmony_choices,
    plan_harmony,
    simulate_choice,
)
from cotrain_compile.cluster.harmony_lanes import Content, Lanes, Server, Stream, Works
from cotrain_compile.cluster.harmony_packs import (
    Pack,
    PackCosts,
    balanced,
    filled_from_the_back,
)
from cotrain_compile.cluster.harmony_server import server_of
from cotrain_compile.cluster.harmony_tasks import (
    HarmonyChoice,
    Layout,
    made_by,
    micro_batches,
    task_graph,
)
from cotrain_compile.cluster.harmony_works import harmony_works
from cotrain_compile.cluster.profile_files import read_profile
from cotrain_compile.cluster.profiles import (
    BATCH,
    Layer,
    LayerProfile,
    Read,
    chain,
    constant,
    per_sample,
)
from cotrain_compile.errors import OptionError, PlacementError, PlanError

MIB = 2**20
BERT_LARGE = Path(__file__).parents[2] / "data" / "harmony_bert_large.json"


@pytest.fixture(scope="module")
def bert_large() -> LayerProfile:
    return read_profile(BERT_LARGE)


def profile_of(layers: Sequence[Layer]) -> LayerProfile:
    reads = chain([layer.reads[0].nbytes for layer in layers], [layer.name for layer in layers])
    return LayerProfile(
        "small",
        tuple(replace(layer, reads=read) for layer, read in zip(layers, reads, strict=True)),
    )


def a_layer(name: str, *, weights: int = 20, peak: float = 30, entering: float = 10) -> Layer:
    return Layer(
        name=name,
        op="layer",
        reads=(Read(BATCH, per_sample(entering)),),
        forward_s=per_sample(1.0),
        backward_s=per_sample(2.0),
        param_bytes=weights,
        grad_bytes=weights,
        host_update_s=3.0,
        forward_peak_bytes=constant(peak),
        backward_peak_bytes=constant(2 * peak),
    )


@pytest.mark.parametrize(("layout", "key"), [("harmony-dp", "vDP"), ("harmony-pp", "vPP")])
def test_the_authors_estimate_for_bert_large_is_reproduced(
    bert_large: LayerProfile, layout: str, key: str
) -> None:
    published = json.loads(BERT_LARGE.read_text())["published_D32_N2"][key]
    plan = plan_harmony(bert_large, Server(devices=2), Layout(layout), 32, cap_of=CapOf.PACK)
    assert plan.step_s == pytest.approx(published["est_s"], rel=1e-3)
    assert max(plan.peak_bytes) / MIB == pytest.approx(published["peak_MB"], abs=1)
    choice = plan.choice
    assert choice.forward_samples == published["u_fwd"]
    assert choice.backward_samples == published["u_bwd"]
    assert len(choice.forward_packs) == published["n_pack_fwd"]
    assert len(choice.backward_packs) == published["n_pack_bwd"]


def test_the_cap_on_whole_tasks_holds_where_that_on_packs_does_not(
    bert_large: LayerProfile,
) -> None:
    server = Server(devices=2)
    by_pack = plan_harmony(bert_large, server, Layout.DATA_PARALLEL, 32, cap_of=CapOf.PACK)
    by_task = plan_harmony(bert_large, server, Layout.DATA_PARALLEL, 32)
    assert max(by_pack.peak_bytes) > server.cap_bytes >= max(by_task.peak_bytes)


# One device, swaps at 10 bytes a second: weights take 2 s, what is between layers 1 s.
ONE_DEVICE = Server(1, cap_bytes=1000, swap_bytes_per_s=10, deletion_s=1)
TWO_PACKS = HarmonyChoice(1, (Pack(0, 1),), 1, (Pack(0, 1), Pack(1, 2)))


def ends(plan: HarmonyPlan) -> dict[str, float]:
    return {span.name: span.end_s for span in plan.timeline.spans}


def test_a_step_by_hand() -> None:
    costs = PackCosts(profile_of([a_layer("a"), a_layer("b")]))
    plan = simulate_choice(costs, ONE_DEVICE, Layout.PIPELINE, TWO_PACKS, 1)
    # Weights 2, input 3, input to the host 4, forward 5, output to the host 6, deletion 7.
    assert ends(plan)["forward 0-0: deletion"] == 7
    # Weights 9, input 10, forward 11, backward 13, its gradient out 14, gradients out 16.
    assert ends(plan)["backward 1-1: gradients"] == 16
    assert ends(plan)["update 1-1"] == 19
    # Deletion 17, weights 19, input 20, forward 21, gradient in 22, backward 24, gradients 26.
    assert plan.step_s == ends(plan)["update 0-0"] == 29


def test_with_prefetch_copies_come_while_the_task_before_computes() -> None:
    costs = PackCosts(profile_of([a_layer("a"), a_layer("b")]))
    plan = simulate_choice(costs, ONE_DEVICE, Layout.PIPELINE, TWO_PACKS, 1, prefetch=True)
    # Forward 4, output 5, the loss's input 6, weights 8, backward 11, its gradient out 12.
    assert ends(plan)["backward 1-1: gradient of input, micro-batch 0"] == 12
    # Gradient in 13, weights 15, forward 16, backward 18, gradients 20.
    assert plan.step_s == ends(plan)["update 0-0"] == 23


def test_weights_cross_the_link_once_a_task_however_many_micro_batches_there_are() -> None:
    costs = PackCosts(profile_of([a_layer("a"), a_layer("b")]))
    plans = [
        simulate_choice(costs, ONE_DEVICE, Layout.PIPELINE, TWO_PACKS, samples)
        for samples in (1, 8)
    ]
    assert [plan.moved_bytes[Stream.SWAP_IN, Content.WEIGHTS] for plan in plans] == [60, 60]
    activations = [plan.moved_bytes[Stream.SWAP_OUT, Content.ACTIVATIONS] for plan in plans]
    assert activations == [30, 240]  # the input of a pack, its output, one gradient


def test_micro_batches_of_another_size_are_handed_over_by_the_host() -> None:
    costs = PackCosts(profile_of([a_layer("a"), a_layer("b")]))
    # Shared by two: 10 bytes a second each; messages read and write host memory, at 10 in all.
    server = Server(2, swap_bytes_per_s=20, message_bytes_per_s=40, deletion_s=1)
    choice = replace(TWO_PACKS, forward_samples=2)
    plan = simulate_choice(costs, server, Layout.PIPELINE, choice, 2)
    # Weights 2, input 4, input to the host 6, forward 8, output 10, handed over 11 and 12.
    assert ends(plan)["forward 0-0: message of output, micro-batch 1"] == 12
    assert ends(plan)["backward 1-1: input, micro-batch 0"] == 12
    assert ends(plan)["backward 1-1: backward, micro-batch 0"] == 15
    # The input that waits for the backward of the same device is not handed over.
    assert plan.moved_bytes[Stream.HOST, Content.ACTIVATIONS] == 20
    assert plan.moved_bytes[Stream.PEER_OUT, Content.ACTIVATIONS] == 20  # two gradients


def a_random_model(rng: random.Random) -> LayerProfile:
    return profile_of(
        [
            a_layer(
                f"layer{i}",
                weights=rng.randint(0, 40),
                peak=rng.randint(40, 80),
                entering=rng.randint(1, 5),
            )
            for i in range(rng.randint(2, 8))
        ]
    )


def test_what_holds_for_every_model_server_and_layout() -> None:
    rng = random.Random(27)
    for _ in range(15):
        model = a_random_model(rng)
        samples = rng.choice((4, 6, 8))
        server = Server(
            rng.randint(1, 4),
            cap_bytes=rng.randint(220, 900),
            swap_bytes_per_s=rng.uniform(5, 100),
            peer_bytes_per_s=rng.uniform(5, 100),
            message_bytes_per_s=rng.uniform(5, 100),
            deletion_s=0.5,
        )
        for prefetch in (False, True):
            both = {
                layout: plan_harmony(model, server, layout, samples, prefetch=prefetch)
                for layout in Layout
            }
            for layout, plan in both.items():
                copies = server.devices if layout is Layout.DATA_PARALLEL else 1
                last = PackCosts(model).weight_bytes(plan.choice.backward_packs[-1])
                assert plan.weight_traffic_bytes == copies * (3 * model.param_bytes - last)
                assert plan.step_s >= plan.bound_s - 1e-9
                # All that the search leaves out by its bound, simulated.
                costs = PackCosts(model)
                for choice in harmony_choices(costs, server, layout, samples, CapOf.TASK):
                    other = simulate_choice(
                        costs, server, layout, choice, samples, prefetch=prefetch
                    )
                    assert other.step_s >= other.bound_s - 1e-9
                    assert other.step_s >= plan.step_s
                assert max(plan.peak_bytes) <= server.cap_bytes
                assert sum(span.name.startswith("update") for span in plan.timeline.spans) == len(
                    plan.choice.backward_packs
                )


def test_a_pipeline_moves_the_weights_once_for_all_devices(bert_large: LayerProfile) -> None:
    server = Server(devices=2)
    shared = {
        layout: plan_harmony(bert_large, server, layout, 32, prefetch=True) for layout in Layout
    }
    pipeline, replicas = shared[Layout.PIPELINE], shared[Layout.DATA_PARALLEL]
    assert pipeline.choice == replicas.choice
    assert 2 * pipeline.weight_traffic_bytes == replicas.weight_traffic_bytes
    assert pipeline.step_s <= replicas.step_s


def test_tasks_that_wait_for_each_other_are_named() -> None:
    costs = PackCosts(profile_of([a_layer("a"), a_layer("b"), a_layer("c")]))
    packs = tuple(Pack(i, i + 1) for i in range(3))
    graph = task_graph(Layout.PIPELINE, HarmonyChoice(1, packs[:2], 1, packs), 2, 2)
    works = harmony_works(graph, costs, Server(2))
    works.require_no_deadlock()
    backward = Works(works.works[::-1], works.lanes, works.moved_bytes)
    with pytest.raises(PlanError, match=r"tasks wait for each other: .*forward"):
        backward.require_no_deadlock()


def test_packings() -> None:
    weights = [1.0, 1.0, 4.0, 1.0, 1.0]

    def fits(pack: Pack) -> bool:
        return sum(weights[pack.first : pack.last]) <= 6

    assert filled_from_the_back(5, fits) == (Pack(0, 2), Pack(2, 5))
    assert filled_from_the_back(5, lambda pack: fits(pack) and pack != Pack(1, 2)) is None
    assert balanced([1.0] * 6, lambda pack: pack.last - pack.first <= 3, 1) == (
        Pack(0, 3),
        Pack(3, 6),
    )
    # A layer with half of the sum leaves a pack beside it empty, however many there are.
    assert balanced(weights, lambda pack: pack.last - pack.first <= 2, 1) is None


def test_micro_batches_of_the_backward_wait_for_all_of_their_samples() -> None:
    assert micro_batches(13, 4) == (4, 4, 4, 1)
    assert made_by((4, 4, 4, 1), (3, 3, 3, 3, 1)) == (0, 1, 2, 2, 3)
    assert made_by((3, 3, 3, 3, 1), (4, 4, 4, 1)) == (1, 2, 3, 4)


def test_the_authors_server_is_a_preset_and_one_device_gets_no_more_than_its_link() -> None:
    server = server_of(find_cluster("4xgtx1080ti").groups[0])
    authors = Server(4)
    assert (server.devices, server.swap_bytes_per_s) == (4, authors.swap_bytes_per_s)
    assert server.peer_bytes_per_s == authors.peer_bytes_per_s
    box = server_of(find_cluster("8xrtx4090").groups[0])
    assert Lanes(box, 1).swap_bytes_per_s == box.link_bytes_per_s < box.swap_bytes_per_s
    assert Lanes(box, 8).swap_bytes_per_s == min(box.link_bytes_per_s, box.swap_bytes_per_s / 8)
    with pytest.raises(OptionError, match="machines of cpu have no devices"):
        server_of(find_cluster("32xv100-16cpu").groups[1])


def test_what_cannot_be_planned_is_refused() -> None:
    model = profile_of([a_layer("a"), a_layer("big", peak=400)])
    with pytest.raises(PlacementError, match="layer big alone needs 840 bytes") as error:
        plan_harmony(model, Server(2, cap_bytes=700), Layout.PIPELINE, 4)
    assert error.value.shortfall_bytes == 140
    with pytest.raises(OptionError, match="1 samples cannot be shared by 2 devices"):
        plan_harmony(model, Server(2), Layout.DATA_PARALLEL, 1)
    twice = replace(model.layers[1], reads=(*model.layers[1].reads, Read(BATCH, constant(1))))
    with pytest.raises(OptionError, match="all above 0"):
        Server(0)
    with pytest.raises(OptionError, match="small has branches"):
        PackCosts(replace(model, layers=(model.layers[0], twice)))
