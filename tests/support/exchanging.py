"""A step whose gradients are reduced over ranks, made of one that reduces none."""

from __future__ import annotations

from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Collective, Dataflow, Op, Phase, Role

RANKS = 4
ORDER = Buffer("group.0", 0, Role.GROUP, is_input=True, is_output=True)


def exchanging(dataflow: Dataflow, most_under_way: int, kind: str = "all_reduce") -> Dataflow:
    """`dataflow` with an exchange behind each gradient, which its readers see the result of.

    It is awaited before the first of them, or when so many others have begun.
    """
    gradients = {
        group.gradient
        for group in dataflow.updates
        if dataflow.buffer[group.gradient].role is Role.TEMPORARY
        and not dataflow.buffer[group.gradient].is_output
    }
    made = {g: max(i for i, op in enumerate(dataflow.ops) if g in op.writes) for g in gradients}
    ops: list[Op] = []
    waiting: list[str] = []
    for index, op in enumerate(dataflow.ops):
        seen = {name for name in op.reads if name in made and made[name] < index}
        for name in [name for name in waiting if name in seen]:
            waiting.remove(name)
            ops.append(_wait(name))
        reads = tuple(_mean(name) if name in seen else name for name in op.reads)
        ops.append(replace(op, reads=reads))
        for name in sorted(name for name in gradients if made[name] == index):
            ops.append(_reduce(name, dataflow.buffer[name].nbytes, kind))
            waiting.append(name)
            if len(waiting) > most_under_way:
                ops.append(_wait(waiting.pop(0)))
    ops += map(_wait, waiting)
    means = [Buffer(_mean(name), dataflow.buffer[name].nbytes, Role.TEMPORARY) for name in made]
    updates = tuple(
        replace(group, gradient=_mean(group.gradient)) if group.gradient in made else group
        for group in dataflow.updates
    )
    return replace(
        dataflow,
        ops=tuple(ops),
        buffers=(*dataflow.buffers, *sorted(means, key=lambda b: b.name), ORDER),
        updates=updates,
    )


def _mean(gradient: str) -> str:
    return f"{gradient}.mean"


def _reduce(gradient: str, nbytes: int, kind: str) -> Op:
    return Op(
        f"reduce.{gradient}",
        kind,
        Phase.BACKWARD,
        (gradient, ORDER.name),
        (_mean(gradient), ORDER.name),
        bytes_moved=2 * nbytes,
        cost_is_known=False,
        collective=Collective(kind, RANKS, nbytes),
    )


def _wait(gradient: str) -> Op:
    mean = (_mean(gradient),)
    return Op(
        f"wait.{gradient}",
        "wait_tensor",
        Phase.BACKWARD,
        mean,
        mean,
        awaits=f"reduce.{gradient}",
    )
