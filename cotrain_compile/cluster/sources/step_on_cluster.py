"""A traced step on a cluster: its layer profile, with all kinds of devices and the cluster's host.

In: a `Dataflow` with symbols and a `Cluster`. Out: a `LayerProfile` whose seconds are those of the
first device, with how many times as long the roofline of every other kind takes for the whole step.
Updates on the host are those of that device's host, all of it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cotrain_compile.analysis.costs import roofline
from cotrain_compile.cluster.model.description import Cluster
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.sources.traced_profile import SAMPLES, profile_of_step
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Machine


def profile_on_cluster(
    name: str,
    step: Dataflow,
    cluster: Cluster,
    symbols: Sequence[str] = (),
    *,
    samples: Sequence[int] = SAMPLES,
    tokens_per_sample: int = 1,
) -> LayerProfile:
    """`profile_of_step` on the devices of `cluster`, and raises as it does."""
    kinds = {
        one.name: one.but(host=group.host, host_update=group.host_update)
        for group in cluster.groups
        for one in group.each
    }
    first, *others = [kinds[kind] for kind in dict.fromkeys(cluster.kinds)]
    profile = profile_of_step(
        name,
        runnable_on(step, first),
        first,
        symbols,
        samples=samples,
        tokens_per_sample=tokens_per_sample,
    )
    first_s = _device_s(step, first)
    slowness = {other.name: _device_s(step, other) / first_s for other in others}
    return replace(profile, slowness=slowness)


def _device_s(step: Dataflow, machine: Machine) -> float:
    return sum(roofline(runnable_on(step, machine), machine).device_s.values())


def runnable_on(step: Dataflow, machine: Machine) -> Dataflow:
    """The step in float16 on a device that has no rate for bfloat16 but one for float16."""
    rates = machine.device.flops_per_s
    if "bfloat16" in rates or "float16" not in rates:
        return step
    half = (replace(op, dtype="float16") if op.dtype == "bfloat16" else op for op in step.ops)
    return replace(step, ops=tuple(half))
