"""Data parallelism from a profile: time, traffic and peaks by hand, and what a subset is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.data_parallel.data_parallel import (
    SHARD,
    plan_data_parallel,
    samples_by_speed,
)
from cotrain_compile.cluster.data_parallel.step import Sharding, lanes_s
from cotrain_compile.cluster.model.description import Cluster, Devices, first_devices
from cotrain_compile.cluster.model.profiles import BUCKET_BYTES, per_sample
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import HostUpdate
from tests.support.clusters import SMALL_HOST, a_box, a_device, a_model
from tests.support.examples import examples

# Two layers that are exchanged one by one. A gather of one takes 1.5 s between two devices.
MODEL = a_model((BUCKET_BYTES, BUCKET_BYTES), per_sample(30))
RATE = BUCKET_BYTES / 3
REST = 8 * BUCKET_BYTES  # parameters, gradients and twice that in states


def test_sums_of_gradients_run_beside_the_backward_and_the_last_behind_it() -> None:
    plan = plan_data_parallel(MODEL, a_box(2, RATE), 2)
    assert (plan.devices, plan.replicas.micro_batch, plan.recompute) == (2, 1, False)
    # Forwards to 2 s, backwards to 4 and 6 s, sums of 3 s from 4 s on.
    assert plan.step.seconds == pytest.approx(4 + 3 + 3)
    assert plan.step.bound_s == pytest.approx(6)
    assert plan.sent_bytes == 2 * BUCKET_BYTES
    # 30 kept by each layer, 40 while the last one runs, and the gradient that it sends on.
    assert plan.peak_bytes == REST + 60 + 40 + 10


def test_parameters_gathered_again_come_while_the_device_computes() -> None:
    plan = plan_data_parallel(MODEL, a_box(2, RATE), 2, (Sharding.AGAIN,))
    # Gathers end at 1.5 and 3 s, the forwards at 2.5 and 4; the last layer's parameters stay, the
    # first one's come again until 5.5. Backwards end at 6 and 8, the last scatter at 9.5 s.
    assert plan.step.seconds == pytest.approx(9.5)
    assert plan.sent_bytes == round((3 + 2) / 2 * BUCKET_BYTES)
    assert plan.peak_bytes == REST // 2 + 2 * 2 * BUCKET_BYTES + 60 + 40 + 10


def test_parameters_gathered_once_cross_the_network_once_a_micro_batch() -> None:
    plan = plan_data_parallel(MODEL, a_box(2, RATE), 4, (Sharding.ONCE,))
    assert (plan.replicas.micro_batches, plan.sent_bytes) == (1, 2 * BUCKET_BYTES)
    assert plan.peak_bytes == REST // 2 + 2 * 2 * BUCKET_BYTES + 2 * (60 + 40 + 10)
    # With room for one sample and one gradient at a time: two gathers of both layers, two scatters.
    box = a_box(2, RATE, plan.peak_bytes - 110 - BUCKET_BYTES, host=SMALL_HOST)
    smaller = plan_data_parallel(MODEL, box, 4, (Sharding.ONCE,))
    assert (smaller.replicas.micro_batches, smaller.sent_bytes) == (2, 4 * BUCKET_BYTES)
    gathers = [span for span in smaller.step.timeline.spans if span.name.startswith("gather")]
    assert len(gathers) == 4


def test_one_device_is_taken_where_the_network_takes_more_than_it_saves() -> None:
    assert plan_data_parallel(MODEL, a_box(2, RATE / 100), 2).devices == 1
    assert plan_data_parallel(MODEL, a_box(2, RATE / 100), 2, SHARD).devices == 1


def test_micro_batches_and_layers_that_run_again_are_for_memory() -> None:
    def settings(room: int) -> tuple[int, bool]:
        box = a_box(1, 1e18, REST + room, host=SMALL_HOST)
        plan = plan_data_parallel(MODEL, box, 4)
        assert plan.missing_bytes == max(0, 100 - room)
        return plan.replicas.micro_batch, plan.recompute

    assert settings(4 * 110) == (4, False)
    assert settings(4 * 110 - 1) == (2, False)
    # Each layer keeps 10, the last one takes 70 and the gradient that it sends on.
    assert settings(110 - 1) == (1, True)
    assert settings(100 - 1) == (1, True)


def test_where_nothing_fits_the_answer_says_how_much_is_missing() -> None:
    plan = plan_data_parallel(MODEL, a_box(2, RATE, REST, host=SMALL_HOST), 2)
    assert plan.peak_bytes is not None
    assert plan.missing_bytes == plan.peak_bytes - REST > 0


def test_a_profile_without_peaks_has_a_time_and_no_peak() -> None:
    blind = replace(
        MODEL, layers=tuple(replace(layer, backward_peak_bytes=None) for layer in MODEL.layers)
    )
    plan = plan_data_parallel(blind, a_box(2, RATE), 4)
    assert (plan.peak_bytes, plan.replicas.micro_batches) == (None, 1)


def test_samples_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(OptionError, match="3 samples are not shared evenly by 2 devices"):
        plan_data_parallel(MODEL, a_box(2, RATE), 3, counts=[2])
    assert plan_data_parallel(MODEL, a_box(2, RATE), 3).devices == 1
    with pytest.raises(OptionError, match="at least one sample"):
        plan_data_parallel(MODEL, a_box(2, RATE), 0)


def test_the_first_devices_of_a_cluster_are_a_cluster() -> None:
    cluster = find_cluster("2x8xa100")
    part = first_devices(cluster, 11)
    assert [group.device_count for group in part.groups] == [8, 3]
    assert (len(part.devices), part.ring) == (11, cluster.ring)
    alone = first_devices(find_cluster("4xrtx4090-4xa6000"), 5)
    assert [gib >> 30 for gib in alone.capacities_bytes] == [21] * 4 + [44]
    helped = first_devices(find_cluster("32xv100-16cpu"), 1)
    assert (helped.ring, helped.cpu_machines) == (None, 16)
    with pytest.raises(OptionError, match="1 to 16 devices"):
        first_devices(cluster, 17)


@examples(30)
@given(
    slowness=st.lists(st.sampled_from((1.0, 1.5, 2.0, 3.7)), min_size=1, max_size=4),
    batch=st.integers(4, 9),
)
def test_shares_by_speed_are_done_first(slowness: list[float], batch: int) -> None:
    """Of all ways to share a batch, the last device is done first in this one."""
    found = samples_by_speed(slowness, batch)
    ways = (way for way in product(range(1, batch + 1), repeat=len(slowness)) if sum(way) == batch)
    best = min(max(map(mul, way, slowness)) for way in ways)
    assert sum(found) == batch
    assert max(map(mul, found, slowness)) == best


def two_kinds() -> Cluster:
    """Two devices named fast and two named slow in one box."""
    (group,) = a_box(2, RATE * 1000).groups
    one = a_device(10**15, RATE * 1000).one
    devices = tuple(Devices(one.but(name=name), 2) for name in ("fast", "slow"))
    return Cluster("two kinds", (replace(group, devices=devices),))


def test_a_slow_kind_of_device_gets_fewer_samples() -> None:
    """Two devices that are three times as slow as two others share 16 samples with them."""
    cluster = two_kinds()
    model = replace(MODEL, slowness={"fast": 1.0, "slow": 3.0})
    for shardings in ((Sharding.REPLICATE,), SHARD):
        plan = plan_data_parallel(model, cluster, 16, shardings)
        assert plan.by_speed == (6, 6, 2, 2)
        assert plan.replicas.samples == (6, 2)
        # Forward and backward of two layers: three seconds a sample each.
        assert plan.step.seconds >= 36
        equal = plan_data_parallel(replace(model, slowness={}), cluster, 16, shardings)
        assert equal.by_speed == ()
        assert plan.step.seconds < 3 * equal.step.seconds
        assert dict(lanes_s(plan.replicas)) == pytest.approx(dict(plan.step.lanes_s))
        assert plan.peaks_bytes is not None
        fast, _, slow, _ = plan.peaks_bytes
        assert fast > slow


@examples(25)
@given(
    layers=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=4),
    kept=st.sampled_from((30, BUCKET_BYTES, 3 * BUCKET_BYTES)),
    room=st.integers(3, 40),
    rate=st.sampled_from((0.3, 3.0, 30.0)),
    update=st.sampled_from((1.0, 1e9)),
    sharding=st.sampled_from(Sharding),
)
def test_no_step_passes_under_its_bound(
    layers: list[int], kept: int, room: int, rate: float, update: float, sharding: Sharding
) -> None:
    """Whatever rests on the host, also with one unit whole at once."""
    model = a_model([n * BUCKET_BYTES for n in layers], per_sample(kept))
    box = a_box(2, rate * BUCKET_BYTES, room * BUCKET_BYTES, update=HostUpdate(update * 1e9))
    plan = plan_data_parallel(model, box, 4, (sharding,), counts=[2])
    for made in [*plan.plans(), *plan.one_at_a_time.plans()]:
        assert plan.passes_s <= made.least_s <= made.step.seconds
