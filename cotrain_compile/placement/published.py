"""Published: the rules of other systems that offload, as policies to compare with.

`PUBLISHED` has them by name, `any_rule` these and those of `policies`. What they move is read from
their papers and code; `auto` can do all of it, and so tries none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, Phase
from cotrain_compile.machine import Tier
from cotrain_compile.placement.policies import RULES, rule, zero_offload
from cotrain_compile.placement.recompute.rewrite import recomputed
from cotrain_compile.placement.residency import (
    device_program,
    low_precision_copies,
    low_precision_makers,
)
from cotrain_compile.plan import Placement
from cotrain_compile.plan.on_disk import RESTING_RULE, may_rest_on_disk, weight_may_rest


def torchao_offload(dataflow: Dataflow) -> Placement:
    """As torchao's `CPUOffloadOptimizer` with `offload_gradients`.

    As ZeRO-Offload's, but a parameter has one dtype everywhere and comes up as it is, so that 4
    bytes of a bfloat16 one cross the link in all and 6 of a float32 one, which the device casts.
    Torchao sends the gradient of that down in float32, 2 bytes more than are sent here.
    """
    return replace(zero_offload(dataflow), policy="torchao-offload", fetched_whole=True)


def zero_infinity(dataflow: Dataflow) -> Placement:
    """ZeRO-Infinity's rule (Rajbhandari et al., SC 2021), with all that it offloads on the CPU.

    As ZeRO-Offload's, and the low-precision parameters rest there too: they come up for the forward
    and again for the backward. 6 bytes a parameter cross the link.
    """
    return _fetched_twice(dataflow, replace(zero_offload(dataflow), policy="zero-infinity"))


def zero_infinity_nvme(dataflow: Dataflow) -> Placement:
    """The same with `offload_optimizer` and `offload_param` on NVMe.

    States and masters rest on the drive. Of a float32 parameter a step reads 20 bytes and writes
    12: all for the update, and masters for the forward and again for the backward. Its paper counts
    16 each way for the update (section 4), with gradients, which the host keeps here, and beside
    them low-precision parameters: 4 bytes read, 2 written.
    """
    base = zero_infinity(dataflow)
    hosted = [group for group in dataflow.updates if base.is_off_device(group.param)]
    states = (name for group in hosted for name in may_rest_on_disk(dataflow, group))
    weights = (group.param for group in hosted if weight_may_rest(dataflow, group.param))
    resting = dict.fromkeys((*states, *weights), Tier.DISK)
    return replace(base, policy=RESTING_RULE, homes={**base.homes, **resting})


def fsdp_offload(dataflow: Dataflow) -> Placement:
    """As FSDP2 with `CPUOffloadPolicy` and `reshard_after_forward`, on one rank.

    Parameters and states rest on the host, every update runs there behind the backward. Whole
    parameters come up for the forward and again for the backward, and the device casts them each
    time: 6 bytes of a bfloat16 one cross the link in all, 10 of a float32 one. FSDP widens the
    gradient of that before it goes down, 2 bytes more than are sent here.
    """
    base = replace(torchao_offload(dataflow), policy="fsdp-offload")
    casts = [
        copy for param, copy in low_precision_copies(dataflow).items() if base.is_off_device(param)
    ]
    cast_again = tuple(name for name in casts if _is_kept(dataflow, name))
    twice = replace(base, recomputed=cast_again)
    return _fetched_twice(recomputed(dataflow, cast_again), twice)


def any_rule(name: str) -> Callable[[Dataflow], Placement]:
    """The rule called `name`, of another system or of ours."""
    return PUBLISHED[name] if name in PUBLISHED else rule(name)


PUBLISHED: Mapping[str, Callable[[Dataflow], Placement]] = {
    "torchao-offload": torchao_offload,
    "zero-infinity": zero_infinity,
    RESTING_RULE: zero_infinity_nvme,
    "fsdp-offload": fsdp_offload,
}
EVERY_RULE = (*RULES, *PUBLISHED)


def _fetched_twice(dataflow: Dataflow, placement: Placement) -> Placement:
    """With every fetched weight offloaded between the forward and the backward where it can be."""
    program = device_program(dataflow, placement)
    touches, order = program.touches, program.order
    offloaded = [
        fetched
        for fetched in program.fetched.values()
        if order.longest_gap(touches.get(fetched, ())) is not None
    ]
    return replace(placement, offloaded=tuple(offloaded))


def _is_kept(dataflow: Dataflow, cast: str) -> bool:
    """Whether one op of the forward makes it, and one behind the forward reads it."""
    makers = low_precision_makers(dataflow)[cast]
    made = [dataflow.ops[dataflow.position[name]] for name in makers]
    behind = (op for op in dataflow.ops if op.phase is not Phase.FORWARD)
    return [op.phase for op in made] == [Phase.FORWARD] and any(cast in op.reads for op in behind)
