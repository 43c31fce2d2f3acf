"""Small dataflows for tests: a chain of layers, a mixed-precision Adam step, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup

CAST = "aten._to_copy.default"


def chain(layers: int, *, width: int = 64, batch: int = 8) -> Dataflow:
    """`layers` linear layers in float32 with momentum SGD: names w0, a0 (input), h0, g0, m0.

    Ops: forward_i, loss, backward_i (both gradients at once), update_i. Every matrix is
    width x width, every activation batch x width, 4 bytes each.
    """
    weight_bytes, act_bytes = 4 * width * width, 4 * batch * width
    matmul_flops = 2 * batch * width * width
    buffers = [Buffer("x", act_bytes, Role.BATCH, is_input=True)]
    buffers += [Buffer("loss", 4, Role.TEMPORARY, is_output=True)]
    forward, backward, optimizer, updates = [], [], [], []
    for i in range(layers):
        before = f"h{i - 1}" if i else "x"
        buffers += [
            _kept(f"w{i}", weight_bytes, Role.PARAM),
            _kept(f"m{i}", weight_bytes, Role.OPTIMIZER_STATE),
            Buffer(f"h{i}", act_bytes, Role.TEMPORARY),
            Buffer(f"d{i}", act_bytes, Role.TEMPORARY),
            Buffer(f"g{i}", weight_bytes, Role.TEMPORARY),
        ]
        sizes = (matmul_flops, weight_bytes + 2 * act_bytes)
        forward.append(_op(f"forward_{i}", Phase.FORWARD, (before, f"w{i}"), (f"h{i}",), *sizes))
        wrote = (f"g{i}", f"d{i - 1}") if i else ("g0",)
        backward.append(
            _op(
                f"backward_{i}",
                Phase.BACKWARD,
                (f"d{i}", before, f"w{i}"),
                wrote,
                2 * matmul_flops,
                2 * weight_bytes + 3 * act_bytes,
            )
        )
        optimizer.append(_update(i, (f"g{i}", f"w{i}", f"m{i}"), weight_bytes))
        updates.append(UpdateGroup(f"w{i}", f"g{i}", (f"m{i}",), (), (f"update_{i}",)))
    last = layers - 1
    loss = _op(
        "loss", Phase.FORWARD, (f"h{last}",), ("loss", f"d{last}"), batch * width, 2 * act_bytes
    )
    ops = (*forward, loss, *reversed(backward), *optimizer)
    return Dataflow(f"chain-{layers}", ops, tuple(buffers), tuple(updates))


def mixed_precision_step(layers: int, *, params: int = 1000, batch_bytes: int = 64) -> Dataflow:
    """`layers` layers of `params` parameters each, bfloat16 compute, float32 master weights, Adam.

    Per layer i: p32_i -cast-> p16_i, matmuls forward and backward, g16_i -cast-> g32_i, update of
    p32_i, m_i and v_i with the shared scalar lr.
    """
    buffers = [
        Buffer("x", batch_bytes, Role.BATCH, is_input=True),
        Buffer("lr", 4, Role.HYPERPARAMETER, is_input=True),
    ]
    forward, backward, optimizer, updates = [], [], [], []
    for i in range(layers):
        before = f"h{i - 1}" if i else "x"
        p32, p16, g16, g32, m, v = (f"{n}_{i}" for n in ("p32", "p16", "g16", "g32", "m", "v"))
        buffers += [_kept(p32, 4 * params, Role.PARAM)]
        buffers += [_kept(state, 4 * params, Role.OPTIMIZER_STATE) for state in (m, v)]
        buffers += [Buffer(half, 2 * params, Role.TEMPORARY) for half in (p16, g16)]
        buffers += [Buffer(g32, 4 * params, Role.TEMPORARY)]
        buffers += [Buffer(act, batch_bytes, Role.TEMPORARY) for act in (f"h{i}", f"d{i}")]
        forward += [
            Op(f"cast_p_{i}", CAST, Phase.FORWARD, (p32,), (p16,), 0, 6 * params),
            _op(f"forward_{i}", Phase.FORWARD, (before, p16), (f"h{i}",), 2 * params, 2 * params),
        ]
        wrote = (g16, f"d{i - 1}") if i else (g16,)
        reads = (f"d{i}" if i < layers - 1 else f"h{i}", before, p16)
        backward.append(_op(f"backward_{i}", Phase.BACKWARD, reads, wrote, 4 * params, 4 * params))
        optimizer += [
            Op(f"cast_g_{i}", CAST, Phase.OPTIMIZER, (g16,), (g32,), 0, 6 * params),
            _update(i, (g32, p32, m, v, "lr"), 4 * params),
        ]
        updates.append(UpdateGroup(p32, g16, (m, v), ("lr",), (f"cast_g_{i}", f"update_{i}"), p16))
    ops = (*forward, *reversed(backward), *optimizer)
    return Dataflow(f"mixed-{layers}", ops, tuple(buffers), tuple(updates))


@st.composite
def random_dataflows(draw: st.DrawFn, max_ops: int = 12) -> Dataflow:
    """Any valid step: unique names, every buffer an input or written before it is read."""
    inputs = draw(st.integers(1, 4))
    roles = st.sampled_from([role for role in Role if role is not Role.TEMPORARY])
    sizes = st.integers(0, 1 << 40)
    buffers = [
        Buffer(f"in{i}", draw(sizes), draw(roles), is_input=True, is_output=draw(st.booleans()))
        for i in range(inputs)
    ]
    ops = []
    for index in range(draw(st.integers(0, max_ops))):
        known = [buffer.name for buffer in buffers]
        reads = draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
        writes = draw(st.lists(st.sampled_from(known), unique=True, max_size=1))
        for fresh in range(draw(st.integers(0, 2))):
            name = f"t{index}_{fresh}"
            buffers.append(Buffer(name, draw(sizes), Role.TEMPORARY, is_output=draw(st.booleans())))
            writes.append(name)
        flops, moved = draw(st.tuples(sizes, sizes))
        phase = draw(st.sampled_from(Phase))
        ops.append(_op(f"op{index}", phase, tuple(reads), tuple(writes), flops, moved))
    return Dataflow("random", tuple(ops), tuple(buffers))


def _kept(name: str, nbytes: int, role: Role) -> Buffer:
    return Buffer(name, nbytes, role, is_input=True)


def _op(
    name: str,
    phase: Phase,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    flops: int,
    bytes_moved: int,
) -> Op:
    return Op(name, f"test.{name.rstrip('0123456789_')}", phase, reads, writes, flops, bytes_moved)


def _update(i: int, reads: tuple[str, ...], param_bytes: int) -> Op:
    """The update of layer `i`: reads the gradient first, rewrites every float tensor after it."""
    writes = tuple(name for name in reads[1:] if name != "lr")
    moved = param_bytes * (len(writes) * 2 + 1)
    return _op(f"update_{i}", Phase.OPTIMIZER, reads, writes, param_bytes, moved)
