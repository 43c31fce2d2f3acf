"""Swapped replicas: a step by hand, what holds always, packings, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cotrain_compile.cluster.model.machines import swapping_machine
from cotrain_compile.cluster.model.profiles import (
    BATCH,
    Layer,
    LayerProfile,
    Read,
    chain,
    constant,
    per_sample,
)
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.steps.stage_step import Does
from cotrain_compile.cluster.swapped.packs import Pack, PackCosts, balanced, filled_from_the_back
from cotrain_compile.cluster.swapped.replicas import (
    SwappedReplicas,
    choices_of,
    equal_micro_batches,
    plan_swapped_replicas,
)
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.machine import Network
from tests.support.clusters import a_machine


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


def two_packs(devices: int = 1, micro_batches: int = 1) -> SwappedReplicas:
    """Copies at 10 bytes a second: weights take 2 s, what is between layers 1 s."""
    costs = PackCosts(profile_of([a_layer("a"), a_layer("b")]))
    machine = a_machine(1000, 10.0, Network(5.0))
    packs = (Pack(0, 1), Pack(1, 2))
    return SwappedReplicas(costs, machine, devices, 1, micro_batches, packs[:1], packs)


def test_a_step_by_hand() -> None:
    step = two_packs().step
    ends = {span.name: span.end_s for span in step.timeline.spans}
    # Weights 2, input 3, input to the host 4, forward 5, output to the host 6.
    assert ends["forward 0-0: output, micro-batch 0"] == 6
    # Weights 8, input 9, forward 10, backward 12, its gradient out 13, gradients out 15.
    assert ends["backward 1-1: gradients"] == 15
    assert ends["update 1-1"] == 18
    # Weights 17, input 18, forward 19, gradient in 20, backward 22, gradients 24.
    assert step.seconds == ends["update 0-0"] == 27
    assert step.bound_s == 27


def test_replicas_sum_the_gradients_of_a_pack_before_they_go_home() -> None:
    # Of two devices each sends 20 bytes of a pack's gradients at 5 a second, twice.
    assert two_packs(devices=2).step.seconds == 27 + 2 * 4
    assert two_packs(devices=2).step.moved_bytes[Does.SUM] == 2 * 20


def test_weights_cross_the_link_once_a_pack_however_many_micro_batches_there_are() -> None:
    for count in (1, 8):
        step = two_packs(micro_batches=count).step
        weights = [task.amount for task in step.tasks if task.name.endswith(": weights")]
        assert weights == [20, 20, 20]
        # The input of a pack, its output and one gradient go out, with the gradients of weights.
        assert step.moved_bytes[Does.STORE] == count * 30 + 40
        assert step.moved_bytes[Does.FETCH] == count * 40 + 60


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


def test_what_holds_for_every_model_and_machine() -> None:
    rng = random.Random(27)
    for _ in range(15):
        model, samples, devices = a_random_model(rng), rng.choice((4, 6, 8)), rng.randint(1, 4)
        capacity = rng.randint(220, 900)
        machine = a_machine(capacity, rng.uniform(5, 100), Network(rng.uniform(5, 100)))
        best = plan_swapped_replicas(model, machine, devices, samples)
        assert max(best.peak_bytes) <= capacity
        updates = [task.name for task in best.step.tasks if task.name.startswith("update")]
        assert len(updates) == len(best.backward)
        # All that the search leaves out by its bound, simulated.
        for plan in choices_of(PackCosts(model), machine, devices, samples):
            step = plan.step
            assert plan.least_s <= step.seconds >= best.step.seconds
            assert step.bound_s <= step.seconds * (1 + 1e-9)
            # A device computes, copies and exchanges one after the other, and never waits.
            busy_s = sum(step.task_s(task) for task in step.tasks if "update" not in task.name)
            ends = [span.end_s for span in step.timeline.spans if "update" not in span.name]
            assert max(ends) == pytest.approx(busy_s)


def test_packs_that_are_given_are_those_of_the_plan() -> None:
    model = a_random_model(random.Random(27))
    machine = a_machine(900, 50.0, Network(50.0))
    count = len(model.layers)
    backward = tuple(Pack(i, i + 1) for i in range(count))
    packs = (backward[:-1], backward)
    found = plan_swapped_replicas(model, machine, 2, 4, packs)
    assert (found.forward, found.backward) == packs
    assert found.step.seconds >= plan_swapped_replicas(model, machine, 2, 4).step.seconds
    with pytest.raises(OptionError, match="packs are stretches of layers"):
        plan_swapped_replicas(model, machine, 2, 4, (backward, backward))
    with pytest.raises(PlacementError, match="these packs need"):
        plan_swapped_replicas(model, a_machine(20, 50.0, Network(50.0)), 2, 4, packs)


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


def test_the_way_to_the_host_is_shared_and_no_device_gets_more_than_its_link() -> None:
    # The authors' server (Harmony, VLDB 2022): 11.5 GiB/s to the host, 8.2 between devices.
    (authors,) = find_cluster("4xgtx1080ti").groups
    machine = swapping_machine(authors)
    assert machine.h2d.bytes_per_s == machine.d2h.bytes_per_s == 11.5 * 2**30 / 4
    assert machine.network == Network(8.2 * 2**30)
    (box,) = find_cluster("8xrtx4090").groups
    assert swapping_machine(box).h2d.bytes_per_s == box.host.bytes_per_s / 2 / 8
    alone = replace(box, devices=(replace(box.devices[0], count=1),), switches=(), peers=None)
    assert swapping_machine(alone).h2d.bytes_per_s == alone.each[0].h2d.bytes_per_s
    with pytest.raises(OptionError, match="machines of cpu have no devices"):
        swapping_machine(find_cluster("32xv100-16cpu").groups[1])


def test_micro_batches_divide_the_samples_of_every_device() -> None:
    assert equal_micro_batches(8, 2) == (1, 2, 4)
    assert equal_micro_batches(9, 2) == (1,)  # 4 on one, 5 on the other


def test_what_cannot_be_planned_is_refused() -> None:
    model, machine = profile_of([a_layer("a"), a_layer("big", peak=400)]), a_machine(700)
    with pytest.raises(PlacementError, match="layer big alone needs 840 bytes") as error:
        plan_swapped_replicas(model, machine, 2, 4)
    assert error.value.shortfall_bytes == 140
    with pytest.raises(OptionError, match="1 samples cannot be shared by 2 devices"):
        plan_swapped_replicas(model, machine, 2, 1)
    twice = replace(model.layers[1], reads=(*model.layers[1].reads, Read(BATCH, constant(1))))
    with pytest.raises(OptionError, match="small has branches"):
        PackCosts(replace(model, layers=(model.layers[0], twice)))
