"""A step on a cluster: kinds of devices differ by their roofline, hosts are the cluster's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.cluster.answer.strategies import AS_FAST, answer
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.sources.traced_profile import profile_on_cluster
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.presets import find
from tests.unit.cluster.test_traced_profile import step

MIXED = find_cluster("4xrtx4090-4xa6000")


def computing() -> Dataflow:
    """The step with so many flops that nothing else takes time."""
    whole = step()
    ops = (
        replace(op, flops=10**15, dtype="bfloat16") if op.name == "f1" else op for op in whole.ops
    )
    return replace(whole, ops=tuple(ops))


def test_a_kind_is_as_many_times_slower_as_its_roofline() -> None:
    profile = profile_on_cluster("net", computing(), MIXED)
    fast, slow = (find(name).device.flops_per_s["bfloat16"] for name in ("rtx4090", "a6000"))
    assert profile.slowness == {"a6000": pytest.approx(fast / slow, rel=1e-3)}
    assert AS_FAST not in answer(profile, MIXED, 8, ["replicate"]).assumed
    unknown = answer(replace(profile, slowness={}), MIXED, 8, ["replicate"])
    assert AS_FAST in unknown.assumed


def test_updates_are_those_of_the_cluster_s_host() -> None:
    (group,) = MIXED.groups
    slow = replace(group, host_update=replace(group.host_update, bytes_per_s=1000.0))
    profile = profile_on_cluster("net", step(), replace(MIXED, groups=(slow,)))
    assert profile.layers[0].host_update_s == pytest.approx(3 * 40 / 1000, rel=1e-3)


def test_a_card_without_bfloat16_takes_float16() -> None:
    profile = profile_on_cluster("net", computing(), find_cluster("8xv100"))
    device = find("v100-dgx2").device
    product_s = 10**15 / device.flops_per_s["float16"]
    assert profile.layers[1].forward_s.at(1) == pytest.approx(
        device.factors["product"] * product_s, rel=1e-3
    )
