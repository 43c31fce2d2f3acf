"""Clipping: any small step with a factor that follows from all its gradients, as one is clipped."""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role

COEFFICIENT = "coef"


def clipped(dataflow: Dataflow) -> Dataflow:
    """`dataflow` with every update behind an op `clip`, which reads all gradients."""
    position = {name: i for i, op in enumerate(dataflow.ops) for name in op.writes}
    updates = {name for group in dataflow.updates for name in group.ops}
    last = max(position.get(group.gradient, 0) for group in dataflow.updates)
    assert all(dataflow.position[name] > last for name in updates), "an update is in the backward"
    gradients = tuple(dict.fromkeys(group.gradient for group in dataflow.updates))
    clip = Op(
        "clip", "aten.clamp.default", Phase.OPTIMIZER, gradients, (COEFFICIENT,), 10, 1_000_000
    )
    first = {group.ops[0] for group in dataflow.updates}
    behind = [
        replace(op, reads=(*op.reads, COEFFICIENT)) if op.name in first else op
        for op in dataflow.ops[last + 1 :]
    ]
    return replace(
        dataflow,
        ops=(*dataflow.ops[: last + 1], clip, *behind),
        buffers=(*dataflow.buffers, Buffer(COEFFICIENT, 4, Role.TEMPORARY)),
        updates=tuple(
            replace(group, scalars=(*group.scalars, COEFFICIENT)) for group in dataflow.updates
        ),
        fingerprint=f"{dataflow.fingerprint}-clipped",
    )
