"""Unusual steps: updates that read what ops without arguments make, and gradients of a forward.

An optimizer that makes its state in its first step, as GaLore or Shampoo does, starts from `eye`
or `zeros`, of which views are taken and that ops outside its updates read too. Under
`vmap(grad(...))` all that autograd does is in the forward, where values rest between their uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup

# Who reads what a factory op makes for an update. In each the update itself does, but in "none".
KINDS = (
    "none",  # there is no factory op
    "alone",
    "view",  # and a view of it
    "projected",  # an op that makes the gradient of the update of it and of the one before
    "viewed and projected",
    "chained",  # the update reads a copy of it, and the projection reads what was copied
    "in place",  # an op that writes into it, before the update
    "shared",  # the projections and updates of all parameters of this kind
)


def with_factories(dataflow: Dataflow, kinds: Mapping[str, str], *, is_output: bool) -> Dataflow:
    """`dataflow` with a factory op for each update, of one of `KINDS` by parameter.

    What it makes outlives the step where it `is_output`, as a new state does.
    """
    made = _Made([], [])
    ops = {op.name: op for op in dataflow.ops}
    before: dict[str, list[Op]] = {}
    updates = []
    shared: list[str] = []
    for group in dataflow.updates:
        kind = kinds[group.param]
        if kind == "none":
            updates.append(group)
            continue
        made.ops = before.setdefault(group.ops[0], [])
        nbytes = dataflow.buffer[group.param].nbytes
        name = "eye.shared" if kind == "shared" else f"eye.{group.param}"
        if name not in shared:
            made.op(f"make.{name}", (), name, nbytes, is_output=is_output)
        shared += [name] if kind == "shared" else []
        if kind.startswith(("view", "chained")):
            made.ops.append(
                Op(f"permute.{name}", "aten.permute.default", Phase.OPTIMIZER, (name,), ())
            )
        if kind == "in place":
            made.ops.append(_op(f"add.{name}", (name,), (name,), nbytes))
        read, gradient = name, group.gradient
        if kind == "chained":
            read = f"copy.{name}"
            made.op(f"to.{name}", (name,), read, nbytes, is_output=is_output)
        if kind in ("projected", "viewed and projected", "chained", "shared"):
            gradient = f"projected.{group.param}"
            made.op(f"project.{group.param}", (name, group.gradient), gradient, nbytes)
        for number, op in enumerate(ops[each] for each in group.ops):
            reads = tuple(gradient if each == group.gradient else each for each in op.reads)
            ops[op.name] = replace(op, reads=(*reads, read) if number == 0 else reads)
        updates.append(replace(group, gradient=gradient))
    return replace(
        dataflow,
        fingerprint=f"{dataflow.fingerprint}-factories",
        ops=tuple(each for op in dataflow.ops for each in (*before.get(op.name, ()), ops[op.name])),
        buffers=(*dataflow.buffers, *made.buffers),
        updates=tuple(updates),
    )


class _Made:
    def __init__(self, ops: list[Op], buffers: list[Buffer]) -> None:
        self.ops, self.buffers = ops, buffers

    def op(
        self, name: str, reads: tuple[str, ...], write: str, nbytes: int, *, is_output: bool = False
    ) -> None:
        """An op of the optimizer that makes `write`."""
        self.ops.append(_op(name, reads, (write,), nbytes))
        self.buffers.append(Buffer(write, nbytes, Role.TEMPORARY, is_output=is_output))


def _op(name: str, reads: tuple[str, ...], writes: tuple[str, ...], nbytes: int) -> Op:
    return Op(name, "aten.mm.default", Phase.OPTIMIZER, reads, writes, nbytes, 2 * nbytes)


def per_sample_step(layers: int, unit: int, samples: int) -> Dataflow:
    """Gradients of each sample in the forward, weighed by their norm over all layers.

    Per layer i: h_i = mm(h_i-1, w_i) and, behind the last, s_i = bmm(h_i-1, h_i), which the norm
    and then the clipped sum g_i read, that is the gradient of the update of w_i and m_i.
    """
    buffers = [Buffer("x", unit, Role.BATCH, is_input=True)]
    forward, per_sample, clipped, optimizer, updates = [], [], [], [], []
    for i in range(layers):
        h, s, g, w, m = (f"{letter}{i}" for letter in "hsgwm")
        before = f"h{i - 1}" if i else "x"
        buffers += [
            Buffer(w, unit, Role.PARAM, is_input=True),
            Buffer(m, unit, Role.OPTIMIZER_STATE, is_input=True),
            Buffer(h, unit, Role.TEMPORARY),
            Buffer(s, samples * unit, Role.TEMPORARY),
            Buffer(g, unit, Role.TEMPORARY),
        ]
        forward.append(_run(f"mm{i}", Phase.FORWARD, (before, w), h, unit))
        per_sample.append(_run(f"bmm{i}", Phase.FORWARD, (before, h), s, samples * unit))
        clipped.append(_run(f"clip{i}", Phase.BACKWARD, (s, "norm"), g, samples * unit))
        moved = 4 * unit
        optimizer.append(
            Op(f"update{i}", "aten.add_", Phase.OPTIMIZER, (g, w, m), (w, m), unit, moved)
        )
        updates.append(UpdateGroup(w, g, (m,), (), (f"update{i}",)))
    buffers += [Buffer("norms", 4 * samples, Role.TEMPORARY, is_output=True)]
    buffers += [Buffer("norm", 4, Role.TEMPORARY, is_output=True)]
    all_of_them = tuple(f"s{i}" for i in range(layers))
    norms = _run("norms", Phase.FORWARD, all_of_them, "norms", unit)
    norm = _run("norm", Phase.FORWARD, ("norms", *all_of_them[:1]), "norm", 4)
    ops = (*forward, *per_sample, norms, norm, *clipped, *optimizer)
    return Dataflow(f"per-sample-{layers}", ops, tuple(buffers), tuple(updates))


def _run(name: str, phase: Phase, reads: tuple[str, ...], write: str, nbytes: int) -> Op:
    return Op(
        name,
        f"aten.{name.rstrip('0123456789')}.default",
        phase,
        reads,
        (write,),
        nbytes,
        3 * nbytes,
    )
